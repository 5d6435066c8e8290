"""Requests, answers and pictures in vLLM's form.

`check_sent` proves that what is sent to vLLM has the sampling settings of the trainer's request: the
`vllm.SamplingParams` in this process, or the body that is posted to a server. This check comes before the first token
is sampled. It also finds differences that are too small for any log-prob in half precision.

vLLM gets the tensors of pictures that the trainer has made, and its own image processor is not used. The prompt
already has one placeholder per image token. If its pictures went to vLLM as `multi_modal_data`, vLLM 0.32.0 would
silently repeat the placeholders. Therefore they go through `mm_input`. Each tile of a picture is sent as a separate
picture, called a piece (`Picture.pieces`): the placeholders of a piece are consecutive, and a request to a server can
describe only consecutive placeholders. The digest of a piece is its key in vLLM's caches.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from lockstep.contract.protocol import Completion, FinishReason, GenerationRequest, RequestKey
from lockstep.contract.sampling import Grammar, Sampling, as_ebnf
from lockstep.engines.vllm.arguments import BAD_WORDS, MAX_KEPT_IDS
from lockstep.engines.vllm.port.kept_ids import kept_ids_from
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.tokens.arrays import BadValues, Ids, KeptIds, reals, whole_numbers

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """The fields of `vllm.SamplingParams` for a request, as JSON types: for vLLM in this process and for servers."""
    sampling: Sampling = request.sampling
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": sampling.min_tokens,
        "stop": list(sampling.stop),
        "seed": request.seed,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
        # A stop string may be a special token. vLLM searches the text that it makes.
        "skip_special_tokens": not sampling.stop,
        **_optional_fields(sampling),
    }


def _optional_fields(sampling: Sampling) -> dict[str, Any]:
    """The fields of settings that only some requests have."""
    extra: dict[str, Any] = {}
    if sampling.is_filtered:
        extra[MAX_KEPT_IDS] = sampling.max_kept_ids
    if sampling.bad_words:
        extra[BAD_WORDS] = [list(word) for word in sampling.bad_words]
    fields: dict[str, Any] = {"extra_args": extra} if extra else {}
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids is not None:
        fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.end_ids:
        # Otherwise vLLM ends at the end tokens of its model directory, and the trainer may have been given others.
        fields |= {"ignore_eos": True, "stop_token_ids": list(sampling.end_ids)}
    if sampling.grammar is not None:
        fields["structured_outputs"] = _structured_outputs(sampling.grammar)
    return fields


def _structured_outputs(grammar: Grammar) -> dict[str, str]:
    # Choices are sent as our own grammar, so that vLLM and the trainer use the same one.
    return {"grammar": as_ebnf(grammar.spec)} if grammar.kind == "choice" else {grammar.kind: grammar.spec}


# Fields for scoring a prompt: vLLM then neither reads its prefix cache nor applies a temperature.
SCORING_FIELDS = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}


def sampling_params(request: GenerationRequest, *, partial: bool = False) -> Any:
    """The `vllm.SamplingParams` of a request; if `partial`, vLLM also returns all ids so far after each step."""
    return _params(sampling_fields(request), partial)


def scoring_params() -> Any:
    """The `vllm.SamplingParams` that score a prompt."""
    return _params(SCORING_FIELDS)


def _params(fields: Mapping[str, Any], partial: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = fields.get("structured_outputs")
    if structured is not None:
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**structured)}
    with refusals("these sampling settings"):
        kind = RequestOutputKind.CUMULATIVE if partial else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**fields, output_kind=kind)


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """A context for giving a request to vLLM, which may refuse it: a JSON schema that xgrammar would ignore in part."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (VLLMValidationError, ValueError) as error:
        raise InputError(f"vLLM refuses {what}: {str(error)[:300]}") from error


def completion(key: RequestKey, output: RequestOutput, *, filtered: bool, adapter: str | None) -> Completion:
    """Convert one output of vLLM to a completion.

    Args:
        filtered: whether the request has filters that depend on the logits (`Sampling.is_filtered`).
        adapter: name of the adapter that the current weights are in; None: the model has all of them.
    """
    _check_adapter(key, output, adapter)
    (sample,) = output.outputs
    logprobs = sample.logprobs or []
    token_ids = list(sample.token_ids)
    if len(logprobs) != len(token_ids):
        raise ProofError(
            "logprobs",
            f"request {key} has {len(token_ids)} tokens and {len(logprobs)} log-probs",
            "vLLM was started without log-probs",
            "keep the engine arguments that Lockstep sets",
        )
    if sample.finish_reason not in ("stop", "length"):
        raise LockstepError(f"request {key} ended with finish reason {sample.finish_reason!r}")
    return Completion(
        key=key,
        prompt_ids=whole_numbers(output.prompt_token_ids or ()),
        token_ids=whole_numbers(token_ids),
        # Look the log-prob up by token id, because the first entry is not always the sampled token.
        logprobs=reals([entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)]),
        weight_versions=_versions(key, sample.weight_versions, len(token_ids)),
        finish_reason=cast(FinishReason, sample.finish_reason),
        kept_ids=reported_kept_ids(
            key, sample.sampling_mask.token_ids if sample.sampling_mask else None, filtered=filtered
        ),
    )


def first_without_logprob(output: RequestOutput) -> int | None:
    """The place of the first token whose log-prob is not finite; None: every token has one, or they cannot be read."""
    (sample,) = output.outputs
    for place, (entry, token) in enumerate(zip(sample.logprobs or (), sample.token_ids, strict=False)):
        if token in entry and not math.isfinite(entry[token].logprob):
            return place
    return None


def reported_kept_ids(
    key: RequestKey, sets: Sequence[Sequence[int]] | None, *, filtered: bool
) -> KeptIds | None:
    """The kept ids of an answer of vLLM; None if the answer has none.

    Beside a filtered request in one batch, an unfiltered one gets empty sets.
    """
    if sets is None or not (filtered or any(sets)):
        return None
    try:
        return kept_ids_from(sets)
    except BadValues as error:
        raise ProofError(
            "kept_ids",
            f"request {key} has kept ids that are not token ids: {error}",
            "the engine's answer is damaged",
            "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
        ) from error


def _check_adapter(key: RequestKey, output: RequestOutput, adapter: str | None) -> None:
    used = None if output.lora_request is None else output.lora_request.lora_name
    if used != adapter:
        raise ProofError(
            "version",
            f"request {key} was answered with the adapter {used!r}; the current weights are in the adapter {adapter!r}",
            "the request lost its adapter on the way to vLLM, or got the adapter of another push",
            "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
        )


def _versions(key: RequestKey, spans: Any, tokens: int) -> Ids:
    return versions_of(key, [(int(span.version), span.start, span.end) for span in spans or ()], tokens)


def versions_of(key: RequestKey, spans: Sequence[tuple[int, int, int]], tokens: int) -> Ids:
    """(tokens,) weight version of each token.

    Args:
        spans: spans of tokens with the same version, in order: the version, the index of the first token, and the
            index after the last token. They may contain tokens after the end of the completion.
        tokens: number of tokens of the completion.
    """
    if not spans and not tokens:
        return whole_numbers(())
    bounds = [bound for _, *span in spans for bound in span]
    # Each span begins where the one before has ended.
    are_joined = bounds[:1] == [0] and all(
        start == end for end, start in zip(bounds[1::2], bounds[2::2], strict=False)
    )
    if not (
        are_joined
        and all(type(bound) is int for bound in bounds)
        and bounds == sorted(bounds)
        and bounds[-1] >= tokens
    ):
        raise ProofError(
            "version",
            f"request {key}: the weight versions of its {tokens} tokens come as the spans {bounds!s:.80}, "
            "which do not cover each token once",
            "the engine's answer is damaged",
            "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
        )
    ends = np.minimum(bounds[1::2], tokens)
    versions = np.array([version for version, _, _ in spans], dtype=np.int64)
    return whole_numbers(np.repeat(versions, np.diff(ends, prepend=0)))


def prompt_logprobs(output: RequestOutput) -> tuple[float, ...]:
    """Log-prob of every prompt id except the first, which has none."""
    ids = output.prompt_token_ids or []
    entries = output.prompt_logprobs or []
    return tuple(entry[token].logprob for entry, token in zip(entries[1:], ids[1:], strict=False) if entry)


_NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)  # fmt: skip
_OPTIONAL = ("logit_bias", "allowed_token_ids", "structured_outputs", "extra_args")


def check_sent(request: GenerationRequest, sent: Mapping[str, Any]) -> None:
    """Compare vLLM's sampling parameters that are sent with the settings of the request."""
    sampling = request.sampling
    expected = {name: getattr(sampling, name) for name in _NUMBERS} | {"n": 1, "seed": request.seed}
    found = {name: sent.get(name) for name in expected}
    expected |= {"stop": list(sampling.stop), "logit_bias": dict(sampling.logit_bias)}
    expected |= {
        "allowed_token_ids": list(sampling.allowed_token_ids or ()),
        "grammar": sampling.grammar is not None,
    }
    expected |= {"skip_special_tokens": not sampling.stop}
    expected |= {"bad_words": [list(word) for word in sampling.bad_words]}
    found |= {"stop": list(sent.get("stop") or ()), "logit_bias": dict(sent.get("logit_bias") or {})}
    found |= {"allowed_token_ids": list(sent.get("allowed_token_ids") or ())}
    found |= {"skip_special_tokens": sent.get("skip_special_tokens", True)}
    found |= {"grammar": sent.get("structured_outputs") is not None}
    found |= {"bad_words": [list(word) for word in (sent.get("extra_args") or {}).get(BAD_WORDS, ())]}
    wrong = [name for name, value in expected.items() if found[name] != value]
    if wrong:
        name = wrong[0]
        raise ProofError(
            "settings",
            f"request {request.key} goes to vLLM with {name}={found[name]!r:.80} instead of {expected[name]!r:.80}",
            "the conversion to vLLM's parameters lost or changed the setting, or vLLM itself changed it",
            "install the version of vLLM that Lockstep is tested with; otherwise this is a defect of "
            "Lockstep: report it",
        )


def fields_of(params: Any) -> dict[str, Any]:
    """The fields of a `vllm.SamplingParams` that `check_sent` reads."""
    return {
        name: getattr(params, name)
        for name in (*_NUMBERS, *_OPTIONAL, "n", "seed", "stop", "skip_special_tokens")
    }


# Number of pictures whose digests a worker remembers.
_RECORDED = 65_536


def picture_arguments(*, cache_gb: int = 0) -> dict[str, Any]:
    """Arguments of vLLM for a model that reads pictures.

    A server needs a cache of inputs: a picture is sent once, and its requests name the digest.
    """
    return {
        # The trainer has already normalised the pixels.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": cache_gb,
        "limit_mm_per_prompt": {"video": 0},
        "skip_mm_profiling": True,
    }


def piece_tensors(piece: Picture) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a piece by vLLM's names: those with one row per patch or tile, and those of the whole piece."""
    if not piece.in_tiles:
        return {"pixel_values": piece.pixel_values}, {"image_grid_thw": piece.grid}
    # No tile is padded (`images/prompts.py`).
    mask = torch.ones((), dtype=torch.bool).expand_as(piece.pixel_values[:, 0])
    counts = torch.tensor(len(piece.pixel_values))
    return {"pixel_values": piece.pixel_values, "pixel_attention_mask": mask}, {"num_patches": counts}


def prompt_with_pictures(prompt_ids: list[int], pictures: PromptPictures) -> Any:
    """The prompt of a request, as `LLMEngine.add_request` takes it."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    def item(piece: Picture) -> MultiModalKwargsItem:
        rows, single = piece_tensors(piece)
        of_rows = MultiModalFlatField(slices=[slice(0, len(piece.pixel_values))])
        fields = {name: MultiModalFieldElem(tensor, of_rows) for name, tensor in rows.items()}
        of_single = MultiModalBatchedField(keep_on_cpu=True)
        return MultiModalKwargsItem(
            fields | {n: MultiModalFieldElem(t, of_single) for n, t in single.items()}
        )

    pieces = pictures.in_pieces
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems({"image": [item(piece) for piece in pieces.pictures]}),
        {"image": list(pieces.digests)},
        {"image": [PlaceholderRange(*place) for place in piece_places(pieces)]},
    )


def piece_places(pieces: PromptPictures) -> list[tuple[int, int]]:
    """The index of each piece's first placeholder in the prompt's ids, and the number of its placeholders.

    Other ids between them are refused: vLLM would replace these by a part of the piece.
    """
    places = [(int(own[0]), len(own)) for own in pieces.places_of_each]
    if any(own[-1] - own[0] >= len(own) for own in pieces.places_of_each):
        raise LockstepError(
            "there are other ids between the placeholders of a tile, and vLLM would take them for placeholders"
        )
    return places


def holds_no_pictures(worker: Any) -> bool:
    """Whether a worker's encoder cache is empty: it then keeps no encoded picture of older weights."""
    return not worker.model_runner.encoder_cache


def picture_cache_bytes(model_config: Any) -> int:
    """Bytes of the cache in which vLLM keeps the tensors of pictures by their digest; 0: there is no such cache."""
    found = model_config.multimodal_config
    # With vLLM's other kinds of cache, a request cannot name a picture by its digest alone.
    return (
        int(found.mm_processor_cache_gb * (1 << 30))
        if found and found.mm_processor_cache_type == "lru"
        else 0
    )


class PictureRecorder:
    """Records the digest of the tensors of every picture that a worker encodes.

    `batch` is vLLM's method that returns the keys and the tensors of the pictures that the next step encodes.
    """

    def __init__(self, batch: Callable[..., Any]) -> None:
        self._batch = batch
        # The digest of the encoded tensors, by their key in vLLM's caches.
        self.digests: OrderedDict[str, str] = OrderedDict()

    def batch(self, *args: Any) -> Any:
        """Replaces vLLM's method, and returns the same result."""
        found = self._batch(*args)
        keys, items = found[:2]
        for key, (_, item) in zip(keys, items, strict=True):
            if (piece := _piece_in({name: field.data for name, field in item.items()})) is not None:
                self.digests[key] = piece.digest
                self.digests.move_to_end(key)
                if len(self.digests) > _RECORDED:
                    self.digests.popitem(last=False)
        return found


def _piece_in(tensors: Mapping[str, Any]) -> Picture | None:
    """The piece of a picture that has these tensors; None: another program has made them, or a tile is padded."""
    found: dict[str, torch.Tensor] = {
        name: t.cpu().contiguous() for name, t in tensors.items() if hasattr(t, "cpu")
    }
    pixels = found.get("pixel_values")
    if pixels is None or pixels.dtype != torch.float32:
        return None
    piece = Picture(pixels, found.get("image_grid_thw", torch.tensor([1, 0, 0])), 0)
    rows, single = piece_tensors(piece)
    expected = rows | single
    is_ours = found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    return piece if is_ours else None


def record_pictures(worker: Any) -> None:
    """Install a recorder in a worker, if there is none. vLLM's model runners prepare pictures in different methods."""
    runner = worker.model_runner
    if hasattr(runner, "lockstep_pictures"):
        return
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    owner, name = (
        (runner, "_batch_mm_inputs_from_scheduler") if second is None else (second, "prepare_mm_inputs")
    )
    if hasattr(owner, name):
        runner.lockstep_pictures = recorder = PictureRecorder(getattr(owner, name))
        setattr(owner, name, recorder.batch)


def recorded_digests(worker: Any, digests: Sequence[str]) -> dict[str, str | None]:
    """For each digest in a request, that of the tensors that the worker has encoded for it; None: it encoded none."""
    recorder = getattr(worker.model_runner, "lockstep_pictures", None)
    return {digest: None if recorder is None else recorder.digests.get(digest) for digest in digests}
