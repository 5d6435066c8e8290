"""Checks that a loaded model equals the saved model: no tensor is missing, unused, of another shape, NaN or infinite.

It uses the report of `from_pretrained(..., output_loading_info=True)`, and a model's parameters. transformers fills a missing
tensor with random numbers, and only warns. No later check could find this, because the engine receives the same random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from lockstep.errors import InputError

# Largest number of names that an error lists. The error gives the number of the others.
_NAMES_SHOWN = 5


def refuse_incomplete(what: str, report: Mapping[str, Any], *, unused: tuple[str, ...] = ()) -> None:
    """Refuse a model whose files do not hold exactly its tensors.

    `report` does not contain tied tensors, nor tensors that transformers allows to be missing or unused in a model family.

    Args:
        what: the model, for the message.
        report: the loading info from `from_pretrained`, called with `ignore_mismatched_sizes`.
        unused: prefixes of the names of tensors that may be unused, because this kind of model does not need them.

    Raises:
        InputError: tensors are missing, have another shape, or belong to no layer.
    """
    mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    unexpected = sorted(name for name in report["unexpected_keys"] if not any(map(name.startswith, unused)))
    problems = [
        ("lack", sorted(report["missing_keys"]), ", which would be random numbers"),
        ("have another shape than the config requires for", mismatched, ", which would be random numbers"),
        ("have", unexpected, ", which no layer of the model uses"),
    ]
    summary = "; they ".join(f"{verb} {listed(names)}{why}" for verb, names, why in problems if names)
    if summary:
        raise InputError(f"{what}: its files {summary}. Copy or save the model again, or correct its config.json")


def refuse_adapter(what: str, model: torch.nn.Module) -> None:
    """Refuse a model whose files are an adapter's. transformers loads the adapter and its base; an engine loads one of them.

    Args:
        what: the model, for the message.
        model: the loaded model.

    Raises:
        InputError: an adapter was loaded into the model.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(
            f"{what} is an adapter, not a whole model: make one with 'lockstep merge ADAPTER FOLDER', and give FOLDER"
        )


def check_finite(name: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights that contain NaN or infinity. This reads the weights once, and makes no copy.

    Args:
        name: the model that the weights belong to, for the message.
        parameters: names and tensors; codes of quantised weights (integers) are not checked.

    Raises:
        InputError: some weights contain NaN or infinity. The message names them.
    """
    bounds = {
        label: torch.stack(p.detach().aminmax())
        for label, p in parameters
        if p.is_floating_point() and p.numel() and not p.is_meta
    }
    bad = [label for label, pair in bounds.items() if not bool(pair.isfinite().all())]
    if bad:
        raise InputError(
            f"{name} has weights that are NaN or infinite, in {listed(bad)}: they were saved so, or the files are damaged; give "
            "another copy of it"
        )


def listed(names: Collection[str]) -> str:
    """The first few names, and the number of the others."""
    shown = ", ".join(list(names)[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
