"""Arguments of vLLM for adapters alone: for vLLM beside the trainer, and for `lockstep serve MODEL --enable_lora`."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.engines.vllm.arguments import check_adapters, held_rank
from lockstep.model_files import build_empty, load_files

# vLLM's server opens its endpoints for adapters only with this environment variable.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# Adapters of one step: requests end with theirs, so that the two newest may be in use at the same time.
_AT_ONCE = 2
# Adapters in main memory, of several runs on a server, each with several in running requests.
_HELD = 16


def adapter_arguments(rank: int, layers: Collection[str]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one adapter.

    Args:
        rank: largest rank of the adapter's layers.
        layers: names of the adapted layers. vLLM puts a LoRA layer around these only, because each costs time.

    Raises:
        InputError: the rank is larger than vLLM supports.
    """
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": held_rank(rank),
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


def server_flags(model: str, dtype: torch.dtype, given: Set[str]) -> list[str]:
    """The part of a server's command line for adapters: flags and their values.

    Args:
        model: directory or hub id.
        given: the names of the arguments that the user has given. They are left out.

    Raises:
        InputError: vLLM has no adapters in this dtype.
    """
    check_adapters(dtype, "--enable_lora")
    flags: dict[str, list[str]] = {
        "max_loras": [str(_AT_ONCE)],
        "max_cpu_loras": [str(_HELD)],
        "lora_target_modules": linear_layers(model) if "lora_target_modules" not in given else [],
    }
    if "max_loras" in given:
        # vLLM demands max_cpu_loras ≥ max_loras, and chooses a fitting default itself.
        del flags["max_cpu_loras"]
    return [
        word
        for name, values in flags.items()
        if name not in given and values
        for word in ("--" + name.replace("_", "-"), *values)
    ]


def linear_layers(model: str) -> list[str]:
    """The names of a model's linear layers, without the output head; empty: transformers does not know the model.

    By default vLLM also puts LoRA layers around the embedding and the head. These cost time, and no adapter of ours
    uses them.
    """
    try:
        with torch.device("meta"):
            empty_model = build_empty(AutoModelForCausalLM, load_files(AutoConfig, model))
    except (ValueError, KeyError, ImportError):
        return []
    head, modules = empty_model.get_output_embeddings(), empty_model.named_modules()
    linear = torch.nn.Linear
    return sorted({n.rpartition(".")[2] for n, one in modules if isinstance(one, linear) and one is not head})
