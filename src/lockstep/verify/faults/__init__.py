"""The faults of this field, injected into the real code on a user's own model and engine, to see which proof catches each."""
