"""Environments that were installed before the receiving half moved have this module as vLLM's entry point."""

from lockstep.engines.vllm.plugin import register

__all__ = ["register"]
