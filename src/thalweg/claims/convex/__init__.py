"""Claims of the family ``convex``."""
