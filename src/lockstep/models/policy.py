"""Loads the trained model by the name that a user writes, and checks what was loaded.

The checks compare the model with the saved one: no tensor is missing, unused, of another shape, NaN or infinite.
transformers fills a missing tensor with random numbers, and only warns. No later check could find this, because the
engine receives the same random numbers.

`model_class` knows the vision-language families to which Lockstep can show pictures. `keeps_state` tells whether a
model keeps a state from token to token, as Mamba, linear attention and convolutions do: the next state depends on
every token before it, padding included. Such a model must not share prompts, pad them or cache them.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from lockstep.errors import InputError
from lockstep.model_files import load_files
from lockstep.models.quantised import is_quantised
from lockstep.safe_text import without_secrets

# Largest number of names that an error lists. The error gives the number of the others.
_NAMES_SHOWN = 5


def refuse_incomplete(what: str, report: Mapping[str, Any], *, unused: tuple[str, ...] = ()) -> None:
    """Refuse a model whose files do not hold exactly its tensors.

    Args:
        what: the model, for the message.
        report: the loading info from `from_pretrained`, called with `ignore_mismatched_sizes`. It has no tied tensors,
            nor tensors that transformers allows to be missing or unused in a model family.
        unused: prefixes of the names of tensors that may be unused, because this kind of model does not need them.
    """
    mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    unexpected = sorted(name for name in report["unexpected_keys"] if not any(map(name.startswith, unused)))
    problems = [
        ("lack", sorted(report["missing_keys"]), ", which would be random numbers"),
        ("have another shape than the config requires for", mismatched, ", which would be random numbers"),
        ("have", unexpected, ", which no layer of the model uses"),
    ]
    summary = "; they ".join(f"{verb} {listed(names)}{why}" for verb, names, why in problems if names)
    if summary:
        raise InputError(
            f"{what}: its files {summary}. Copy or save the model again, or correct its config.json"
        )


def refuse_adapter(what: str, model: torch.nn.Module) -> None:
    """Refuse a model whose files are an adapter's. transformers loads the adapter and its base; an engine loads one."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(
            f"{what} is an adapter, not a whole model: make one with 'lockstep merge ADAPTER FOLDER', and give FOLDER"
        )


def check_finite(name: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights that contain NaN or infinity. This reads them once, and makes no copy. `name` is for the message.

    Codes of quantised weights (integers) are not checked.
    """
    checked = ((label, p) for label, p in parameters if p.is_floating_point() and p.numel() and not p.is_meta)
    bounds = {label: torch.stack(p.detach().aminmax()) for label, p in checked}
    bad = [label for label, pair in bounds.items() if not bool(pair.isfinite().all())]
    if bad:
        raise InputError(
            f"{name} has weights that are NaN or infinite, in {listed(bad)}: they were saved so, or the "
            "files are damaged; give another copy of it"
        )


def check_held(name: str, model: torch.nn.Module) -> None:
    """Refuse weights with which nothing can be computed or trained, by their cause. `name` is for the message.

    Raises:
        InputError: weights have no values, lie on several devices, are quantised or trained in float16, or were made in
            `torch.inference_mode`; or the config and the weights do not agree whether the head is tied.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    if without := [label for label, tensor in named if tensor.is_meta]:
        raise InputError(
            f"{name}: {listed(without)} have no values (device meta): load the weights, without device_map or with "
            "one device"
        )
    if len(places := sorted({str(p.device) for _, p in model.named_parameters()})) > 1:
        raise InputError(
            f"{name} lies on {', '.join(places)}: leave device_map out; the trainer moves the model"
        )
    for label, parameter in model.named_parameters():
        kind, is_wide = parameter.dtype, parameter.is_floating_point() and parameter.itemsize > 1
        if not is_wide and not is_quantised(parameter):
            raise InputError(f"{name}: {label} is {kind}, a quantised weight; training needs full precision")
        if kind is torch.float16 and parameter.requires_grad:
            raise InputError(
                f"{name}: {label} is trained in {kind}, which needs a loss scaler; load it in float32 (bf16=True "
                "computes in bfloat16)"
            )
        if parameter.is_inference():
            raise InputError(
                f"{name}: {label} was made in torch.inference_mode; load the model outside of it"
            )
    _check_tie(name, model)


def _check_tie(name: str, model: torch.nn.Module) -> None:
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    configs: list[Any] = [model.config, model.config.get_text_config()]  # type: ignore[union-attr, operator]
    said = {bool(getattr(config, "tie_word_embeddings", False)) for config in configs}
    # Adapters and quantisers put other layers there.
    if len(said) > 1 or not all(type(end) in (torch.nn.Embedding, torch.nn.Linear) for end in ends):
        return
    is_tied = ends[0].weight is ends[1].weight
    if is_tied and said == {False}:
        raise InputError(
            f"{name}: head and embedding are one parameter, and its config says tie_word_embeddings=False; set the "
            "config's field and save the model, or give the head a weight of its own"
        )
    if not is_tied and said == {True} and getattr(model, "_tied_weights_keys", None):
        raise InputError(
            f"{name}: head and embedding are two parameters, and its config says tie_word_embeddings=True; call "
            "model.tie_weights(), or set the config's field and save the model"
        )


def listed(names: Collection[str]) -> str:
    """The first few names, and the number of the others."""
    shown = ", ".join(list(names)[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


# Families whose log-probs with pictures were compared between vLLM and the trainer (docs/internals/images.md).
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
# The families among them that cut a picture into tiles of one size. The others cut it into patches, in any number.
_IN_TILES = ("smolvlm", "idefics3")


def reads_pictures(config: PreTrainedConfig) -> bool:
    """Whether Lockstep can show pictures to models with this config."""
    return config.model_type in FAMILIES


def reads_tiles(config: PreTrainedConfig) -> bool:
    """Whether a family that reads pictures cuts them into tiles of one size."""
    return config.model_type in _IN_TILES


def vision_parts(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that turn pixels into inputs of the language model: vision tower and projector, if there are any."""
    if not reads_pictures(model.config):
        return []
    trunk: Any = model.base_model
    return [trunk.vision_model, trunk.connector] if reads_tiles(model.config) else [trunk.visual]


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers whose `from_pretrained` loads a policy with this config."""
    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM


# The errors that libraries raise for a damaged or foreign file. Which one it is depends on the wrong bytes.
BAD_FILES = (
    OSError, ValueError, ImportError, RuntimeError, AssertionError, SafetensorError, StrictDataclassError,
    pickle.UnpicklingError, EOFError,
    KeyError, IndexError, TypeError, AttributeError, ArithmeticError,
)  # fmt: skip


def load_policy(path: str, model_init_kwargs: dict[str, Any] | None = None) -> PreTrainedModel:
    """A causal language model, in float32 unless `model_init_kwargs` names another `dtype` (TRL's convention).

    With a `quantization_config` in `model_init_kwargs`, full-precision weights are quantised when they are loaded.

    Raises:
        InputError: the directory or id holds no causal language model, or an adapter; its files lack a tensor, or hold
            a tensor that does not belong to the model; its weights are stored quantised (an engine would load the
            quantised weights); or an argument is refused.
    """
    check_init_kwargs(model_init_kwargs or {})
    kwargs = {"dtype": torch.float32, **(model_init_kwargs or {})}
    # With these, transformers lists tensors of another shape instead of raising, and the error here can name them.
    kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        config = load_files(AutoConfig, path)
        if getattr(config, "quantization_config", None) is not None:
            raise InputError(f"model {path} is quantised; training needs its full-precision weights")
        _refuse_codes(path)
        model, report = load_files(model_class(config), path, **kwargs)
    except BAD_FILES as error:
        if isinstance(error, InputError):
            raise
        given = f" with model_init_kwargs={without_secrets(model_init_kwargs)}" if model_init_kwargs else ""
        raise InputError(
            f"cannot load a causal language model from {path}{given}: {first_line(error)}"
        ) from error
    refuse_adapter(f"model {path}", model)
    refuse_incomplete(f"model {path}", report)
    return model


def _refuse_codes(path: str) -> None:
    """Refuse weights that are stored as 8-bit integers: they are codes, whose scales the config would name."""
    for file in Path(path).glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                dtypes = {name: tensors.get_slice(name).get_dtype() for name in names}
        except (OSError, SafetensorError):
            # The library that loads the file says what is wrong with it.
            continue
        for name, dtype in dtypes.items():
            if dtype in ("I8", "U8"):
                raise InputError(
                    f"model {path}: {name} is stored as {dtype}, a quantised weight; training needs full precision"
                )


def load_renamed(model: torch.nn.Module, folder: Path) -> bool:
    """Load saved weights into a model if their files name or split tensors differently than the model does.

    transformers writes the weights of some families (experts, vision-language models) under the names of their
    published checkpoints. `transformers.Trainer` leaves out, silently, what has another name than in the model.

    Returns:
        Whether the weights were loaded. False: the names are the model's own, or there is no safetensors file.

    Raises:
        InputError: the files lack a tensor of the model, or hold one that does not belong to it.
        OSError, ValueError, ...: the files cannot be read.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not isinstance(model, PreTrainedModel) or not files:
        return False
    own = model.state_dict().keys()
    if all(name in own for file in files for name in _names_in(file)):
        return False
    dtype = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    kwargs = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    saved, report = load_files(type(model), str(folder), **kwargs)
    refuse_incomplete(f"checkpoint {folder}", report)
    model.load_state_dict(saved.state_dict())
    return True


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def check_init_kwargs(model_init_kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that make the trainer's model differ from the engine's, or run the model's code."""
    if model_init_kwargs.get("trust_remote_code"):
        raise InputError(
            f"model_init_kwargs.trust_remote_code={model_init_kwargs['trust_remote_code']!r} is not "
            "supported, only False is: code that comes with a model is not run"
        )
    if not model_init_kwargs.get("weights_only", True):
        raise InputError(
            "model_init_kwargs.weights_only=False is not supported: it unpickles whatever the files of the "
            "weights contain, which runs code; leave it out"
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens that a model attends to; None if its config has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def fp32_head_product(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """(…, V) float32 logits of an output head, computed in float32 for any dtype of head and input."""
    weight: torch.Tensor = head.weight  # type: ignore[assignment]
    bias: torch.Tensor | None = getattr(head, "bias", None)
    wide = None if bias is None else bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.nn.functional.linear(hidden.float(), weight.float(), wide)


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of the model and its adapter to 0: the trained policy would differ from the sampled one."""
    for _, module, name in _dropouts(model):
        setattr(module, name, 0.0)


def modules_with_dropout(model: torch.nn.Module) -> list[str]:
    """Names of the modules of the model and its adapter whose dropout is not 0."""
    return [place for place, module, name in _dropouts(model) if getattr(module, name)]


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Each dropout: the module's name, the module, and the name of the attribute with the probability."""
    for place, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            yield place, module, "p"
        # Attention layers of transformers store their dropout as a number.
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                yield place, module, name


def first_line(error: Exception) -> str:
    """The first line of a library's error, after its kind where the text alone is unclear, as of a KeyError."""
    lines, kind = str(error).strip().splitlines(), type(error).__name__
    if not lines:
        return kind
    return lines[0] if isinstance(error, OSError | ValueError | RuntimeError) else f"{kind}: {lines[0]}"


# The fields in which configs list the kinds of their layers.
_KINDS = ("layer_types", "layers_block_type", "block_types")
_WITHOUT_STATE = ("mlp", "moe")


def keeps_state(config: PreTrainedConfig) -> bool:
    """Whether a model with this config has a layer with a state, of any kind.

    The kinds of the layers say so in families that transformers does not call stateful, such as LFM2 and MiniMax.
    """
    text = config.get_text_config()
    kinds = {kind for field in _KINDS for kind in getattr(text, field, None) or ()}
    if any(kind == "linear_attention" or not _is_stateless(kind) for kind in kinds):
        return True
    known = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return known and bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], "_is_stateful", False))


def _is_stateless(kind: str) -> bool:
    return kind.endswith("attention") or kind in _WITHOUT_STATE
