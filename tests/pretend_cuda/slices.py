"""Work on a whole vocabulary on the pretend GPU: the memory that it takes, and its results beside those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tiny import make_model, make_tokenizer, save
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.devices import on_host
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.learn.token_logps import DrawSums, KeptSets, _needed_rows
from lockstep.tokens.arrays import KeptIds
from lockstep.watch import update
from lockstep.watch.modules import ModuleProbe

_ROWS, _WIDTH, _IDS = 20_000, 64, 3000


class _Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        if (
            isinstance(made, torch.Tensor)
            and not made.is_meta
            and made.untyped_storage().data_ptr() not in given
        ):
            self.size = max(self.size, made.numel())
        return made


def of_probe(folder: Path) -> dict[str, Any]:
    """A probe of every module of a model with many ids."""
    model = make_model("llama", vocab_size=_ROWS)
    engine = TransformersEngine(
        str(save(model, folder)), make_tokenizer(), dtype=torch.bfloat16, max_model_len=64
    )
    probe = ModuleProbe(model.to("cuda"), engine, torch.bfloat16)
    with _Largest() as largest:
        record = probe.measure(1, every=True)
    return {
        "rows": largest.size / _WIDTH,
        "of_rows": _ROWS,
        "failed": record.failed,
        "modules": record.modules,
    }


def of_sums() -> dict[str, Any]:
    """Sums over the distributions of many tokens."""
    draw = torch.Generator().manual_seed(0)
    scaled = torch.randn(512, _IDS, generator=draw)
    targets = torch.randint(_IDS, (512,), generator=draw)
    found = []
    for device in ("cpu", "cuda"):
        logits = scaled.to(device)
        probabilities = logits.softmax(-1)
        sums, rows = DrawSums(torch.ones(512, dtype=torch.bool), device), torch.arange(512, device=device)
        with _Largest() as largest:
            means = (probabilities * logits).sum(-1) if device == "cpu" else found[0][1].to(device)
            largest.size = 0
            sums.of_rows(0, torch.arange(512), rows, targets.to(device), probabilities, logits, means)
        found.append((torch.stack([sums.variances, sums.below, sums.upto]).cpu(), means, largest.size / _IDS))
    apart = (found[1][0] - found[0][0]).abs().max()
    return {"rows": found[1][2], "apart": float(apart)}


def of_filters() -> dict[str, Any]:
    """Sets of kept ids of many tokens, and the products that they are cut into."""
    draws = np.random.default_rng(0)
    sets = [np.sort(draws.choice(_IDS, 5, replace=False)) for _ in range(1024)]
    ids = KeptIds(np.concatenate(sets).astype(np.int32), np.arange(5, 5 * 1024 + 1, 5))
    sampled = np.array([own[0] for own in sets])
    counts = {}
    for device in ("cpu", "cuda"):
        counts[device] = len(list(_needed_rows(KeptSets.of(ids, sampled, torch.device(device)), _IDS)))
    return counts


def of_places() -> dict[str, Any]:
    """Where gradients that are nearly all 0 have their first elements."""
    gradients = [torch.zeros(size) for size in (100, 33, 7, 64, 0)]
    for gradient, place in zip(gradients, (70, 32, 0, 63), strict=False):
        gradient[place] = -2.0
    gradients[0][72:75] = torch.tensor([1.0, -3.0, 2.0])
    gradients.append(torch.zeros(40))
    with patch.object(update, "SEARCHED", 16):
        on_cpu = [int(update.some_nonzero(gradient)) for gradient in gradients]
        on_device = [int(found) for found in on_host([update.some_nonzero(g.to("cuda")) for g in gradients])]
    return {"cpu": on_cpu, "cuda": on_device}
