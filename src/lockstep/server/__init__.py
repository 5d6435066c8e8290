"""`lockstep serve`: starts vLLM's own server with what training needs, guards it with a key, and restarts it."""
