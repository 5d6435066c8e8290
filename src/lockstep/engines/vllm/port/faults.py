"""Places in vLLM that only the faults of the self-test touch: what stands there, and its name."""

from __future__ import annotations

from typing import Any

Place = tuple[Any, str]


def penalties_of_first_runner() -> Place:
    """The function by which the sampler of the first model runner applies penalties."""
    from vllm.v1.sample import sampler

    return sampler, "apply_all_penalties"


def counts_of_second_runner() -> Place:
    """The function by which the second model runner counts the ids of a request."""
    from vllm.v1.worker.gpu.sample import penalties

    return penalties, "bincount"


def lora_of_linear() -> Place:
    """The method by which a linear layer adds the output of its adapter."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    return BaseLinearLayerWithLoRA, "_apply_lora_to_output"
