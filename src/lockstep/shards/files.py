"""Checkpoints of sharded models, in torch's distributed format (DCP) with safetensors files.

Every rank writes and reads its own parts. They load on any number of ranks, to the bit. Nothing in them is a pickle:
the place of each part stands in the header of its file.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import InputError, LockstepError
from lockstep.files import replace_text
from lockstep.shards.passes import Passes

# The folder of a checkpoint that holds the parts, and the file in it with what is not a tensor.
SHARDS, REST = "shards", "optimizer.json"


def write_shards(
    folder: Path, named: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, passes: Passes
) -> None:
    """Write weights and the optimizer's state. Every rank calls.

    Args:
        named: every parameter of the run by name, sharded or the same on every rank.
        optimizer: the optimizer itself, not a wrapper.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {f"model.{name}": p.detach() for name, p in named.items()}
    numbers: dict[str, float] = {}
    for name, p in named.items():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors[f"optimizer.{key}.{name}"] = value
            elif value is not None:
                numbers[f"{key}.{name}"] = float(value)
    if passes.rank == 0:
        groups = [{key: _plain(v) for key, v in g.items() if key != "params"} for g in optimizer.param_groups]
        replace_text(folder / REST, json.dumps({"state": numbers, "groups": groups}))
    try:
        save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=passes.control,
        )
    except CheckpointException as error:
        raise LockstepError(f"the parts of the sharded model could not be written: {error}") from error


def read_weights(folder: Path, named: Mapping[str, torch.nn.Parameter]) -> None:
    """Read the weights into the parameters. Each rank reads its own parts."""
    there = {name.removeprefix("model.") for name in _known(folder) if name.startswith("model.")}
    if odd := sorted(there ^ set(named)):
        raise InputError(
            f"{folder.parent} holds other parameters than the model: {odd[0]} ({len(odd)} differ)"
        )
    _read(folder, {f"model.{name}": p.detach() for name, p in named.items()})


def read_optimizer(
    folder: Path, named: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Read the optimizer's state and settings."""
    found = json.loads((folder / REST).read_text(encoding="utf-8"))
    if len(found["groups"]) != len(optimizer.param_groups):
        raise InputError(f"{folder.parent} was written with another optimizer")
    for group, known in zip(optimizer.param_groups, found["groups"], strict=True):
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in known.items()})
    state: dict[str, dict[str, Any]] = {name: {} for name in named}
    tensors: dict[str, torch.Tensor] = {}
    for full, dtype in _known(folder).items():
        if full.startswith("optimizer."):
            key, _, name = full.removeprefix("optimizer.").partition(".")
            state[name][key] = tensors[full] = torch.zeros_like(named[name].detach(), dtype=dtype)
    _read(folder, tensors)
    for full, number in found["state"].items():
        key, _, name = full.partition(".")
        state[name][key] = torch.tensor(number)
    for name, own in state.items():
        if own:
            optimizer.state[named[name]] = own


def _known(folder: Path) -> dict[str, torch.dtype]:
    """The tensors of a checkpoint, with their dtypes."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: data.properties.dtype for name, data in found.items()}  # type: ignore[union-attr]


def _read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        # Each rank plans for itself, so that no rank waits for another one. torch warns that this is not the usual way.
        with warnings.catch_warnings(action="ignore"):
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise InputError(f"the parts in {folder} cannot be read: {error}") from error


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value
