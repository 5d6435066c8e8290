"""The fields of a run: what all methods share, in TRL's names, and what the fields mean to engines."""
