"""The one place that loads configs, tokenizers, processors and models. It never runs code that comes with their files.

A config names such code in `auto_map`. Without `trust_remote_code=False`, transformers asks on the terminal whether
to run it, and takes the next line of the standard input for the answer. `tests/models/test_one_loader.py` finds other
calls in this repository.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.files import what_is_at

_NOT_TRUSTED = {"trust_remote_code": False}
# What PEFT writes. The weights have one of the names.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def load_files(kind: Any, path: str, **arguments: Any) -> Any:
    """What `from_pretrained` of a class of transformers, such as `AutoConfig`, makes of a model's files.

    If transformers itself has the class that the files ask for, it takes its own class, whatever else `auto_map` names.

    Raises:
        InputError: the files need code that comes with them.
        OSError, ValueError, ...: as `from_pretrained`.
    """
    try:
        return kind.from_pretrained(path, **{**arguments, **_NOT_TRUSTED})
    except ValueError as error:
        raise _about_code(error, path) from error


def build_empty(kind: Any, config: Any, **arguments: Any) -> Any:
    """A model without trained weights, made from a loaded config with `kind.from_config`.

    Raises:
        InputError: the config needs code that comes with the model.
        ValueError, ...: as `from_config`.
    """
    try:
        return kind.from_config(config, **{**arguments, **_NOT_TRUSTED})
    except ValueError as error:
        raise _about_code(error, str(config.name_or_path)) from error


def load_adapter(model: Any, path: str) -> tuple[Any, Any]:
    """A loaded model with a saved adapter on it, which can be trained.

    Importing PEFT takes seconds, and few callers need it.

    Returns:
        The `peft.PeftModel`, and torch's report of what the file lacks and what the model has no place for.

    Raises:
        OSError, ValueError, ...: as `PeftModel.from_pretrained`. PEFT runs no code that comes with an adapter.
    """
    from peft import PeftModel, set_peft_model_state_dict

    with warnings.catch_warnings():
        # PEFT only warns of missing weights, and is silent about foreign ones. Its report has both.
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, path, is_trainable=True)
    return adapted, set_peft_model_state_dict(adapted, adapter_tensors(path))


def adapter_tensors(path: str) -> dict[str, Any]:
    """The tensors of a saved adapter, without a model.

    Raises:
        OSError, ValueError, ...: as PEFT's `load_peft_weights`.
    """
    from peft import load_peft_weights

    return load_peft_weights(path, device="cpu")


def adapter_file(adapter: Path, *names: str) -> Path:
    """The first of some files that an adapter's directory has. PEFT would look for a missing one on the hub.

    Raises:
        InputError: it has none of them, or something else has the name.
    """
    for name in names:
        there = what_is_at(adapter / name)
        if there == "is a file":
            return adapter / name
        if there != "does not exist":
            raise InputError(f"{adapter / name} {there}; copy or save the adapter again")
    raise InputError(f"adapter {adapter} has no {names[0]}; copy or save the adapter again")


@contextmanager
def code_refused() -> Iterator[None]:
    """Inside the context, transformers refuses a model's own code where another library loads files.

    vLLM makes parts of some models from their configs without `trust_remote_code`.
    """
    from transformers import dynamic_module_utils

    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    # The seconds that transformers waits for an answer. At 0 it does not ask, and raises.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def _about_code(error: ValueError, path: str) -> ValueError:
    """An error that can be followed: transformers advises to trust the code."""
    if isinstance(error, InputError) or "trust_remote_code" not in str(error):
        return error
    return InputError(
        f"{path} needs custom code that comes with its files, and Lockstep does not run such code (trust_remote_code "
        "is always False): give a model whose classes are part of the installed transformers"
    )
