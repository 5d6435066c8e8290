"""One trainer per method. All trainers share one loop.

`online.py` is the base of all trainers. It checks and prepares with `setup/`, and `hooks/` has what `transformers.Trainer` calls.
"""
