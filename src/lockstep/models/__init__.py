"""A name becomes a model: the packaged one, a local directory, or a hub id."""
