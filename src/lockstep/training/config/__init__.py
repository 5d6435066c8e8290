"""The configuration fields of a run: those shared by all methods, with TRL's names, and their values in the engines' terms."""
