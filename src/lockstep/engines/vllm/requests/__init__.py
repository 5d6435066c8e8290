"""Requests and answers in vLLM's form: sampling parameters, pictures, completions."""
