"""Finds which of the sent tensors vLLM has stored.

`load_weights` of vLLM skips tensors for which its model has no place, without an error: for example every bias that its modules do
not have. The names that it returns are those of its own parameters. Therefore this module follows the sent tensors themselves.
`sync/vllm/backend.py` uses it around each load, and `sync/push.py` refuses a push of which a tensor was not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_COPY = torch.ops.aten.copy_.default
# A parameter of one element may be filled with a number that is read from the sent tensor.
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class StoredNames(TorchDispatchMode):
    """Follows tensors through the operations of a load. What is computed from a sent tensor belongs to the tensor's name.

    Args:
        arrived: the sent tensors, by name. The caller keeps them alive.

    Attributes:
        names: names of the tensors that were copied into another tensor, as a whole or in part.
    """

    def __init__(self, arrived: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.names: set[str] = set()
        # One tensor may have several names.
        self._origins: Any = WeakIdKeyDictionary()
        for name, tensor in arrived:
            self._origins[tensor] = self._origins.get(tensor, frozenset()) | {name}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        origins = frozenset().union(*(self._origins.get(each, ()) for each in _tensors((args, kwargs))))
        if func is _COPY or func is _READ_NUMBER:
            self.names |= self._origins.get(args[func is _COPY], frozenset())
        elif origins:
            for made in _tensors(result):
                self._origins[made] = origins
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
