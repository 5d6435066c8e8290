"""All that depends on vLLM's release: its private names, what we replace in it, and what its releases change. One file per seam."""
