"""Shows a run, while it trains and afterwards. Reads only logs and files."""
