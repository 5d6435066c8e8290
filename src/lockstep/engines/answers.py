"""Checks of requests before an engine answers them, and of answers against their requests.

The engines themselves call these checks, so that no caller can forget them. Each check is a pure function of requests and answers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from lockstep.engines.filters.kept_sets import check_kept_ids
from lockstep.engines.protocol import Completion, GenerationRequest, RequestKey
from lockstep.engines.vllm.limits import check_limits
from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import Ids
from lockstep.tokens.tokenizer import check_embedded


def check_requests(
    requests: Sequence[GenerationRequest],
    version: int | None,
    max_model_len: int,
    vocab_size: int,
    limits: Mapping[str, int],
) -> None:
    """Refuse a batch in which one request cannot be answered, before any of its requests is started.

    Args:
        vocab_size: number of logits of the model.
        limits: `EngineSettings.request_limits`.

    Raises:
        ProofError: no weight version is committed.
        InputError: a key is used twice, a prompt is empty, prompt and completion do not fit the context, or the sampling settings
            name a token that the model does not have, or more ids than the engine can take.
    """
    _check_committed(version, "generate")
    for sampling in {request.sampling for request in requests}:
        sampling.check_vocabulary(vocab_size)
        check_limits(sampling, limits)
    seen: set[RequestKey] = set()
    for request in requests:
        if request.key in seen:
            raise InputError(f"request {request.key} occurs twice in one batch")
        seen.add(request.key)
        check_request(request, version, max_model_len, vocab_size)


def check_request(request: GenerationRequest, version: int | None, max_model_len: int, vocab_size: int) -> None:
    """Refuse a request that cannot be answered. Its sampling settings were already checked when the generation began.

    Raises:
        ProofError: no weight version is committed.
        InputError: the prompt is empty or has a token that the model cannot embed, or prompt and completion do not fit the context.
    """
    _check_committed(version, "generate")
    if not len(request.prompt_ids):
        raise InputError(f"prompt {request.key.prompt_id} has no tokens")
    check_embedded(request.prompt_ids, vocab_size, f"prompt {request.key.prompt_id}")
    if max_model_len - len(request.prompt_ids) < request.sampling.max_tokens:
        raise InputError(
            f"prompt {request.key.prompt_id} has {len(request.prompt_ids)} tokens: with up to "
            f"{request.sampling.max_tokens} new tokens it does not fit the engine's context of {max_model_len}. "
            "Shorten or drop the prompt, lower max_completion_length, or raise vllm_max_model_length"
        )


def check_answers(
    requests: Sequence[GenerationRequest],
    answers: Iterable[Completion],
    versions: Collection[int],
    vocab_size: int | None = None,
) -> dict[RequestKey, Completion]:
    """Check that each completion belongs to its request. Returns the completions by key.

    Args:
        versions: weight versions that may have sampled these tokens, in the order of their commits.
        vocab_size: number of logits of the model; None if the caller does not know it.

    Raises:
        ProofError: a request has no answer or two answers; an answer belongs to no request; the engine used another prompt or
            other pictures; a log-prob is missing or not finite; an id is below 0; a token was sampled by other weights than
            `versions`, or by older weights than the token before it; kept ids are missing, or contradict the request or the tokens
            (`kept_sets.py`).
        InputError: a filter kept more ids than `Sampling.max_kept_ids`.
    """
    asked = {request.key: request for request in requests}
    found: dict[RequestKey, Completion] = {}
    for answer in answers:
        if answer.key not in asked:
            raise unexpected_answer(answer.key)
        if answer.key in found:
            raise second_answer(answer.key)
        check_answer(asked[answer.key], answer, versions, vocab_size)
        found[answer.key] = answer
    missing = asked.keys() - found.keys()
    if missing:
        raise missing_answers(missing, len(asked))
    return found


def unexpected_answer(key: RequestKey) -> ProofError:
    """The error for an answer that belongs to no request."""
    return _mismatch("keys", f"an answer came for {key}, and there is no such request")


def second_answer(key: RequestKey) -> ProofError:
    """The error for a second answer to the same request."""
    return _mismatch("keys", f"two answers came for {key}")


def missing_answers(keys: Collection[RequestKey], total: int) -> ProofError:
    """The error for requests that the engine has dropped. `total` is the number of all requests."""
    return _mismatch("keys", f"{len(keys)} of {total} requests were not answered, {min(keys)} among them")


def check_scoring(sequences: Mapping[str, tuple[int, ...]], version: int | None, max_model_len: int) -> None:
    """Refuse sequences that an engine cannot score completely.

    Raises:
        ProofError: no weight version is committed.
        InputError: a sequence has fewer than two ids or leaves no room for a token in the context.
    """
    _check_committed(version, "score")
    for name, ids in sequences.items():
        if not 2 <= len(ids) < max_model_len:
            raise InputError(f"sequence {name} has {len(ids)} ids; an engine can score 2 to {max_model_len - 1}")


def check_scores(sequences: Mapping[str, tuple[int, ...]], scores: Mapping[str, tuple[float, ...]]) -> None:
    """Check that every id of each sequence, except the first, has a finite log-prob.

    Raises:
        ProofError: a log-prob is missing, not finite, or belongs to no sequence.
    """
    for name in sequences.keys() | scores.keys():
        wanted, found = len(sequences.get(name, ())) - 1, scores.get(name, ())
        finite = sum(map(math.isfinite, found))
        if not finite == len(found) == wanted:
            said = f"{len(found)} log-probs, {finite} of them finite; {wanted} were asked for"
            raise _mismatch("logprobs", f"sequence {name} came back with {said}")


def _check_committed(version: int | None, verb: str) -> None:
    if version is None:
        raise ProofError(
            "version",
            f"the engine was asked to {verb} while it holds no committed weights",
            "no weights were pushed yet, or an update failed before its end",
            f"push the weights (lockstep.sync.push_weights) before you {verb}",
        )


def check_answer(
    request: GenerationRequest, answer: Completion, versions: Collection[int], vocab_size: int | None = None
) -> None:
    """Check that a completion belongs to its request.

    Args:
        versions, vocab_size: as in `check_answers`.

    Raises:
        ProofError, InputError: as in `check_answers`.
    """
    if not np.array_equal(answer.prompt_ids, request.prompt_ids):
        raise ProofError(
            "echo",
            f"request {request.key}: the engine used {len(answer.prompt_ids)} prompt ids, not the "
            f"{len(request.prompt_ids)} that were sent",
            "text was tokenised again, or a special token was added, between trainer and engine",
            "send token ids, and turn off anything in the engine that rewrites prompts",
        )
    if answer.pictures is not request.pictures:
        _check_pictures(request, answer)
    if not len(answer.token_ids):
        raise _mismatch("keys", f"request {request.key} came back without a token")
    lengths = (len(answer.token_ids), len(answer.logprobs), len(answer.weight_versions))
    if len(set(lengths)) != 1:
        raise _mismatch("logprobs", f"request {request.key} has {lengths} tokens, log-probs and versions")
    for strange in (answer.token_ids.min(), answer.token_ids.max()):
        if strange < 0 or (vocab_size is not None and strange >= vocab_size):
            raise _mismatch("keys", f"request {request.key} came back with {int(strange)} as a token id")
    if not np.isfinite(answer.logprobs).all():
        raise _mismatch("logprobs", f"request {request.key} has a log-prob that is not finite")
    if answer.sampled is not None and (len(answer.sampled) != lengths[0] or not answer.sampled.any()):
        raise _mismatch(
            "keys", f"request {request.key} has a mask of sampled tokens that does not fit its {lengths[0]} tokens"
        )
    order, spans = list(versions), _spans(answer.weight_versions)
    if not set(spans) <= set(order) or not _is_ordered(spans, order):
        raise ProofError(
            "version",
            f"request {request.key} has tokens sampled at versions {sorted(set(spans))}; the versions that were pushed are "
            f"{order}",
            "the engine was restarted, or a program other than this trainer updated its weights",
            "let one trainer own the engine, and push the weights again",
        )
    check_kept_ids(request.sampling, answer, vocab_size)


def _check_pictures(request: GenerationRequest, answer: Completion) -> None:
    """Check that the engine used the pictures of the request.

    Raises:
        ProofError: the engine used other pictures, or none.
    """
    asked, used = (p.digests if p is not None else () for p in (request.pictures, answer.pictures))
    if asked != used:
        raise ProofError(
            "echo",
            f"request {request.key}: the engine used {len(used)} pictures, which are not the {len(asked)} that were sent",
            "the pictures of two requests were exchanged, or the engine takes no pictures and dropped them",
            "use an engine that takes pictures (docs/guides/images.md); otherwise report this error with its message",
        )


def _spans(versions: Ids) -> list[int]:
    """The version of each span of consecutive tokens that have the same version."""
    return [int(versions[0]), *versions[1:][versions[1:] != versions[:-1]].tolist()]


def _is_ordered(found: Sequence[int], order: Sequence[int]) -> bool:
    positions = [order.index(version) for version in found]
    return positions == sorted(positions)


def _mismatch(check: str, found: str) -> ProofError:
    return ProofError(
        check,
        found,
        "the engine lost, doubled or mixed up requests",
        "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
    )
