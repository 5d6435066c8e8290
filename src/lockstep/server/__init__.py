"""`lockstep serve`: starts vLLM's own server with the options that training needs, protects it with a key, and
restarts it.
"""
