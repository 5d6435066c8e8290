"""vLLM servers over HTTP: calls, messages, and the proof that both ends hold the key."""
