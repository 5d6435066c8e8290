"""What each method learns: its fields, its advantages and its loss. Nothing here knows an engine."""
