"""Loads the trained model, for every caller.

`models/resolve.py` gives the path. The trainer owns the model.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from lockstep.errors import InputError
from lockstep.model_files import load_files
from lockstep.models.loaded_checks import refuse_adapter, refuse_incomplete
from lockstep.models.vision import model_class
from lockstep.secret import without_secrets

# The errors that libraries raise for a damaged or foreign file. Which one it is depends on the wrong bytes.
BAD_FILES = (
    OSError, ValueError, ImportError, RuntimeError, SafetensorError, StrictDataclassError, pickle.UnpicklingError, EOFError,
    KeyError, IndexError, TypeError, AttributeError, ArithmeticError,
)  # fmt: skip


def load_policy(path: str, model_init_kwargs: dict[str, Any] | None = None) -> PreTrainedModel:
    """A causal language model, in float32 unless `model_init_kwargs` names another `dtype` (TRL's convention).

    With a `quantization_config` in `model_init_kwargs`, full-precision weights are quantised when they are loaded.

    Raises:
        InputError: the directory or id holds no causal language model, or an adapter; its files lack a tensor, or hold a tensor
            that does not belong to the model; its weights are stored quantised (an engine would load the quantised weights); or an
            argument is refused.
    """
    check_init_kwargs(model_init_kwargs or {})
    kwargs = {"dtype": torch.float32, **(model_init_kwargs or {})}
    # With these, transformers lists tensors of another shape instead of raising, and the error here can name them.
    kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        config = load_files(AutoConfig, path)
        if getattr(config, "quantization_config", None) is not None:
            raise InputError(f"model {path} is quantised; training needs its full-precision weights")
        model, report = load_files(model_class(config), path, **kwargs)
    except BAD_FILES as error:
        if isinstance(error, InputError):
            raise
        given = f" with model_init_kwargs={without_secrets(model_init_kwargs)}" if model_init_kwargs else ""
        raise InputError(f"cannot load a causal language model from {path}{given}: {first_line(error)}") from error
    refuse_adapter(f"model {path}", model)
    refuse_incomplete(f"model {path}", report)
    return model


def check_init_kwargs(model_init_kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of `from_pretrained` that make the trainer's model differ from the engine's, or run the model's code.

    Raises:
        InputError: `model_init_kwargs` contains such an argument.
    """
    if model_init_kwargs.get("trust_remote_code"):
        raise InputError(
            f"model_init_kwargs.trust_remote_code={model_init_kwargs['trust_remote_code']!r} is not supported, only False is: code "
            "that comes with a model is not run"
        )
    if not model_init_kwargs.get("weights_only", True):
        raise InputError(
            "model_init_kwargs.weights_only=False is not supported: it unpickles whatever the files of the weights contain, which "
            "runs code; leave it out"
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens that a model attends to; None if its config has no limit, for example without attention."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def fp32_head_product(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """(…, V) float32 logits of an output head, computed in float32 for any dtype of head and input, also inside autocast."""
    weight: torch.Tensor = head.weight  # type: ignore[assignment]
    bias: torch.Tensor | None = getattr(head, "bias", None)
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of the model and its adapter to 0. With dropout, the trained policy would differ from the sampled one."""
    for _, module, name in _dropouts(model):
        setattr(module, name, 0.0)


def modules_with_dropout(model: torch.nn.Module) -> list[str]:
    """Names of the modules of the model and its adapter whose dropout is not 0."""
    return [place for place, module, name in _dropouts(model) if getattr(module, name)]


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Each place that has a dropout: the module's name, the module, and the name of the attribute with the probability."""
    for place, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            yield place, module, "p"
        # Attention layers of transformers store their dropout as a number.
        numbers = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        yield from ((place, module, name) for name in numbers)


def first_line(error: Exception) -> str:
    """The first line of a library's error. For kinds of errors whose text alone is unclear, such as KeyError, the kind is first."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    return (
        (lines[0] if isinstance(error, OSError | ValueError | RuntimeError) else f"{kind}: {lines[0]}")
        if lines
        else kind
    )
