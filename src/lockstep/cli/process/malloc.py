"""Asks the C library for huge pages, and to keep freed memory. A process can do so only at its start: a command starts anew, once.

Training and vLLM on a CPU allocate and free gigabytes in every step. By default the C library gives large blocks back
to Linux as soon as they are freed, and Linux hands them out again in pages of 4 KiB, each cleared first. With huge
pages there are fewer pages. With kept memory there are none after the first steps (docs/internals/speed.md has
figures). The child processes of a command inherit the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES = "GLIBC_TUNABLES"
_HUGE = {"glibc.malloc.hugetlb": "1"}
# No block is a mapping of its own, which would be returned when it is freed; and the heap is not trimmed below a terabyte.
_KEEP = {"glibc.malloc.mmap_max": "0", "glibc.malloc.trim_threshold": str(1 << 40)}
# If the user has set one of these, both settings of `_KEEP` are left to the user.
_KEEP_NAMES = (*_KEEP, "glibc.malloc.mmap_threshold", "glibc.malloc.top_pad")


def start_anew_with_tunables() -> None:
    """Replace this process by the same command with these settings, if that changes anything. The process keeps its id.

    A process whose command line does not end with `sys.argv` (a child that another program made) is left unchanged.
    """
    words = sys.argv[1:]
    wanted = with_tunables(os.environ, kernel_setting())
    if wanted is not None and words and sys.executable and sys.orig_argv[-len(words) :] == words:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def kernel_setting() -> str:
    """The setting of Linux for huge pages, such as "always [madvise] never"; empty on other systems."""
    return _SETTING.read_text(encoding="utf-8") if _SETTING.exists() else ""


def with_tunables(given: Mapping[str, str], setting: str) -> dict[str, str] | None:
    """An environment that asks for huge pages and kept memory, as far as the user has not decided; None if nothing is asked for.

    Huge pages are not asked for if the kernel gives them to all or to none.

    Args:
        setting: the result of `kernel_setting`.
    """
    tunables = given.get(_TUNABLES, "")
    asked: dict[str, str] = {}
    if "[madvise]" in setting and not any(name in tunables for name in _HUGE):
        asked |= _HUGE
    if setting and not any(name in tunables for name in _KEEP_NAMES):
        asked |= _KEEP
    if not asked:
        return None
    return {
        **given,
        _TUNABLES: ":".join(filter(None, [tunables, *(f"{name}={value}" for name, value in asked.items())])),
    }
