"""Claims of the family ``combinatorial``."""
