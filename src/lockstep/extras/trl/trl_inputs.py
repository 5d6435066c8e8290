"""What TRL's trainers pass to their generation object: parameters that are checked, and images that become pictures.

The checks are pure functions of each rank's own arguments. TRL's processor has already put each image's ids into the
prompt. Each rank runs that processor's image processor over its images, and sends the pixels to the rank with the
engine, each picture once. The engine then computes with the pixels that the trainer computes with.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.contract.sampling import Grammar, Sampling, check_grammar
from lockstep.engines.servers.calls import server_urls
from lockstep.engines.vllm.arguments import MODEL_IMPLEMENTATIONS, NEUTRAL_SAMPLING
from lockstep.errors import InputError, LockstepError
from lockstep.images.pictures import Picture, PromptPictures, picture_from_wire, picture_to_wire
from lockstep.images.prompts import ImagePrompts, PromptReader
from lockstep.models.adapters import causal_model, is_adapted
from lockstep.models.policy import FAMILIES, reads_pictures
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import end_ids
from lockstep.weights.push import weights_of

# The ids of one prompt, with the pictures that are in them.
Shown = tuple[Ids, PromptPictures]


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor for text and images, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


class TrlPictures:
    """Reads one trainer's images. Refuses a tokenizer that lacks a mark beside the model's pictures."""

    def __init__(self, model: torch.nn.Module, processing_class: Any) -> None:
        processor = getattr(processing_class, "image_processor", None)
        inner: PreTrainedModel = causal_model(model)
        tokenizer = tokenizer_of(processing_class)
        self._reader = PromptReader(tokenizer)
        if processor is not None and reads_pictures(inner.config):
            name = inner.config.name_or_path
            self._reader = ImagePrompts(inner, tokenizer, name, processor=processor)

    def part(self, prompts: Sequence[Sequence[int]], images: Sequence[Any] | None) -> dict[str, Any]:
        """One rank's prompts and pictures, in JSON types and arrays. Refuses what the model cannot read."""
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, str) or not all(isinstance(token, int) for token in prompt):
                raise InputError(f"prompt {row} is not a list of token ids: {prompt!r:.80}")
        rows = [list(row or ()) for row in images] if images is not None else [[] for _ in prompts]
        pictures: dict[str, Picture] = {}
        # TRL repeats one image object for all completions of a prompt.
        known: dict[int, Picture] = {}
        shown: list[list[str]] = []
        for row, (ids, own) in enumerate(zip(prompts, rows, strict=True)):
            for image in own:
                if id(image) not in known:
                    known[id(image)] = self._picture(image)
            found = [known[id(image)] for image in own]
            self._check(row, ids, found)
            pictures |= {picture.digest: picture for picture in found}
            shown.append([picture.digest for picture in found])
        return {
            "prompts": [list(ids) for ids in prompts],
            "shown": shown,
            "pictures": {digest: picture_to_wire(picture) for digest, picture in pictures.items()},
        }

    def placed(self, part: Mapping[str, Any]) -> list[Shown]:
        """The prompts of a rank's part, with their pictures in their places."""
        pictures = {digest: picture_from_wire(found) for digest, found in part["pictures"].items()}
        if any(picture.digest != digest for digest, picture in pictures.items()):
            raise LockstepError("a picture changed on its way to the rank that holds the engine")
        pairs = zip(part["prompts"], part["shown"], strict=True)
        rows = [(whole_numbers(ids), [pictures[digest] for digest in shown]) for ids, shown in pairs]
        return [(ids, self._reader.placed(ids, own)) for ids, own in rows]

    def _picture(self, image: Any) -> Picture:
        if not self._reader.shows_pictures:
            raise InputError(
                "this model is shown no images: give a model of a family that reads them "
                f"({', '.join(FAMILIES)}) and its processor as processing_class, or prompts of text only"
            )
        return self._reader.picture(image)

    def _check(self, row: int, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        found = sum(token == self._reader.placeholder for token in ids)
        due = sum(picture.tokens for picture in pictures)
        if found != due:
            raise InputError(
                f"prompt {row} has {found} ids that stand for parts of images, and its {len(pictures)} images have "
                f"{due}: a completion sampled such an id, a prompt's text contains one, or a rollout function "
                "changed the images"
            )


# Parameters of TRL that support only one or a few values, and the reason.
_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mode": (("colocate", "server"), "it must be colocate or server"),
    "enable_sleep_mode": ((False, True), "it must be true or false"),
    "model_impl": (MODEL_IMPLEMENTATIONS, f"it must be {', '.join(MODEL_IMPLEMENTATIONS)}"),
    "trust_remote_code": ((False,), "code from a hub is not supported"),
    "logprobs": ((None, 0), "only the sampled token's log-prob is returned"),
    "engine_dtype": (("auto", "float32", "bfloat16"), "it must be auto, float32 or bfloat16"),
}
_GENERATION_KWARGS = {"presence_penalty", "frequency_penalty", "stop", "max_tokens", *NEUTRAL_SAMPLING}
_HARMLESS: dict[str, tuple[Any, ...]] = {"n": (1,), "logprobs": (None, 0)}


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampling distribution of a run, and its seed; None if the user gave no seed."""

    sampling: Sampling
    seed: int | None


def check_parameters(given: Mapping[str, Any]) -> None:
    """Refuse values of the constructor's parameters that no engine here supports."""
    for name, (values, why) in _SUPPORTED.items():
        if given[name] not in values:
            raise InputError(f"{name}={given[name]!r}: {why}")
    if given["engine_kwargs"] and (given["mode"] == "server" or given["engine"] is not None):
        raise InputError("engine_kwargs are for vLLM in this process; give them to 'lockstep serve' instead")
    size = given["tensor_parallel_size"]
    if not isinstance(size, int) or size < 1:
        raise InputError(f"tensor_parallel_size={size!r}; it must be a whole number of at least 1")
    is_set = {"tensor_parallel_size": size > 1, "enable_sleep_mode": given["enable_sleep_mode"]}
    for said in (f"{name}={given[name]}" for name, own in is_set.items() if own):
        if given["engine"] is not None:
            raise InputError(f"{said}, and a running engine is given; start that engine with it")
        if given["mode"] == "server":
            warnings.warn(f"{said} has no effect with servers", stacklevel=2)


def urls_of(given: Mapping[str, Any]) -> list[str]:
    """Base URL of each server, in server mode."""
    return server_urls(given["server_base_url"], given["server_host"], given["server_port"])


def check_model(model: Any, accelerator: Any, processing_class: Any) -> None:
    """Refuse a model unless this process holds all of its weights, without wrappers other than a LoRA adapter."""
    inner = causal_model(model) if isinstance(model, torch.nn.Module) else model
    if not isinstance(inner, PreTrainedModel):
        raise InputError(f"model is a {type(inner).__name__}; wrapped models are not supported yet")
    if not isinstance(tokenizer_of(processing_class), PreTrainedTokenizerBase):
        kind = type(processing_class).__name__
        raise InputError(f"processing_class is a {kind}: give a tokenizer, or a processor that has one")
    if getattr(inner.config, "quantization_config", None) is not None:
        raise InputError("the model is quantised; training needs its full-precision weights")
    if not inner.config.name_or_path:
        raise InputError("model.config.name_or_path is empty; the engine must load the same model from there")
    way = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if way not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise InputError(
            f"distributed training of type {way} is not supported yet: every rank must hold the whole model"
        )
    if (mixed := accelerator.mixed_precision) not in ("no", "bf16"):
        raise InputError(f"mixed_precision={mixed!r} is not supported; use bf16 or none")
    if is_adapted(model):
        # Refuses an adapter that cannot be merged.
        weights_of(model)
    # The tensors of an adapter may have another dtype. They are added to the weights, which keep theirs.
    own = (p for name, p in inner.named_parameters() if ".lora_" not in name)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in own}
    if len(dtypes) > 1:
        raise InputError(
            f"the model's parameters have several dtypes ({', '.join(sorted(dtypes))}); load it in one, and leave out "
            "cast_lm_head_to_fp32"
        )
    if dtypes - {"float32", "bfloat16"}:
        raise InputError(f"the model is in {dtypes.pop()}; load it in float32 or bfloat16")


def engine_dtype_for(asked: str, model: PreTrainedModel, accelerator: Any) -> torch.dtype:
    """Dtype of the engine. By default it is the dtype of the trainer's forward."""
    if asked != "auto":
        return getattr(torch, asked)
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else causal_model(model).dtype


def sampled_from(given: Mapping[str, Any]) -> Sampled:
    """The sampling distribution and the seed. `generation_kwargs` override the parameters, as in TRL."""
    extra = dict(given["generation_kwargs"] or {})
    seed = extra.pop("seed", None)
    for name, neutral in _HARMLESS.items():
        if extra.pop(name, neutral[0]) not in neutral:
            raise InputError(
                f"generation_kwargs may not set {name}: one completion and its log-probs are returned per prompt"
            )
    unknown = extra.keys() - _GENERATION_KWARGS
    if unknown:
        raise InputError(f"generation_kwargs hold {', '.join(sorted(unknown))}, which are not supported")
    values = {name: given[name] for name in NEUTRAL_SAMPLING}
    values |= {"max_tokens": given["max_completion_length"], **extra}
    values["min_p"] = values["min_p"] or 0.0
    values["end_ids"] = end_ids(causal_model(given["model"]), tokenizer_of(given["processing_class"]))
    stop = values.get("stop") or ()
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if given["structured_outputs_regex"] is not None:
        values["grammar"] = Grammar("regex", given["structured_outputs_regex"])
        check_grammar(values["grammar"])
    if values["max_tokens"] is None or values["max_tokens"] < 1:
        raise InputError(f"max_completion_length={values['max_tokens']!r}; it must be at least 1")
    return Sampled(Sampling(**values), seed)


def warn_of_other_scores(sampling: Sampling) -> None:
    """Warn if TRL's trainers score a distribution other than the one that is sampled."""
    same = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "stop", "end_ids")}
    neutral = Sampling(**same)
    other = [name for name in Sampling.__slots__ if getattr(sampling, name) != getattr(neutral, name)]
    if other:
        warnings.warn(
            f"{', '.join(other)}: the log-probs belong to the sampling distribution, but TRL's trainers score the "
            "whole one; their importance-sampling ratios contain the difference at every token (TRL issue 6789)",
            stacklevel=3,
        )
