"""Models with adapters (PEFT): the causal language model inside, and the policy without its adapter.

A model comes from `models/policy.py`, or is a user's `PeftModel`. All code that needs a model's trunk, head or names
gets it here. The adapter stays in the model: the layers of `causal_model(model)` are the adapted ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError

# TRL's name for a frozen copy of the adapter that training started from.
REFERENCE = "ref"


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether a model is a `PeftModel`, or has PEFT layers. Without PEFT imported, there are none."""
    peft = sys.modules.get("peft")
    if peft is None or not hasattr(peft, "PeftModel"):
        return False
    if isinstance(model, peft.PeftModel):
        return True
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def causal_model(model: torch.nn.Module) -> PreTrainedModel:
    """The causal language model itself: the model inside a `PeftModel`, with its adapted layers, or `model` unchanged."""
    peft = sys.modules.get("peft")
    wrapped = peft is not None and hasattr(peft, "PeftModel") and isinstance(model, peft.PeftModel)
    return model.get_base_model() if wrapped else model  # type: ignore[operator]


def head_name(model: torch.nn.Module) -> str:
    """Name of the output head's weight in the base model."""
    inner = causal_model(model)
    head = inner.get_output_embeddings()
    return next(f"{name}.weight" for name, module in inner.named_modules() if module is head)


def with_adapter(model: PreTrainedModel, peft_config: Any | None, *, seed: int) -> PreTrainedModel:
    """The policy that a trainer trains: `model`, with a new adapter if `peft_config` is given.

    Gradient checkpointing needs embeddings whose outputs require a gradient. transformers' Trainer sets this for frozen ones.

    Raises:
        InputError: the adapter cannot be added (see `add_adapter`), or the model's own adapter is frozen.
    """
    if peft_config is not None:
        model = add_adapter(model, peft_config, seed=seed)
    if not is_adapted(model):
        return model
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "the model's adapter is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    return model


def add_adapter(model: PreTrainedModel, peft_config: Any, *, seed: int = 0) -> Any:
    """A `peft.PeftModel` around `model`, with LoRA layers. Until the first optimizer step it is the same policy as `model`.

    The adapter may have dropout. The caller switches it off together with the model's dropout (`models.policy.switch_off_dropout`).

    Args:
        peft_config: a `peft.LoraConfig`.
        seed: seed of the adapter's initial weights. The state of torch's generator does not change.

    Raises:
        InputError: `peft_config` is not a LoRA configuration, its layers are not in the model, or the model already has an
            adapter.
    """
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise InputError(f"peft_config is a {type(peft_config).__name__}; give a peft.LoraConfig")
    if not isinstance(peft_config, peft.LoraConfig) or peft_config.peft_type != peft.PeftType.LORA:
        raise InputError(
            f"peft_config is a {type(peft_config).__name__}, which is not supported (nor is any prompt-learning): only LoRA's "
            "weights can be merged for an engine; give a peft.LoraConfig"
        )
    if getattr(peft_config, "layer_replication", None):
        raise InputError("layer_replication is not supported: the engine's model has no copies of layers")
    if is_adapted(model):
        raise InputError(
            "the model has an adapter already, and peft_config asks for another: leave peft_config out to train the existing one, "
            "or merge it, save the model and give its directory"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft_config)
        except ValueError as error:
            raise InputError(f"peft_config does not fit the model: {error}") from error


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """A context in which the model is the policy that training started from.

    Its adapter is switched off, or replaced by the adapter named "ref" if the model has one. The active adapter and the
    trainable parameters are restored at the end, also after an error. Weights of the base layers that are trained with the
    adapter (LoRA's `bias` other than "none") are not restored to their old values.

    Raises:
        InputError: the model is not a `PeftModel`, or has several active adapters.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise InputError(
            f"a {type(model).__name__} has no adapter to switch off; keep a copy of the model as reference"
        )
    active = list(model.active_adapters)
    if len(active) != 1:
        raise InputError(f"the model has {len(active)} active adapters; exactly one is supported")
    gradient_flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        if REFERENCE in model.peft_config:
            model.set_adapter(REFERENCE)
            yield
        else:
            with model.disable_adapter():
                yield
    finally:
        if list(model.active_adapters) != active:
            model.set_adapter(active[0])
        for parameter, required_gradient in gradient_flags:
            parameter.requires_grad_(required_gradient)
