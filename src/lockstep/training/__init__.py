"""Training: from a data set to optimizer steps. `loop.py` is where to begin reading."""
