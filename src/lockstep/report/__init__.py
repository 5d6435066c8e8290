"""A run, seen: while it goes and afterwards. Reads logs and files only."""
