"""From the name a user writes to what transformers and vLLM can both load.

Comes from: a config's `model_name_or_path`. Goes to: `models/policy.py`, `tokens/tokenizer.py` and the engines,
which must all be given the very same string.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError
from lockstep.models.packaged import PACKAGED_MODEL, packaged_model_dir


def resolve_model(name: str) -> str:
    """Directory or hub id for a model name.

    Args:
        name: `smollm2-135m-instruct` (carried by a PyPI package), a directory with a `config.json`, or a hub id.

    Returns:
        An absolute directory for the first two, the id unchanged for a hub id.

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
