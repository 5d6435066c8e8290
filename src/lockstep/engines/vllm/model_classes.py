"""Keeps transformers' model classes as they are while vLLM runs a model in the trainer's process.

vLLM runs architectures that it has no model of its own for (Phi, GPT-NeoX, OLMo 2, …) through its Transformers backend: it makes
the model of transformers, and replaces `__init__` and `__call__` of the model's class, for `torch.compile`. The trainer's model
has the same class. Its calls would then fail, or leave its hooks out. `engines/vllm/in_process.py` starts vLLM in the context of
this module. Afterwards vLLM's model has a class of its own, with the replaced methods, and the class of transformers is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def own_classes_for_vllm() -> Iterator[Callable[[torch.nn.Module], None]]:
    """Restore, at the end of the context, the classes of transformers that vLLM changed in it.

    Yields a function that takes vLLM's model, inside the context. It gives those parts of the model whose class was changed a
    class of their own.
    """
    from vllm.model_executor.models.transformers.base import Base

    real = Base._decorate_cls_for_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def noting(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        real(self, cls, *args, **kwargs)

    def separate(model: torch.nn.Module) -> None:
        own = {cls: _subclass(cls, *kept) for cls, kept in before.items()}
        for module in model.modules():
            module.__class__ = own.get(type(module), type(module))

    with patch.object(Base, "_decorate_cls_for_torch_compile", noting):
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
    """A class that is what `cls` has become since it had these bases and attributes."""
    added = tuple(base for base in cls.__bases__ if base not in bases)
    return type(cls.__name__, (cls, *added), _changed(cls, attributes))


def _changed(cls: type, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}
