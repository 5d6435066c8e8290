"""Commands that go on from finished runs and from their models: `compare`, `rollouts`, `merge` and `evaluate`."""
