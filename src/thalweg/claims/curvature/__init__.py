"""Claims of the family ``curvature``."""
