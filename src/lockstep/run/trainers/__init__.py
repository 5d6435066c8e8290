"""One trainer per method. All share one loop, and `online.py` is their base."""
