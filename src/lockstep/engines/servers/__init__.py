"""vLLM servers as an engine: which there are, calls and requests to them, and their messages."""
