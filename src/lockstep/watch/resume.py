"""The proof of a checkpoint: digests of files and of tensors in memory, when it is written and when it is loaded.

The digests stand in the checkpoint's `digests.json`, and the digest of that file stands in the receipt's chain. They
detect accidents: a file that is missing, cut, edited or of another checkpoint, and a tensor that was not loaded. They
do not protect against somebody who rewrites the receipt too.

Proof `checkpoint`.
Shows: a run continues with the files, tensors, data, code, model files and settings with which it stopped. The files of
a checkpoint hold the weights in memory (drawn tensors, 64 MiB each time). The best checkpoint is that of the best
evaluation in the log, and `load_best_model_at_end` leaves its weights in memory.
Does not show: files that a reward function reads; installed packages; values that the user's functions change, or
that come from clock, chance or environment.
When: every checkpoint, every resume (docs/internals/proof.md#checkpoints), and the end of a run that loads its best.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
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


def check_written(folder: Path, memory: Mapping[str, str], seed: tuple[int, ...]) -> None:
    """Compare drawn tensors in the model files of a checkpoint with the digests of those in memory."""
    policy = {name: digest for name, digest in memory.items() if name.startswith("policy.")}
    wrong = [
        f"{name} in {path.name}"
        for path in sorted(folder.glob("*model*.safetensors"))
        for name in _changed_tensors(path, policy, seed)
    ]
    if wrong:
        raise ProofError(
            "checkpoint",
            f"{_listed(wrong)} of {folder.name} differ from the weights in memory",
            "the save wrote other weights than those of the last step, or they changed while it wrote",
            "let nothing but the trainer write the checkpoint's files, or change weights while they are saved",
        )


def check_best(
    log: Sequence[Mapping[str, Any]], metric: str, found: float, step: int, *, greater_is_better: bool
) -> None:
    """Compare the best metric and its step with the evaluations in the trainer's log.

    Without an entry of this step nothing is compared: the evaluation was the program's own, which logs nothing.

    Args:
        log: the entries of the scheduled evaluations, in their order.
        metric: the name of the metric in them.
    """
    values = [(entry["step"], float(entry[metric])) for entry in log if metric in entry]
    values = [(at, value) for at, value in values if value == value]
    if step not in [at for at, _ in values]:
        return
    sign = 1.0 if greater_is_better else -1.0
    due = max(values, key=lambda pair: sign * pair[1])
    if due != (step, found):
        raise ProofError(
            "checkpoint",
            f"the best checkpoint is said to be that of step {step} with {metric}={found:g}; the log has {due[1]:g} at "
            f"step {due[0]}, and {'greater' if greater_is_better else 'smaller'} is better",
            "something changed the trainer's state, or compared the metrics in the wrong direction",
            "let nothing change trainer.state; otherwise this is a defect of Lockstep: report it",
        )


def check_loaded(
    folder: Path, memory: Mapping[str, str], taken_anew: Collection[str] = (), only: str = ""
) -> None:
    """Compare tensors in memory after a checkpoint was loaded with those that it was written from.

    The user wants other values for the names in `taken_anew`, so that they are not compared. Names begin with `only`.
    """
    wanted = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))["memory"]
    wanted = {name: digest for name, digest in wanted.items() if name.startswith(only)}
    memory = {name: digest for name, digest in memory.items() if name.startswith(only)}
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
    found = _weights(modules)
    names = {
        p: f"{title}.{name}" for title, module in modules.items() for name, p in module.named_parameters()
    }
    # A parameter can change between two steps only through the optimizer, so that its state is a part of the weights'
    # future.
    settings: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings.append({key: str(value) for key, value in group.items() if key != "params"})
        for number, parameter in enumerate(group["params"]):
            place = names.get(parameter, f"group {len(settings)}, {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{key} of {place}"] = torch.as_tensor(value)
    schedule = {key: str(value) for key, value in scheduler.state_dict().items() if not callable(value)}
    return _tensor_digests(found) | {
        "the optimizer's settings": text_digest(json.dumps(settings)),
        "the schedule": text_digest(json.dumps(schedule, sort_keys=True)),
    }


def weight_digests(modules: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """The part of `memory_digests` that is of the modules alone."""
    return _tensor_digests(_weights(modules))


def _weights(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """All parameters and saved buffers, under the titles of their modules."""
    return {
        f"{title}.{name}": tensor
        for title, module in modules.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def _tensor_digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests by name. Sharded tensors are collected one at a time, in the same order on all ranks."""
    sharded = sorted(name for name, tensor in tensors.items() if is_sharded(tensor))
    whole = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
    digests = {name: tensor_digest(collected(tensors[name])) for name in sharded}
    return digests | dict(zip(whole, read_in_threads(tensor_digest, list(whole.values())), strict=True))


# Bytes of tensors that are read again of each file that was written.
_READ_AGAIN = 64 * 2**20


def _changed_tensors(path: Path, memory: Mapping[str, str], seed: tuple[int, ...] | None = None) -> list[str]:
    """Tensors of a file whose digests differ from those that the same names had in memory; some of them by a seed."""
    if path.suffix != ".safetensors":
        return []
    # PEFT leaves the name of the adapter out of its files.
    known = {name.partition(".")[2]: digest for name, digest in memory.items()}
    known |= {name.replace(".default.", "."): digest for name, digest in known.items() if ".lora_" in name}
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name in known]  # noqa: SIM118
            if seed is not None:
                names = np.random.default_rng(seed).permutation(names).tolist()
            changed, left = [], _READ_AGAIN if seed is not None else math.inf
            for name in names:
                if left <= 0:
                    break
                tensor = file.get_tensor(name)
                left -= tensor.nbytes
                changed += [name] if tensor_digest(tensor) != known[name] else []
            return changed
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
