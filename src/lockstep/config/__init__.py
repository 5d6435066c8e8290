"""The configuration of a run: each field is declared once (`option.py`), by subject. `run.py` inherits all of them."""
