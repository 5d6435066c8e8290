"""Models with adapters (PEFT): the parts of such a model, the files of an adapter, and the digest of its base.

All code that needs a model's trunk, head or names gets it here. The adapter stays in the model: the layers of
`causal_model(model)` are the adapted ones.

PEFT keeps only the base's name. A base that was changed in memory has the name of the files that it came from, and
files of a name change. Therefore a trainer writes the base's digest into each directory with an adapter. The digest is
that of names, shapes and values of the weights without the adapter. It is the same wherever the base lies, in whatever
order, files and dtype it is stored, as long as float32 holds its values.

Beside it stand the digests of the adapter's own files. Another `lora_alpha` is a valid file too, and another model.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import BitsAndBytesConfig, PreTrainedModel

from lockstep.devices import read_in_threads
from lockstep.errors import InputError, reason, told
from lockstep.files import from_json, read_json, replace_text, what_is_at
from lockstep.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_file, adapter_tensors, load_adapter
from lockstep.models.parameters import checkpoint_tensors
from lockstep.models.policy import BAD_FILES, check_finite, first_line, listed, load_policy
from lockstep.models.quantised import dequantised, is_quantised

_logger = logging.getLogger(__name__)

# TRL's name for a frozen copy of the adapter that training started from.
REFERENCE = "ref"


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether a model is a `PeftModel`, or has PEFT layers. Without PEFT imported, there are none."""
    peft = sys.modules.get("peft")
    if peft is None or not hasattr(peft, "PeftModel"):
        return False
    if isinstance(model, peft.PeftModel):
        return True
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def causal_model(model: torch.nn.Module) -> PreTrainedModel:
    """The causal language model itself: inside a `PeftModel`, with its adapted layers, or `model` unchanged."""
    peft = sys.modules.get("peft")
    wrapped = peft is not None and hasattr(peft, "PeftModel") and isinstance(model, peft.PeftModel)
    return model.get_base_model() if wrapped else model  # type: ignore[operator]


def head_name(model: torch.nn.Module) -> str:
    """Name of the output head's weight in the base model."""
    inner = causal_model(model)
    head = inner.get_output_embeddings()
    return next(f"{name}.weight" for name, module in inner.named_modules() if module is head)


def with_adapter(model: PreTrainedModel, peft_config: Any | None, *, seed: int) -> PreTrainedModel:
    """The policy that a trainer trains: `model`, with a new adapter if `peft_config` is given.

    Raises:
        InputError: the adapter cannot be added (see `add_adapter`), or the model's own adapter is frozen.
    """
    if peft_config is not None:
        model = add_adapter(model, peft_config, seed=seed)
    if not is_adapted(model):
        return model
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "the model's adapter is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    return model


def add_adapter(model: PreTrainedModel, peft_config: Any, *, seed: int = 0) -> Any:
    """A `peft.PeftModel` around `model`, with LoRA layers, which is the same policy until the first optimizer step.

    The adapter may have dropout, which the caller switches off (`models.policy.switch_off_dropout`). `seed` makes the
    initial weights; the state of torch's generator does not change.

    Raises:
        InputError: `peft_config` is not a LoRA configuration, its layers are not in the model, or the model already has
            an adapter.
    """
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise InputError(f"peft_config is a {type(peft_config).__name__}; give a peft.LoraConfig")
    if not isinstance(peft_config, peft.LoraConfig) or peft_config.peft_type != peft.PeftType.LORA:
        raise InputError(
            f"peft_config is a {type(peft_config).__name__}, which is not supported (nor is any "
            "prompt-learning): only LoRA's weights can be merged for an engine; give a peft.LoraConfig"
        )
    if getattr(peft_config, "layer_replication", None):
        raise InputError("layer_replication is not supported: the engine's model has no copies of layers")
    if is_adapted(model):
        raise InputError(
            "the model has an adapter already, and peft_config asks for another: leave peft_config out to "
            "train the existing one, or merge it, save the model and give its directory"
        )
    _check_names(model, peft_config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft_config)
        except ValueError as error:
            raise InputError(f"peft_config does not fit the model: {error}") from error


def _check_names(model: PreTrainedModel, peft_config: Any) -> None:
    """Say which names of an adapter's layers the model has not: PEFT leaves them out without a word.

    Raises:
        InputError: the model has none of the names of a field.
    """
    for field in ("target_modules", "target_parameters", "modules_to_save", "exclude_modules"):
        given = getattr(peft_config, field, None) or ()
        if isinstance(given, str):
            # A pattern. PEFT refuses one of `target_modules` that no layer has.
            continue
        found = model.named_parameters() if field == "target_parameters" else model.named_modules()
        names = [name for name, _ in found]
        lacking = sorted(n for n in given if not any(f".{name}".endswith(f".{n}") for name in names))
        if not lacking:
            continue
        ends = {name.rpartition(".")[2] for name in names}
        near = list(dict.fromkeys(n for lack in lacking for n in difflib.get_close_matches(lack, ends, 1)))
        hint = f"; did you mean {listed(near)}?" if near else ""
        line = f"{field}: the model has no layer {listed(lacking)}{hint}"
        if len(lacking) == len(given):
            raise InputError(f"peft_config does not fit the model: {line}")
        if os.environ.get("RANK", "0") == "0":
            others = listed(sorted(set(given) - set(lacking)))
            _logger.warning(f"{line}{' Only' if near else '; only'} {others} is used")


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """A context in which the model is the policy that training started from.

    Its adapter is switched off, or replaced by the adapter named "ref" if the model has one. The active adapter and the
    trainable parameters are restored at the end, also after an error. Weights of the base layers that are trained with
    the adapter (LoRA's `bias` other than "none") are not restored to their old values.

    Raises:
        InputError: the model is not a `PeftModel`, or has several active adapters.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise InputError(
            f"a {type(model).__name__} has no adapter to switch off; keep a copy of the model as reference"
        )
    active = list(model.active_adapters)
    if len(active) != 1:
        raise InputError(f"the model has {len(active)} active adapters; exactly one is supported")
    gradient_flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        if REFERENCE in model.peft_config:
            model.set_adapter(REFERENCE)
            yield
        else:
            with model.disable_adapter():
                yield
    finally:
        if list(model.active_adapters) != active:
            model.set_adapter(active[0])
        for parameter, required_gradient in gradient_flags:
            parameter.requires_grad_(required_gradient)


def has_frozen_adapter(model: Any) -> bool:
    """Whether an adapted model has the adapter of the reference beside its own."""
    return REFERENCE in getattr(model, "peft_config", {})


@contextmanager
def base_alone(model: torch.nn.Module) -> Iterator[None]:
    """A context in which each layer with an adapter computes as the layer that it wraps, whatever PEFT has switched."""
    changed: list[tuple[torch.nn.Module, Any]] = []
    try:
        for module in model.modules():
            inner = next((getattr(module, own) for own in _WRAPPED if hasattr(module, own)), None)
            if inner is not None:
                changed.append((module, vars(module).get("forward")))
                module.forward = inner.__call__
        yield
    finally:
        for module, forward in changed:
            del module.forward
            if forward is not None:
                module.forward = forward


# Elements that are converted and read at a time: few enough to stay in a processor's cache.
_PART = 1 << 18
# What PEFT names the module that it has wrapped: a layer with an adapter, and a module that is trained as a whole.
_WRAPPED = ("base_layer", "original_module")


def base_digest(model: torch.nn.Module) -> str:
    """Hex digest of a model's base.

    Every parameter and every saved buffer counts once, under the name of a checkpoint, with its shape and its values in
    float32 (float64 and integers: as they are). Of tied tensors only the first name counts. Weights in 4 bits count as
    the values that their codes stand for. Adapters, and modules that PEFT trains as a whole, do not count; what they
    have replaced does.
    """
    inner = causal_model(model)
    named = dict(_tensors(inner, "", wrapped=is_adapted(model)))
    firsts: dict[object, str] = {}
    once = {name: tensor for name, tensor in named.items() if firsts.setdefault(id(tensor), name) == name}
    plain = {name: tensor for name, tensor in once.items() if not is_quantised(tensor)}
    tensors = [(part.name, part.tensor) for part in checkpoint_tensors(inner, plain)]
    return _digest(tensors + [(name, tensor) for name, tensor in once.items() if name not in plain])


def weights_digest(model: torch.nn.Module) -> str:
    """`base_digest`, and if the model has an adapter, a digest of its base and its adapter."""
    return _digest(list(_tensors(model, "", wrapped=False))) if is_adapted(model) else base_digest(model)


def _digest(tensors: list[tuple[str, torch.Tensor]]) -> str:
    contents = read_in_threads(_content, [tensor for _, tensor in tensors])
    lines = sorted(f"{name} {text}" for (name, _), text in zip(tensors, contents, strict=True))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _tensors(module: torch.nn.Module, prefix: str, *, wrapped: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers, by the base model's own names."""
    if wrapped:
        for inside in _WRAPPED:
            if inside in module._modules:
                yield from _tensors(getattr(module, inside), prefix, wrapped=wrapped)
                return
    saved = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in {**module._parameters, **saved}.items():
        if tensor is not None:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.", wrapped=wrapped)


def _content(tensor: torch.Tensor) -> str:
    values = dequantised(tensor) if is_quantised(tensor) else tensor.detach()
    narrow = values.is_floating_point() and values.dtype != torch.float64
    digest = xxhash.xxh3_128()
    for part in values.contiguous().flatten().split(_PART):
        plain = part.cpu().float() if narrow else part.cpu()
        digest.update(plain.view(torch.uint8).numpy().data)
    return f"{list(values.shape)} {digest.hexdigest()}"


BASE_FILE = "lockstep_base.json"
# Settings of an adapter that say where its base lies, which may change.
_PLACES = ("base_model_name_or_path", "revision")


@dataclass(frozen=True, slots=True)
class Base:
    """The base that an adapter was trained on.

    Attributes:
        digest: the `base_digest` of the values that it computed with.
        dtype: torch's name of the dtype in which its files were loaded.
        quantization_config: how its weights were rounded to 4 bits when they were loaded; None: they were not.
        adapter: the digests of the adapter's files by their names; empty: an earlier version has written them.
    """

    digest: str
    dtype: str
    quantization_config: Mapping[str, Any] | None = None
    adapter: Mapping[str, str] = dataclasses.field(default_factory=dict)


def write_base(folder: Path, policy: PreTrainedModel, digest: str) -> None:
    """Write beside a saved adapter which base it was trained on, and what its files hold.

    Args:
        digest: of the base when training began. LoRA's `bias` trains parts of the base itself.
    """
    inner = causal_model(policy)
    rounded = getattr(inner.config, "quantization_config", None)
    files = [folder / name for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS)]
    about = Base(
        digest,
        str(inner.dtype).removeprefix("torch."),
        None if rounded is None else rounded.to_dict(),
        {path.name: _file_digest(path) for path in files if path.is_file()},
    )
    replace_text(folder / BASE_FILE, json.dumps(asdict(about), indent=1) + "\n")


def read_base(folder: Path) -> Base | None:
    """The base of a saved adapter; None: another program has written the adapter, and does not say."""
    path = folder / BASE_FILE
    if not os.path.lexists(path):
        return None
    try:
        base = Base(**read_json(path))
        if not isinstance(getattr(torch, base.dtype), torch.dtype):
            raise ValueError(f"{base.dtype} is no dtype")
        if not isinstance(base.adapter, dict):
            raise TypeError(f"adapter is a {type(base.adapter).__name__}")
        return base
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); copy the adapter again") from error


def load_adapted(base: str, adapter: Path) -> tuple[Any, bool]:
    """The model that an adapter was trained as, in float32, and whether its base was compared with the training's.

    Of a base in 4 bits, it has the values that the codes stand for: training computed with these.

    Args:
        base: directory or hub id of the base (`models/policy.py`).

    Raises:
        InputError: the base is another one; a file of the adapter is missing, was changed since a run saved it, or does
            not fit the others; or its weights have NaN.
    """
    settings, file = _settings(adapter), adapter_file(adapter, *ADAPTER_WEIGHTS)
    about = read_base(adapter)
    if about is not None:
        _check_unchanged(adapter, about)
    _check_weights(file, settings)
    model = _load_base(base, about)
    if about is not None and (found := base_digest(model)) != about.digest:
        raise InputError(
            f"adapter {adapter} was trained on another base than {base}: the digest of its base's weights "
            f"is {about.digest}, and that of {base} is {found}. If the base was changed in memory before "
            "the training (for example an earlier adapter was merged), make it again, save it with "
            "save_pretrained and give its directory with --base; otherwise give the base's old files with "
            "--base"
        )
    try:
        adapted, report = load_adapter(model, str(adapter))
    except KeyError as error:
        # PEFT looks up modules that are trained as a whole.
        raise InputError(_unfit(adapter, f"lacks {error.args[0]}")) from error
    except BAD_FILES as error:
        raise InputError(f"adapter {adapter} cannot be loaded onto {base}: {first_line(error)}") from error
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    lacking = sorted(trained.keys() & set(report.missing_keys))
    unknown = sorted(report.unexpected_keys)
    for names, what in ((lacking, "lacks"), (unknown, "has weights that the base has no place for:")):
        if names:
            raise InputError(_unfit(adapter, f"{what} {listed(names)}"))
    return adapted, about is not None


def _settings(adapter: Path) -> dict[str, Any]:
    """The content of an adapter's config, if it is one of LoRA whose values have the right types.

    PEFT computes with a text where a truth value belongs, and takes its defaults for what is missing.
    """
    path = adapter_file(adapter, ADAPTER_CONFIG)
    try:
        settings: dict[str, Any] = read_json(path)
        kind, rank, alpha = settings["peft_type"], settings["r"], settings["lora_alpha"]
        ranks = [rank, *(settings.get("rank_pattern") or {}).values()]
        alphas = [alpha, *(settings.get("alpha_pattern") or {}).values()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} cannot be read ({told(error)}); copy the adapter again") from error
    if kind != "LORA":
        raise InputError(f"{path} has the peft_type {kind!r:.80}; only the weights of LORA can be merged")
    import peft

    switches = [one.name for one in dataclasses.fields(peft.LoraConfig) if one.type in (bool, "bool")]
    given = [(name, settings[name]) for name in switches if name in settings]
    wrong = [
        *(("r", one, "a number of dimensions") for one in ranks if type(one) is not int or one < 1),
        *(("lora_alpha", one, "a number, and not 0") for one in alphas if not _scales(one)),
        *((name, one, "true or false") for name, one in given if type(one) is not bool),
    ]
    for name, value, must in wrong:
        what = f"{name} is {value!r:.80}; it must be {must}"
        raise InputError(f"{path}: {what}. Copy the adapter again, or correct it")
    return settings


def _scales(alpha: Any) -> bool:
    return type(alpha) in (int, float) and 0 < abs(alpha) < math.inf


def _check_unchanged(adapter: Path, about: Base) -> None:
    for name, digest in about.adapter.items():
        path = adapter / name
        try:
            is_same = what_is_at(path) == "is a file" and _file_digest(path) == digest
        except OSError as error:
            raise InputError(f"{path} cannot be read ({reason(error)}); copy the adapter again") from error
        if not is_same:
            raise InputError(
                f"{path} is not as the run saved it; copy the adapter again (or remove {BASE_FILE}, to use what is "
                "there)"
            )


def _check_weights(file: Path, settings: Mapping[str, Any]) -> None:
    """Refuse an adapter's weights that no base can make right, before the base is loaded.

    Raises:
        InputError: the file cannot be read; its tensors are not of floating point, have NaN, or another rank.
    """
    try:
        found = adapter_tensors(str(file.parent))
        tensors = {str(name): tensor.detach() for name, tensor in found.items()}
    except BAD_FILES as error:
        raise InputError(f"{file} cannot be read ({first_line(error)}); copy the adapter again") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InputError(
                f"{file}: {name} is {tensor.dtype}; the weights of an adapter are in floating point"
            )
    check_finite(str(file), ((name, tensor.float()) for name, tensor in tensors.items()))
    # A parameter of many experts has one tensor for all of them.
    if settings.get("target_parameters"):
        return
    ranks = {settings["r"], *(settings.get("rank_pattern") or {}).values()}
    for name, tensor in tensors.items():
        rank = tensor.shape[0] if tensor.dim() else 0
        if name.endswith(".lora_A.weight") and rank not in ranks:
            other = f"its {ADAPTER_CONFIG} says r={settings['r']}"
            raise InputError(f"{file}: {name} has rank {rank}, and {other}; copy or save the adapter again")


def _file_digest(path: Path) -> str:
    """The digest of a file. That of settings is the same wherever the base lies."""
    content = path.read_bytes()
    if path.name == ADAPTER_CONFIG:
        with suppress(ValueError, AttributeError):
            kept = {name: value for name, value in from_json(content.decode()).items() if name not in _PLACES}
            content = json.dumps(kept, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _unfit(adapter: Path, what: str) -> str:
    return f"adapter {adapter}: its file {what}; copy or save the adapter again, or correct its adapter_config.json"


def _load_base(base: str, about: Base | None) -> PreTrainedModel:
    loaded = {"dtype": getattr(torch, about.dtype) if about is not None else torch.float32}
    model = load_policy(base, loaded).float()
    if about is None or about.quantization_config is None:
        return model
    rounding = BitsAndBytesConfig.from_dict(dict(about.quantization_config))
    codes = load_policy(base, {**loaded, "quantization_config": rounding})
    values = dict(codes.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            given = values[name]
            parameter.copy_(dequantised(given) if is_quantised(given) else given)
    return model
