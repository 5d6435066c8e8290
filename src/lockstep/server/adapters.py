"""Further arguments of a server to which adapters are pushed alone (`lockstep serve MODEL --enable_lora`).

Each of them is added to the command line, unless the user has given it.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.model_files import build_empty, load_files

# vLLM's server opens its endpoints for adapters only with this environment variable.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# Number of adapters that may compute in one step. Requests end with the adapter that they began with, so that the two newest
# adapters may be in use at the same time.
_AT_ONCE = 2
# Number of adapters in main memory. Several runs may share a server, and each may have several adapters with running requests.
_HELD = 16


def adapter_flags(model: str, given: set[str]) -> list[str]:
    """The part of the command line for adapters: flags and their values.

    Args:
        model: directory or hub id.
        given: the names of the arguments that the user has given.
    """
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
    """The names of a model's linear layers, without the output head. Empty: transformers does not know the model, and vLLM chooses.

    By default vLLM also puts LoRA layers around the embedding and the head. These cost time, and no adapter of ours uses them.
    """
    try:
        with torch.device("meta"):
            empty_model = build_empty(AutoModelForCausalLM, load_files(AutoConfig, model))
    except (ValueError, KeyError, ImportError):
        return []
    head = empty_model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in empty_model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
    )
