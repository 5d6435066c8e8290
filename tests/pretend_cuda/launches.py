"""Counts the kernels that a GPU has to start for one layer of a packed model, forward and backward. Used by: `runs.py`.

An operation on the device that is no view and does more than take memory counts as one kernel, and so does each call
of PyTorch's attention, which is one kernel on a GPU and many operations here. It computes nothing here: its results
are zeros with the dtype and the layout in memory that a GPU's have.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.attention.bias
from tiny import make_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lockstep.learn.attention import paths as causal_attention
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_rows, pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence

_FREE = ("empty", "detach", "lift", "alias", "set_", "new_empty")
_ROOTS = ("/lockstep/learn/", "/transformers/models/", "/transformers/integrations/")


class _Launches(TorchDispatchMode):
    """Counts by place. `attention` stands for one kernel, and is counted as one where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.hidden = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if not (self.hidden or function.is_view or name.startswith(_FREE)):
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        self.places[f"{_place(sys._getframe(2))}: {name}"] += 1

    @contextmanager
    def as_one(self, name: str) -> Any:
        self.note(name)
        self.hidden = True
        yield
        self.hidden = False


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        for root in _ROOTS:
            if root in name:
                return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


def _attention(launches: _Launches) -> Any:
    """PyTorch's attention as one kernel forward, and one backward."""

    def in_rows(part: torch.Tensor) -> torch.Tensor:
        return part.transpose(1, 2).contiguous().transpose(1, 2)

    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            with launches.as_one("attention"), _disable_current_modes():
                ctx.parts = query, key, value
                shape, dtype = (*query.shape[:-1], value.shape[-1]), torch.get_autocast_dtype("cuda")
                return in_rows(torch.zeros(shape, dtype=dtype, device=query.device))

        @staticmethod
        def backward(ctx: Any, of: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with launches.as_one("attention"), _disable_current_modes():
                return tuple(in_rows(torch.zeros_like(part)) for part in ctx.parts)

    return lambda query, key, value, **settings: One.apply(query, key, value)


def _lower_right(rows: int, columns: int) -> torch.Tensor:
    """The sign for causal attention. It holds no numbers; PyTorch cannot make it while operations are counted."""
    with _disable_current_modes():
        return torch.nn.attention.bias.causal_lower_right(rows, columns)


def counted(layers: int, prompt: int, completion: int, count: int, *, rows: bool = False) -> Counter[str]:
    """The kernels of a pack's forward and backward, by place.

    Args:
        prompt, completion: numbers of tokens.
        count: completions of the prompt.
        rows: whether each completion is a plain row.
    """
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
    }
    model = make_model("llama", num_hidden_layers=layers, **sizes).train().to("cuda")
    adopt_tree_attention(model)
    draw = np.random.default_rng(0)
    asked = draw.integers(4, 384, prompt)
    sequences = [
        TrainingSequence(f"a#{i}", asked, draw.integers(4, 384, completion), np.zeros(completion), unit="a")
        for i in range(count)
    ]
    (pack,) = (pack_rows if rows else pack_sequences)(sequences, 10**9)
    here, launches = pack.to(torch.device("cuda")), _Launches()
    with (
        patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention(launches)),
        patch.object(causal_attention, "causal_lower_right", _lower_right),
        launches,
    ):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = score_pack(model, here, 1.0, 1 << 20)
        scores.logps.sum().backward()
    return launches.places


def of_a_layer(prompt: int, completion: int, count: int, *, rows: bool = False) -> dict[str, int]:
    """The kernels that each layer adds, by place."""
    one, two = (counted(layers, prompt, completion, count, rows=rows) for layers in (1, 2))
    return dict(sorted((two - one).items(), key=lambda item: -item[1]))
