"""The entry point of environments that were installed before the plugin moved to `engines/vllm/plugin.py`."""

from importlib import import_module

# Not an import, because a push knows no engine.
register = import_module("lockstep.engines.vllm.plugin").register
