"""Claims of the family ``bandits``."""
