"""vLLM servers as an engine: HTTP calls, messages, and the proof that trainer and server have the same key."""
