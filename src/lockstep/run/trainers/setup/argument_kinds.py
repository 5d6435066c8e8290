"""Checks the kinds of the objects that a user gives to a trainer, before any of them is used.

A wrong kind would otherwise end in an error of another library.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from lockstep.errors import InputError, LockstepError
from lockstep.models.adapters import causal_model


def check_kinds(model: Any, tokenizer: Any, callbacks: Any, optimizers: Any, engine: Any) -> None:
    """Check the kinds of a constructor's arguments.

    Raises:
        InputError: an argument has another kind than its name says.
    """
    check_model_kind(model)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(
            f"processing_class is a {_kind(tokenizer)}; it must be a tokenizer of transformers, or a processor with a tokenizer"
        )
    if callbacks is not None and not (isinstance(callbacks, list | tuple) and all(map(_is_callback, callbacks))):
        raise InputError(f"callbacks is {callbacks!r:.80}; it must be a list of transformers.TrainerCallback")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise InputError(
            f"optimizers is {optimizers!r:.80}; it must be a pair: an optimizer and a learning-rate schedule"
        )
    if engine is not None and not all(hasattr(engine, name) for name in ("settings", "generate", "score", "load")):
        raise InputError(f"engine is a {_kind(engine)}; it must be an engine of lockstep.engines")


def check_model_kind(model: Any) -> None:
    """Check that a trainer's model is a name or a causal language model of transformers, maybe with an adapter.

    Raises:
        InputError: it is something else.
    """
    if isinstance(model, str):
        return
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(
            f"model is a {_kind(model)}; it must be a name, a directory as text, a hub id, or a causal language "
            "model of transformers"
        )
    inner = causal_model(model)
    if inner.get_output_embeddings() is None:
        raise InputError(f"model is a {_kind(inner)}, which has no output head; give a causal language model")


def check_open(is_closed: bool) -> None:
    """Refuse to work with a trainer whose engine is closed.

    Raises:
        LockstepError: `close` was called.
    """
    if is_closed:
        raise LockstepError("the trainer is closed (close() was called); make a new one")


def _is_callback(given: Any) -> bool:
    return isinstance(given, TrainerCallback) or (isinstance(given, type) and issubclass(given, TrainerCallback))


def _kind(given: Any) -> str:
    return type(given).__name__
