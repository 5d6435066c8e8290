"""Asks the C library for huge pages, which a process can do only as it starts: a command starts itself anew, once.

Training and vLLM on a CPU take fresh memory by the megabyte; where Linux hands it out in pages of 4 KiB, a good part of a step is
the kernel's (docs/speed.md has figures). Used by `cli/main.py`; what a command starts inherits the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES, _NAME = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def start_anew_with_huge_pages() -> None:
    """Replace this process by the same command with huge pages, where that changes anything. Its id stays.

    A process that was not started by these words (a child that another program made) is left as it is.
    """
    words = sys.argv[1:]
    wanted = with_huge_pages(os.environ, kernel_setting())
    if wanted is not None and words and sys.executable and sys.orig_argv[-len(words) :] == words:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def kernel_setting() -> str:
    """Linux's own setting, such as "always [madvise] never"; empty on other systems."""
    return _SETTING.read_text() if _SETTING.exists() else ""


def with_huge_pages(given: Mapping[str, str], setting: str) -> dict[str, str] | None:
    """An environment that asks for huge pages; None where the user has decided, or the kernel gives them to all or to none.

    Args:
        setting: what `kernel_setting` gives.
    """
    tunables = given.get(_TUNABLES, "")
    if "[madvise]" not in setting or _NAME in tunables:
        return None
    return {**given, _TUNABLES: ":".join(filter(None, [tunables, f"{_NAME}=1"]))}
