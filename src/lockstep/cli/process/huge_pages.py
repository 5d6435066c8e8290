"""Asks the C library for huge pages. A process can do this only at its start, so a command starts itself again, once.

Training and vLLM on a CPU allocate memory by the megabyte. If Linux gives it in pages of 4 KiB, the kernel takes a large part of
a step's time (docs/internals/speed.md has figures). Used by `cli/main.py`. The child processes of a command inherit the
environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES, _NAME = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def start_anew_with_huge_pages() -> None:
    """Replace this process by the same command with huge pages, if that changes anything. The process keeps its id.

    A process whose command line does not end with `sys.argv` (a child that another program made) is left unchanged.
    """
    words = sys.argv[1:]
    wanted = with_huge_pages(os.environ, kernel_setting())
    if wanted is not None and words and sys.executable and sys.orig_argv[-len(words) :] == words:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def kernel_setting() -> str:
    """The setting of Linux, such as "always [madvise] never"; empty on other systems."""
    return _SETTING.read_text() if _SETTING.exists() else ""


def with_huge_pages(given: Mapping[str, str], setting: str) -> dict[str, str] | None:
    """An environment that asks for huge pages; None if the user has decided, or if the kernel gives them to all or to none.

    Args:
        setting: the result of `kernel_setting`.
    """
    tunables = given.get(_TUNABLES, "")
    if "[madvise]" not in setting or _NAME in tunables:
        return None
    return {**given, _TUNABLES: ":".join(filter(None, [tunables, f"{_NAME}=1"]))}
