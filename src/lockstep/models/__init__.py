"""From a name to a model: the packaged model, a local directory, or a hub id."""
