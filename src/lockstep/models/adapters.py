"""Models with adapters (PEFT), in one place: what is the causal language model, what is the policy without its adapter.

Comes from: `models/policy.py`, or a `PeftModel` of the user's. Goes to: everything that asks a model for its trunk, head or name.
An adapter stays where it is: the layers of `causal_model(model)` are the adapted ones. What an engine is to hold of it, and how,
stands in `sync/adapters.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError

# TRL's name for a frozen copy of an adapter that training began from.
REFERENCE = "ref"


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether a model is a `PeftModel`, or has layers that PEFT put in. Does not import PEFT: an adapted model's program has."""
    peft = sys.modules.get("peft")
    if peft is None or not hasattr(peft, "PeftModel"):
        return False
    if isinstance(model, peft.PeftModel):
        return True
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def causal_model(model: torch.nn.Module) -> PreTrainedModel:
    """The causal language model itself: the one inside a `PeftModel`, with its adapted layers, or the model as it is."""
    peft = sys.modules.get("peft")
    wrapped = peft is not None and hasattr(peft, "PeftModel") and isinstance(model, peft.PeftModel)
    return model.get_base_model() if wrapped else model  # type: ignore[operator]


def head_name(model: torch.nn.Module) -> str:
    """Name of the output head's weight in the base model."""
    inner = causal_model(model)
    head = inner.get_output_embeddings()
    return next(f"{name}.weight" for name, module in inner.named_modules() if module is head)


def with_adapter(model: PreTrainedModel, peft_config: Any | None, *, seed: int) -> PreTrainedModel:
    """The policy that a trainer trains: `model`, with a new adapter where `peft_config` asks for one.

    With gradient checkpointing, transformers' Trainer itself gives the frozen embeddings' outputs the gradient that blocks need.

    Raises:
        InputError: the adapter cannot be added (see `add_adapter`), or the model's own is frozen.
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
    """A `peft.PeftModel` around `model`, whose layers get LoRA's; its policy is the model's until the first step.

    Dropout of the adapter is the caller's to switch off with the model's (`models.policy.switch_off_dropout`).

    Args:
        peft_config: a `peft.LoraConfig`.
        seed: of the adapter's first weights; torch's generator is left as it was.

    Raises:
        InputError: `peft_config` is no configuration of LoRA, its layers are not in the model, or the model has an adapter.
    """
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise InputError(f"peft_config is a {type(peft_config).__name__}; give a peft.LoraConfig")
    if not isinstance(peft_config, peft.LoraConfig) or peft_config.peft_type != peft.PeftType.LORA:
        raise InputError(
            f"peft_config is a {type(peft_config).__name__}, which is not supported: only LoRA's weights can be merged for an "
            "engine; give a peft.LoraConfig"
        )
    if getattr(peft_config, "layer_replication", None):
        raise InputError("layer_replication is not supported: the engine's model has no copies of layers")
    if is_adapted(model):
        raise InputError(
            "the model has an adapter already, and peft_config asks for another: leave peft_config out to train the one that "
            "is there, or merge it, save the model and give its directory"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft_config)
        except ValueError as error:
            raise InputError(f"peft_config does not fit the model: {error}") from error


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is the policy that training began from: its adapter is off, or is the one named "ref" where there is one.

    What is active, and which parameters are trained, is put back at the end, after errors too. Weights that are trained beside
    an adapter in the base layers themselves (LoRA's `bias` other than "none") are not undone.

    Raises:
        InputError: the model is no `PeftModel`, or has several active adapters.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise InputError(
            f"a {type(model).__name__} has no adapter to switch off; keep a copy of the model as reference"
        )
    active = list(model.active_adapters)
    if len(active) != 1:
        raise InputError(f"the model has {len(active)} active adapters; exactly one is supported")
    trained = [(p, p.requires_grad) for p in model.parameters()]
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
        for parameter, was in trained:
            parameter.requires_grad_(was)
