"""From the name that a user writes to a path or id that transformers and vLLM can both load.

The name is a config's `model_name_or_path`. `models/policy.py`, `tokens/tokenizer.py` and the engines must all get exactly the
string that this module returns.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError
from lockstep.models.packaged import PACKAGED_MODEL, packaged_model_dir


def resolve_model(name: str) -> str:
    """Directory or hub id for a model name.

    Args:
        name: `smollm2-135m-instruct` (from a PyPI package), a directory with a `config.json`, or a hub id.

    Returns:
        An absolute directory for the first two; a hub id is returned unchanged.

    Raises:
        InputError: the name looks like a path and is not a model directory.
    """
    if name.lower() == PACKAGED_MODEL:
        return str(packaged_model_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model directory {path} has no config.json; give the directory of a saved model")
        return str(path.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"model directory {path} does not exist")
    return name
