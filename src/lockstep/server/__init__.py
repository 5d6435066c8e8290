"""`lockstep serve`: vLLM's own server, started with what training needs, behind a key, and kept alive."""
