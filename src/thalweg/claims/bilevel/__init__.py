"""Claims of the family ``bilevel``."""
