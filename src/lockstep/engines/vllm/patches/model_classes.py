"""Keeps transformers' model classes as they are while vLLM runs a model in the trainer's process.

For some architectures vLLM has no model of its own (Phi, GPT-NeoX, OLMo 2, …). It then uses its Transformers backend: it makes the
model of transformers, and replaces `__init__` and `__call__` of the model's class, for `torch.compile`. The trainer's model has the
same class, so that its calls would fail or skip its hooks. `engines/vllm/in_process.py` starts vLLM inside the context manager of
this module. Afterwards vLLM's model has a new class with the replaced methods, and the class of transformers is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def own_classes_for_vllm() -> Iterator[Callable[[torch.nn.Module], None]]:
    """At the end of the context, restore the classes of transformers that vLLM has changed inside it.

    Yields a function. Call it inside the context with vLLM's model: it gives each module whose class was changed a new class.
    """
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def record_and_decorate(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        decorate(self, cls, *args, **kwargs)

    def separate(model: torch.nn.Module) -> None:
        own = {cls: _subclass(cls, *kept) for cls, kept in before.items()}
        for module in model.modules():
            module.__class__ = own.get(type(module), type(module))

    with patch.object(Base, "_decorate_cls_for_torch_compile", record_and_decorate):
        try:
            yield separate
        finally:
            for cls, (bases, attributes) in before.items():
                for name in _changed(cls, attributes):
                    if name in attributes:
                        setattr(cls, name, attributes[name])
                    else:
                        delattr(cls, name)
                cls.__bases__ = bases


def _subclass(cls: type, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> type:
    """A subclass of `cls` with the changes that `cls` has had since it had these bases and attributes."""
    added = tuple(base for base in cls.__bases__ if base not in bases)
    return type(cls.__name__, (cls, *added), _changed(cls, attributes))


def _changed(cls: type, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}
