"""Known faults of this field, injected into the real code on a user's model and engine, to see which proof catches each."""
