"""The trainer's weights as a stream of named tensors, and the manifest that says what the stream holds.

Comes from: the trained model, which is only read. Goes to: `sync/push.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep.engines.protocol import TensorSpec
from lockstep.engines.tensor_specs import tensor_specs


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one push sends: the version, and name, dtype, shape and byte digest of every tensor in order."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @property
    def digest(self) -> str:
        """Hex digest of the whole push: equal digests mean equal names, dtypes, shapes and bytes."""
        return hashlib.blake2b(json.dumps(self.tensors).encode(), digest_size=16).hexdigest()


class PlainSource:
    """Weights of a model that lies whole in this process. Tied parameters occur once, under their first name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, tensor_specs(list(self)))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._named():
            yield name, parameter.detach()

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._model.named_parameters()
