"""The process that a command runs in: its memory, its guard, and where libraries write."""
