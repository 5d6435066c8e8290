"""Where vLLM finds the plugin in environments that were installed before it moved. Delete it when none is left."""
