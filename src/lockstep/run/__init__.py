"""A training run: the loop, the trainers around it, and the files that it leaves.

`loop.py` is where to begin reading.
"""
