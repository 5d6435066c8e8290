"""Lets vLLM find the files of a model whose directory has `[`, `*` or `?` in its name.

vLLM 0.32.0 joins the directory and a pattern such as `*.safetensors`, and reads all of it as a pattern. It then finds no files, or
those of another directory. `engines/vllm/plugin.py` calls `find_files_by_name` in every process of vLLM.
"""

from __future__ import annotations

import glob
import os
from types import SimpleNamespace


def find_files_by_name() -> None:
    """Let the modules of vLLM that search a model's directory take its name as it is. It may be called several times."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    for module in (default_loader, weight_utils):
        module.glob = SimpleNamespace(glob=_in_directory)


def _in_directory(pattern: str) -> list[str]:
    """The files of a directory whose names match the last part of a pattern."""
    directory, names = os.path.split(pattern)
    return glob.glob(os.path.join(glob.escape(directory), names))
