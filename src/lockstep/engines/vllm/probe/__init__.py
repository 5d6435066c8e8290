"""The engine's part of the probes: the modules in vLLM's workers, and how they are split or quantised."""
