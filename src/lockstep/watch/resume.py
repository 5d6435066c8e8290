"""The proof of a checkpoint: digests of files and of tensors in memory, when it is written and when it is loaded.

The digests stand in the checkpoint's `digests.json`, and the digest of that file stands in the receipt's chain. They
detect accidents: a file that is missing, cut, edited or of another checkpoint, and a tensor that was not loaded. They
do not protect against somebody who rewrites the receipt too.

Proof `checkpoint`.
Shows: a run continues with the files, tensors, data, code, model files and settings with which it stopped.
Does not show: files that a reward function reads; installed packages; values that the user's functions change, or
that come from clock, chance or environment.
When: every checkpoint, every resume (docs/internals/proof.md#checkpoints).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from lockstep.contract.tensors import tensor_digest
from lockstep.devices import read_in_threads
from lockstep.errors import InputError, ProofError
from lockstep.files import replace_text
from lockstep.models.policy import BAD_FILES
from lockstep.shards.model import collected, is_sharded
from lockstep.watch.receipt import DIGESTS, RECEIPT, text_digest

# The last file that is written into a checkpoint. A checkpoint with this file is complete.
TRAINER_STATE = "trainer_state.json"
# Files with these endings are loaded when they lie in a checkpoint.
_LOADED = (".safetensors", ".bin", ".pt", ".pth")
_NAMED = 3


def seal(folder: Path, memory: Mapping[str, str], state: Mapping[str, Any]) -> str:
    """Write the digests of a checkpoint, when all its files but the trainer's state are written.

    Args:
        memory: digests of the tensors in memory, from `memory_digests`.
        state: what the trainer's state holds.

    Returns:
        The digest of `digests.json`, for the receipt. The copy of the receipt in the checkpoint is not digested.
    """
    left_out = (DIGESTS, TRAINER_STATE, RECEIPT)
    files = _digests([path for path in folder.rglob("*") if path.is_file() and path.name not in left_out])
    by_name = {str(path.relative_to(folder)): digest for path, digest in sorted(files.items())}
    digests = {"files": by_name, "memory": dict(memory), "state": _state_digest(state)}
    text = json.dumps(digests, indent=0)
    replace_text(folder / DIGESTS, text)
    return text_digest(text)


def check_sealed(folder: Path, sealed: str) -> None:
    """Compare the files of a checkpoint with its digests, whose own digest is `sealed`. Nothing is loaded.

    An `InputError` names a file that is missing, was changed, or is of another checkpoint or another run.
    """
    path = folder / DIGESTS
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{DIGESTS} of {folder.name} cannot be read: {type(error).__name__}") from error
    if text_digest(text) != sealed:
        raise InputError(f"{DIGESTS} of {folder.name} was changed, or is of another checkpoint")
    wanted = json.loads(text)
    found = {path.name for path in folder.iterdir() if path.name.endswith(_LOADED)}
    if missing := sorted(name for name in wanted["files"] if not (folder / name).is_file()):
        raise InputError(f"{folder.name} has no {_listed(missing)}")
    if foreign := sorted(found - wanted["files"].keys()):
        raise InputError(f"{_listed(foreign)} in {folder.name} does not belong to this checkpoint")
    digests = _digests([folder / name for name in wanted["files"]])
    if wrong := sorted(name for name, digest in wanted["files"].items() if digests[folder / name] != digest):
        tensors = _changed_tensors(folder / wrong[0], wanted["memory"])
        what = f" (tensor {_listed(tensors)})" if tensors else ""
        raise InputError(f"{_listed(wrong)} of {folder.name} was changed, or is of another checkpoint{what}")
    if _state_digest(json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))) != wanted["state"]:
        raise InputError(f"{TRAINER_STATE} of {folder.name} was changed, or is of another checkpoint")


def check_loaded(folder: Path, memory: Mapping[str, str], taken_anew: Collection[str] = ()) -> None:
    """Compare tensors in memory after a checkpoint was loaded with those that it was written from.

    The user wants other values for the names in `taken_anew`, so that they are not compared.
    """
    wanted = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))["memory"]
    compared = (wanted.keys() | memory.keys()) - set(taken_anew)
    wrong = sorted(name for name in compared if wanted.get(name) != memory.get(name))
    if wrong:
        raise ProofError(
            "checkpoint",
            f"{len(wrong)} of {len(wanted)} parts of the state differ from {folder.name} after it was loaded: "
            f"{_listed(wrong)}",
            "the library that loads checkpoints left them out, converted them, or loaded them into other places",
            "resume with the versions of torch, transformers and peft that wrote the checkpoint",
        )


def memory_digests(
    modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, str]:
    """Digests of all parameters and saved buffers, of the optimizer's state by parameter, and of the schedule.

    If a module is sharded, every rank calls. Then the owner has the digests of the whole tensors, and the others are
    of no use.
    """
    found: dict[str, torch.Tensor] = {}
    names: dict[torch.Tensor, str] = {}
    for title, module in modules.items():
        for name, parameter in module.named_parameters():
            names[parameter] = f"{title}.{name}"
        found |= {f"{title}.{name}": tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    # A parameter can change between two steps only through the optimizer, so that its state is a part of the weights'
    # future.
    settings: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings.append({key: str(value) for key, value in group.items() if key != "params"})
        for number, parameter in enumerate(group["params"]):
            place = names.get(parameter, f"group {len(settings)}, {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{key} of {place}"] = torch.as_tensor(value)
    # Sharded tensors are collected one at a time, in the same order on all ranks.
    cut = {
        name: tensor_digest(collected(found.pop(name)))
        for name in sorted(n for n, t in found.items() if is_sharded(t))
    }
    digests = cut | dict(zip(found, read_in_threads(tensor_digest, list(found.values())), strict=True))
    schedule = {key: str(value) for key, value in scheduler.state_dict().items() if not callable(value)}
    return digests | {
        "the optimizer's settings": text_digest(json.dumps(settings)),
        "the schedule": text_digest(json.dumps(schedule, sort_keys=True)),
    }


def _changed_tensors(path: Path, memory: Mapping[str, str]) -> list[str]:
    """Tensors of a file whose digests differ from those that the same names had in memory."""
    if path.suffix != ".safetensors":
        return []
    known = {name.partition(".")[2]: digest for name, digest in memory.items()}
    try:
        with safe_open(path, framework="pt") as file:
            return [n for n in file.keys() if n in known and tensor_digest(file.get_tensor(n)) != known[n]]  # noqa: SIM118
    except BAD_FILES:
        # The file is not a safetensors file any more. Its digest has shown already that it was changed.
        return []


def _digests(paths: list[Path]) -> dict[Path, str]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(paths, pool.map(_file_digest, paths), strict=True))


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    for part in _parts(path):
        digest.update(part)
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        if path.stat().st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield content


def _state_digest(state: Mapping[str, Any]) -> str:
    """Digest of a trainer's state without the states of callbacks, which are written later than the digests."""
    kept = {key: value for key, value in state.items() if key != "stateful_callbacks"}
    return text_digest(json.dumps(kept, sort_keys=True, default=str))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
