"""The engine's end of a push into vLLM: what runs inside its workers."""
