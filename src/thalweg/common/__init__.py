"""What several families share: input checks, random streams, optional imports, progress."""
