"""The model's own files as inputs of a run: what its config, generation config, tokenizer and image processor mean, and digests of
the weights that no checkpoint brings back.

The receipt has them. A resumed run compares them before it loads anything. The meaning of a file is what the library
that reads it has made of it, so that a file that is only written again, or lies in another folder, is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.contract.model_fields import NOT_COMPARED
from lockstep.watch.receipt import text_digest

# The engine does not need these two fields of a config, but the loss of a mixture of experts does.
_NO_MEANING = (NOT_COMPARED - {"router_aux_loss_coef", "output_router_logits"}) | {"_attn_implementation"}
# The end tokens stand for themselves, because transformers changes these fields of a loaded model.
_NO_MEANING_IN_GENERATION = {
    "_from_model_config", "_commit_hash", "_original_object_hash", "transformers_version", "use_cache", "output_attentions",
    "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
_NO_MEANING_OF_IMAGES = {
    "_processor_class",
    "processor_class",
    "image_processor_type",
    "feature_extractor_type",
    "device",
}
# A longer value stands in the receipt as its digest.
_LONGEST = 200
_CONFIG = "config.json"
_TOKENIZER = "tokenizer"
# What the text of tokenizers' own JSON holds before the vocabulary and the merges.
_VOCABULARY_PART = ',"model":{'
_RULES = "rules of its vocabulary"
_NOT_RULES = ("version", "truncation", "padding", "model")


def model_meaning(model: Any, tokenizer: Any, end_ids: tuple[int, ...], images: Any = None) -> dict[str, Any]:
    """What the files beside a model's weights mean, by file, in JSON types.

    Args:
        model: the causal language model, as it was loaded.
        end_ids: the tokens that end a completion.
        images: the image processor; None: there is none.
    """
    found = {
        _CONFIG: _meaning(model.config.to_dict(), _NO_MEANING),
        "generation_config.json": {"end tokens": sorted(end_ids)},
        _TOKENIZER: tokenizer_meaning(tokenizer),
    }
    if model.generation_config is not None:
        found["generation_config.json"] |= _meaning(model.generation_config.to_dict(), _NO_MEANING_IN_GENERATION)
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

    Another version of a library may know more fields, or fewer, and may write the rules of a tokenizer in another way. Then only
    fields that both versions know are compared.

    Args:
        earlier, now: results of `model_meaning`.
        same_libraries: whether both were made by the same versions of the libraries that read the files.
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
