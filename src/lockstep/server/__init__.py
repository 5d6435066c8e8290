"""`lockstep serve`: vLLM's own server, started with the options that training needs, protected by a key, and kept alive."""
