"""Claims of the family ``training``."""
