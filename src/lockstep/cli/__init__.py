"""The command line: `main.py` finds a command."""
