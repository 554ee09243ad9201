"""``python -m thalweg``."""

from thalweg.cli import main

main()
