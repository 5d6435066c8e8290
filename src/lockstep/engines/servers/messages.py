"""What trainer and server say to each other, as JSON: requests, answers, pictures, and acknowledgements.

These are pure functions, and vLLM need not be installed. They check that an answer belongs to its request and that
each log-prob belongs to its token. `contract/inbox.py` then checks the content of the answer.

Each picture is sent once per server, before the first completion of its prompt: in a request for one token, whose
answer is dropped. vLLM keeps the picture's tensors in its cache of inputs, under the picture's digest, and later
requests contain only the digest. The workers report the digest of the tensors that they have encoded.

For each picture, a request contains only the index of the first placeholder and the number of placeholders. Therefore
each tile of a picture is sent as a separate picture, called a piece (`Picture.pieces`); in this module, "picture"
means such a piece. Its format is the one of vLLM's endpoint: names, dtypes, shapes and raw bytes in msgpack. No part
of it is pickled.
"""

from __future__ import annotations

import asyncio
import base64
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from operator import eq, itemgetter
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch

from lockstep.contract.protocol import Completion, FinishReason, GenerationRequest
from lockstep.contract.sampling import GRAMMAR_FIELDS, Sampling
from lockstep.contract.support import Bans
from lockstep.contract.tensors import LoadedWeights, TensorSpec
from lockstep.engines.vllm.port.requests import (
    SCORING_FIELDS,
    piece_places,
    piece_tensors,
    reported_kept_ids,
    sampling_fields,
    versions_of,
)
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.tokens.arrays import BadValues, Ids, Reals, reals, whole_numbers

# vLLM's msgpack extension for the bytes of a tensor.
_RAW = 3


class SentPictures:
    """The pictures that one server holds, as far as this trainer knows.

    vLLM's cache drops the pictures that were used least recently. This class relies on only half of the cache, because
    requests may reach the server in another order than the trainer sends them.
    """

    def __init__(self) -> None:
        # Bytes of each picture by digest. The picture that was used last is at the end.
        self._held: OrderedDict[str, int] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    def one_at_a_time(self, pictures: PromptPictures) -> AbstractAsyncContextManager[Any]:
        """A lock that all requests with these pictures share: one request sends them, and the others wait for it."""
        return self._locks.setdefault(pictures.digests, asyncio.Lock())

    def missing(self, pictures: PromptPictures, capacity: int) -> tuple[Picture, ...]:
        """The pictures that a server whose cache of inputs has `capacity` bytes does not hold."""
        sizes = {picture.digest: _size(picture) for picture in pictures.pictures}
        if (needed := sum(sizes.values())) > capacity // 2:
            raise InputError(
                f"the pictures of a prompt have {needed} bytes, and the server's cache of inputs has "
                f"{capacity} bytes; it must "
                "have twice as many: start the server with a larger --mm-processor-cache-gb, or use smaller pictures"
            )
        return tuple({p.digest: p for p in pictures.pictures if p.digest not in self._held}.values())

    def use(self, pictures: PromptPictures, capacity: int) -> None:
        """Record that a request with these pictures is being sent. The server must hold all of them."""
        for picture in pictures.pictures:
            self._held[picture.digest] = _size(picture)
            self._held.move_to_end(picture.digest)
        while sum(self._held.values()) > capacity // 2:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """Assume that the server holds no picture, because it may have been started again."""
        self._held.clear()


def features(pictures: PromptPictures, sent: Collection[Picture] = ()) -> dict[str, Any]:
    """The field `features` of a request to vLLM's endpoint: the digest of each picture, and its position in the prompt.

    The tensors of the pictures in `sent` are part of the request; vLLM takes the others from its cache.
    """
    tensors = {picture.digest: encoded(picture) for picture in sent}
    pictures = pictures.in_pieces
    return {
        "mm_hashes": {"image": list(pictures.digests)},
        "mm_placeholders": {"image": _places(pictures)},
        "kwargs_data": {"image": [tensors.get(digest) for digest in pictures.digests]},
    }


def encoded(picture: Picture) -> str:
    """The tensors of a picture in the format of vLLM 0.32.0: msgpack in base64."""
    rows, single = piece_tensors(picture)
    whole = {"keep_on_cpu": False, "slices": [[0, len(picture.pixel_values), None]], "dim": 0}
    item = {name: {"data": _tensor(tensor), "field": ["flat", whole]} for name, tensor in rows.items()}
    item |= {
        name: {"data": _tensor(t), "field": ["batched", {"keep_on_cpu": True}]} for name, t in single.items()
    }
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def check_places(request: GenerationRequest, answer: Mapping[str, Any]) -> None:
    """Check that the server has put the same number of pictures into the prompt, at the same positions."""
    found = {kind: places for kind, places in (answer.get("mm_placeholders") or {}).items() if places}
    expected = {"image": _places(request.pictures)} if request.pictures else {}
    if found != expected:
        raise ProofError(
            "echo",
            f"request {request.key}: pictures were sent for the places {expected!s:.200}, and the server "
            f"reports {found!s:.200}",
            "a program between trainer and server changed the request, or this release of vLLM reads it differently",
            "install the version of vLLM that Lockstep is tested with, and remove proxies between trainer and server",
        )


def check_encoded(pictures: Sequence[Picture], workers: Sequence[Mapping[str, str | None]], url: str) -> None:
    """Check that the workers of a server have encoded the pictures that were sent.

    Args:
        workers: per worker and digest, the digest of the tensors that the worker has encoded under it. None: it has
            encoded none; the later stages of a pipeline never encode pictures.
    """
    for picture in pictures:
        found = {worker.get(picture.digest) for worker in workers} - {None}
        if found != {picture.digest}:
            raise ProofError(
                "echo",
                f"the server at {url} encoded {', '.join(map(str, found)) or 'nothing'} under the digest "
                f"{picture.digest}",
                "another picture was sent or kept under this digest, or its tensors were changed on their way",
                "restart the server, so that its cache of pictures is empty; if this happens again, report it "
                "with this message",
            )


def _places(pictures: PromptPictures) -> list[dict[str, int]]:
    return [{"offset": start, "length": length} for start, length in piece_places(pictures.in_pieces)]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    raw = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]


def _size(picture: Picture) -> int:
    rows, single = piece_tensors(picture)
    return sum(tensor.nbytes for tensor in (*rows.values(), *single.values()))


T = TypeVar("T")

# vLLM's server writes this in place of a log-prob that is missing, NaN or −inf (fault P3).
_NO_LOGPROB = -9999.0
# Getters for two fields of a token's entry. `map` calls them faster than a loop in Python.
_token_id, _logprob = itemgetter("token_id"), itemgetter("logprob")
# vLLM's stamp of the weights that it has loaded at its start.
INITIAL_WEIGHTS = "default"
# What Python raises for a field that is missing, or has another type.
_BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


def _refusing_broken(read: Callable[[Any, Any, str, Any], T]) -> Callable[[Any, Any, str, Any], T]:
    """A reader of answers that refuses an answer with a missing field, or with a value of another type."""

    @functools.wraps(read)
    def checked(answer: Any, asked: Any, name: str, versions: Any) -> T:
        try:
            return read(answer, asked, name, versions)
        except InputError:
            raise
        except _BROKEN as error:
            raise _mixed_up(
                f"the answer to request {name} is damaged ({type(error).__name__}: {error!s:.80})"
            ) from error

    return checked


def generation_body(request: GenerationRequest, name: str) -> dict[str, Any]:
    """The body of a generation request with a unique name. The server must already hold the request's pictures."""
    body = _body(request.prompt_ids.tolist(), name, sampling_fields(request))
    return body | {"features": features(request.pictures)} if request.pictures else body


def pictures_body(
    request: GenerationRequest, sent: Sequence[Picture], name: str, *, first: bool
) -> dict[str, Any]:
    """The body of a request for one token, whose only purpose is to send pictures of a prompt.

    If it is `first`, the server answers before the generation requests that wait: for servers that accept priorities.
    """
    body = _body(request.prompt_ids.tolist(), name, {"max_tokens": 1, "detokenize": False})
    return body | {"features": features(request.pictures, sent)} | _priority(first)


def scoring_body(ids: tuple[int, ...], name: str, *, first: bool) -> dict[str, Any]:
    """The body of a request for the log-probs of the prompt itself. vLLM computes them without its prefix cache.

    If it is `first`, the server answers before the generation requests that wait: for servers that accept priorities.
    """
    return _body(np.asarray(ids).tolist(), name, SCORING_FIELDS) | _priority(first)


def _priority(first: bool) -> dict[str, int]:
    return {"priority": -1} if first else {}


def _body(ids: list[int], name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"request_id": name, "token_ids": ids, "return_token_ids": True, "sampling_params": params}


@_refusing_broken
def completion_from(
    answer: Any, request: GenerationRequest, name: str, versions: Mapping[str, int]
) -> Completion:
    """Convert one answer to a completion.

    Args:
        name: the request id that was sent.
        versions: the weight version of each stamp that this trainer has given to the server.
    """
    choice = _choice(answer, name)
    token_ids = choice.get("token_ids") or []
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise LockstepError(f"request {request.key} ended with finish reason {finish!r}")
    check_places(request, answer)
    return Completion(
        key=request.key,
        prompt_ids=_ids(name, answer.get("prompt_token_ids") or []),
        token_ids=_ids(name, token_ids),
        logprobs=_logprobs(request, token_ids, choice),
        weight_versions=_versions(request, choice.get("weight_versions") or [], versions, len(token_ids)),
        finish_reason=cast(FinishReason, finish),
        kept_ids=reported_kept_ids(
            request.key, choice.get("sampling_mask"), filtered=request.sampling.is_filtered
        ),
        # The server knows the pictures by their digests, and the answer reports the same places.
        pictures=request.pictures,
    )


@_refusing_broken
def scores_from(
    answer: Any, ids: tuple[int, ...], name: str, versions: Mapping[str, int]
) -> tuple[float, ...]:
    """Log-prob of every id except the first. If a log-prob is missing, the result is shorter."""
    choice = _choice(answer, name)
    _check_stamps(name, choice.get("weight_versions") or [], versions)
    if list(answer.get("prompt_token_ids") or ()) != np.asarray(ids).tolist():
        raise _mixed_up(f"the answer to request {name} is about other ids than the ids that were sent")
    entries = answer.get("prompt_logprobs") or []
    found = [(entry or {}).get(str(token)) for entry, token in zip(entries[1:], ids[1:], strict=False)]
    return tuple(value["logprob"] for value in found if value is not None and value["logprob"] > _NO_LOGPROB)


def stamps_of(answer: Any) -> set[str]:
    """The stamps of all tokens of an answer; none, if the answer is damaged."""
    try:
        spans = [span for choice in answer["choices"] for span in choice["weight_versions"]]
        return {span["version"] for span in spans}
    except _BROKEN:
        # Who reads the answer refuses it.
        return set()


def _choice(answer: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(answer, dict) or not str(answer.get("request_id", "")).endswith(name):
        found = answer.get("request_id") if isinstance(answer, dict) else answer
        raise _mixed_up(f"the answer to request {name} is the answer to {str(found)[:80]!r}")
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _mixed_up(f"the answer to request {name} has {len(choices or ())} completions instead of one")
    return choices[0]


def _ids(name: str, values: Any) -> Ids:
    try:
        return whole_numbers(values)
    except BadValues as error:
        raise _mixed_up(f"the answer to request {name} has values that are not token ids: {error}") from error


def _logprobs(request: GenerationRequest, token_ids: list[int], choice: Mapping[str, Any]) -> Reals:
    entries = (choice.get("logprobs") or {}).get("content") or []
    if list(map(_token_id, entries)) == token_ids:
        found = reals(list(map(_logprob, entries)))
        if (found > _NO_LOGPROB).all():
            return found
    values = [
        entry["logprob"]
        for entry, token in zip(entries, token_ids, strict=False)
        if entry["token_id"] == token and entry["logprob"] > _NO_LOGPROB
    ]
    place = next((i for i, entry in enumerate(entries) if entry["logprob"] <= _NO_LOGPROB), None)
    if place is not None and request.sampling.grammar is None:
        _check_left(request, token_ids[:place])
    names = may_leave_none(request.sampling)
    filters = f", or {names} leave no token to sample" if names else ""
    raise ProofError(
        "logprobs",
        f"request {request.key} has {len(token_ids)} tokens and {len(entries)} log-probs; {len(values)} "
        "log-probs are finite and belong to its tokens",
        f"the server was started without log-probs, or its model computes NaN{filters}",
        "start the server with 'lockstep serve'; if it was started so, look for NaN in the weights",
    )


def _check_left(request: GenerationRequest, ids: Sequence[int]) -> None:
    """Refuse an answer that came to a place where its settings, without a grammar, leave no token."""
    own = request.sampling
    if own.allowed_token_ids is None:
        return
    named = [*own.end_ids, *own.allowed_token_ids, *(i for word in own.bad_words for i in word)]
    # One id more stands for all that no setting names.
    bans = Bans(own, max(named) + 2, own.end_ids)
    if (error := bans.empty_place(ids, None, request.key.prompt_id)) is not None:
        raise error


def may_leave_none(sampling: Sampling) -> str:
    """The names of a grammar and of the bans beside it, as one text; empty if there is no grammar or no ban."""
    bans = [name for name in ("allowed_token_ids", "bad_words") if getattr(sampling, name)]
    if sampling.grammar is None or not bans:
        return ""
    return " and ".join([GRAMMAR_FIELDS[sampling.grammar.kind], *bans])


def _versions(
    request: GenerationRequest, spans: list[Mapping[str, Any]], versions: Mapping[str, int], tokens: int
) -> Ids:
    _check_stamps(str(request.key), spans, versions)
    return versions_of(request.key, [(versions[s["version"]], s["start"], s["end"]) for s in spans], tokens)


def _check_stamps(name: str, spans: list[Mapping[str, Any]], versions: Mapping[str, int]) -> None:
    unknown = [span["version"] for span in spans if span["version"] not in versions]
    if unknown or not spans:
        raise ProofError(
            "version",
            f"request {name} was answered with weights that this trainer did not push (stamp "
            f"{unknown[0] if unknown else None!r})",
            "another trainer pushes weights to this server",
            "let only one trainer use the server; this trainer pushes its weights again when it continues",
        )


def _mixed_up(found: str) -> ProofError:
    return ProofError(
        "keys",
        found,
        "a program between trainer and server doubled, lost or exchanged answers",
        "remove proxies and caches between trainer and server; do not train on these answers",
    )


def agreed_answers(
    workers: Sequence[Mapping[str, T]], engine: str, same: Callable[[T, T], bool] = eq
) -> dict[str, T]:
    """The answers of all workers that share a model, by module. `engine` names their owner in the error."""
    agreed: dict[str, T] = {}
    for worker in workers:
        for name, answer in worker.items():
            if not same(agreed.setdefault(name, answer), answer):
                raise ProofError(
                    "module_probe",
                    f"the workers of {engine} compute {name} differently",
                    "one of them did not receive or did not load the last push",
                    "restart the engine and resume; if it happens again, report it with this message",
                )
    return agreed


def loaded_from(found: Mapping[str, Any], server: str) -> LoadedWeights:
    """Convert the acknowledgement of one worker. `server` is the name of its server in errors."""
    tensors = tuple(
        TensorSpec(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in found["tensors"]
    )
    untouched, unstored = tuple(found["untouched"]), tuple(found["unstored"])
    return LoadedWeights(tensors, untouched, server, unknown_base=found["unknown_base"], unstored=unstored)


def one_acknowledgement(found: Sequence[LoadedWeights]) -> LoadedWeights:
    """The acknowledgements of several workers or servers as one."""
    first, *others = found
    return replace(first, others=tuple(others))


def loaded_by(workers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[LoadedWeights]:
    """The acknowledgements of all workers that share one model. A tensor is stored if one of them has stored it."""
    in_no_worker = set.intersection(*(set(found["unstored"]) for found in workers))
    return [
        replace(one, unstored=tuple(name for name in one.unstored if name in in_no_worker))
        for one in (loaded_from(found, name) for found, name in zip(workers, names, strict=True))
    ]
