"""Arguments of a server that takes adapters alone (`lockstep serve MODEL --enable_lora`), beside vLLM's own.

`server/command.py` puts them on the command line where the user has not given them.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# vLLM's servers open the endpoints for adapters only with it.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# The two newest adapters may compute in one step: requests end with the adapter that they began with.
_AT_ONCE = 2
# In main memory. Several runs may share a server, and each may have several adapters whose requests have not ended.
_HELD = 16


def adapter_words(model: str, said: set[str]) -> list[str]:
    """Words of the command line.

    Args:
        model: directory or hub id.
        said: the names of the arguments that the user has given.
    """
    words: dict[str, list[str]] = {
        "max_loras": [str(_AT_ONCE)],
        "max_cpu_loras": [str(_HELD)],
        "lora_target_modules": linear_layers(model) if "lora_target_modules" not in said else [],
    }
    if "max_loras" in said:
        # vLLM wants at least as much room as adapters at once.
        del words["max_cpu_loras"]
    return [
        word
        for name, values in words.items()
        if name not in said and values
        for word in ("--" + name.replace("_", "-"), *values)
    ]


def linear_layers(model: str) -> list[str]:
    """The names of a model's linear layers, without the output head; empty: they are not known, and vLLM chooses.

    vLLM would also put LoRA layers around embedding and head. No adapter of ours uses them, and they cost time.
    """
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except (ValueError, KeyError, ImportError):
        return []
    head = made.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in made.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
    )
