"""Whether a loaded model is the one that was saved: no weight is missing, left over, of another shape, or not a number.

Comes from: the report of `from_pretrained(..., output_loading_info=True)`, and a model's parameters. Transformers fills a missing
tensor with random numbers, warns, and goes on; nothing later could tell, since the engine is given the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from lockstep.errors import InputError

# Names that an error lists before it only counts.
_NAMED = 5


def refuse_incomplete(what: str, report: Mapping[str, Any], *, unused: tuple[str, ...] = ()) -> None:
    """Refuse a model whose files do not hold exactly its tensors.

    Tied tensors, and those that transformers lists for a family as neither needed nor harmful, are not in `report`.

    Args:
        what: the model, for the message.
        report: what `from_pretrained` returned beside the model, asked with `ignore_mismatched_sizes`.
        unused: beginnings of names that may be left over, since this kind of model has no use for them.

    Raises:
        InputError: tensors are missing, have another shape, or belong to no layer.
    """
    mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    left_over = sorted(name for name in report["unexpected_keys"] if not any(map(name.startswith, unused)))
    parts = [
        ("lack", sorted(report["missing_keys"]), ", which would be random numbers"),
        ("hold another shape than the config says of", mismatched, ", which would be random numbers"),
        ("hold", left_over, " for no layer of the model"),
    ]
    found = "; they ".join(f"{verb} {listed(names)}{why}" for verb, names, why in parts if names)
    if found:
        raise InputError(f"{what}: its files {found}. Copy or save the model again, or correct its config.json")


def check_finite(name: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights that hold NaN or infinity; one pass over them, without a copy.

    Args:
        name: what the weights are of, for the message.
        parameters: names and tensors; codes of quantised weights (integers) are passed over.

    Raises:
        InputError: some do; with their names.
    """
    bounds = {
        label: torch.stack(p.detach().aminmax())
        for label, p in parameters
        if p.is_floating_point() and p.numel() and not p.is_meta
    }
    bad = [label for label, pair in bounds.items() if not bool(pair.isfinite().all())]
    if bad:
        raise InputError(
            f"{name} has weights that are NaN or infinite, in {listed(bad)}: it was saved broken, or its files are damaged; give "
            "another copy of it"
        )


def listed(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(list(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
