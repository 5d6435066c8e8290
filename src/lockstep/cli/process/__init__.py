"""The process of a command: its memory, its guard, and the log of its libraries."""
