"""Checks of requests before an engine answers them, and of answers against their requests.

Every engine makes these checks itself, so that no caller can forget them. Each check is a pure function of requests
and answers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import Ids, chosen
from lockstep.tokens.kept_ids import KeptIds
from lockstep.tokens.tokenizer import check_embedded

# vLLM's environment variables that make two of the tables larger.
_WORDS, _WORD_IDS = "VLLM_MAX_NUM_BAD_WORDS", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"
_FIRST_RUNNER = (
    "start vLLM with VLLM_USE_V2_MODEL_RUNNER=0 in its environment: its first model runner has no such limit"
)


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


def check_limits(sampling: Sampling, limits: Mapping[str, int]) -> None:
    """Compare the settings of a request with the limits of its engine.

    Args:
        limits: `EngineSettings.request_limits`.

    Raises:
        InputError: a setting names more ids than the engine can take. The message says what to do.
    """
    words = sum(map(len, sampling.bad_words))
    found = {
        "allowed_token_ids": (len(sampling.allowed_token_ids or ()), "allowed_token_ids names {} ids", _FIRST_RUNNER),
        "logit_bias": (len(sampling.logit_bias), "logit_bias names {} ids", _FIRST_RUNNER),
        "end_ids": (
            len(sampling.end_ids) if sampling.min_tokens else 0,
            "min_tokens is set, and {} ids end a completion",
            f"leave min_tokens out, or {_FIRST_RUNNER}",
        ),
        "bad_words": (
            len(sampling.bad_words),
            "bad_words has {} sequences of ids (a word may have two: with and without a space before it)",
            f"start vLLM with {_WORDS}={len(sampling.bad_words)} in its environment",
        ),
        "bad_word_ids": (
            words,
            "the words of bad_words have {} ids together",
            f"start vLLM with {_WORD_IDS}={words} in its environment",
        ),
    }
    for name, most in limits.items():
        number, what, advice = found[name]
        if number > most:
            # `end_ids` come from the model, so that a user cannot name fewer.
            fewer = "" if name == "end_ids" else "name fewer, or "
            raise InputError(
                f"{what.format(number)}; the engine takes at most {most} per request (vLLM's second model runner, which it uses "
                f"on GPUs): {fewer}{advice}"
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


# Top-k keeps every id whose logit equals the k-th largest. In bfloat16 many logits are equal: at most so many, or this share of k.
_TIES, _SHARE_OF_TIES = 256, 0.25
# Rounding of a log-prob in float32.
_ROUNDING = 1e-3


def check_kept_ids(sampling: Sampling, answer: Completion, vocab_size: int | None) -> None:
    """Check that a completion has one set for each sampled token, and that the sets follow the rules of the filters.

    Args:
        vocab_size: number of logits of the model; None if the caller does not know it.

    Raises:
        ProofError: there are sets without a filter, or no sets with a filter; their number is wrong; the ids of a set are not
            ascending or not in the vocabulary; a sampled token is outside its set; a set is larger than the filters allow; a set
            has one id, and the log-prob of this id is not 0.
        InputError: a filter kept more ids than `max_kept_ids` for a token. The engine has then left the set empty.
    """
    kept = answer.kept_ids
    if kept is None:
        if sampling.is_filtered:
            raise _kept_ids_error(answer, "does not report which ids its top-k, top-p or min-p kept")
        return
    if not sampling.is_filtered:
        raise _kept_ids_error(answer, "has kept ids, but its sampling settings have no filter")
    if len(kept) != len(answer.sampled_places):
        raise _kept_ids_error(
            answer, f"has {len(answer.sampled_places)} sampled tokens and {len(kept)} sets of kept ids"
        )
    sizes = kept.sizes
    if not sizes.all() or sizes.max() > sampling.max_kept_ids:
        raise InputError(
            f"request {answer.key}: the filters kept more than max_kept_ids={sampling.max_kept_ids} ids for one token. Set top_k "
            "too, which bounds the sets, or raise max_kept_ids"
        )
    _check_ids(answer, kept, vocab_size)
    _check_rules(sampling, answer, kept)


def _check_ids(answer: Completion, kept: KeptIds, vocab_size: int | None) -> None:
    if kept.ids.min() < 0 or (vocab_size is not None and kept.ids.max() >= vocab_size):
        raise _kept_ids_error(answer, f"has kept ids from {kept.ids.min()} to {kept.ids.max()}, outside the vocabulary")
    is_ascending = np.diff(kept.ids) > 0
    is_ascending[kept.ends[:-1] - 1] = True
    if not is_ascending.all():
        raise _kept_ids_error(answer, "has a set of kept ids that are not ascending")
    own = kept.ids == np.repeat(chosen(answer.token_ids, answer.sampled), kept.sizes)
    outside = np.flatnonzero(~np.logical_or.reduceat(own, kept.ends - kept.sizes))
    if len(outside):
        raise _kept_ids_error(
            answer, f"has {len(outside)} tokens outside their own set of kept ids; the first one is token {outside[0]}"
        )


def _check_rules(sampling: Sampling, answer: Completion, kept: KeptIds) -> None:
    sizes, logprobs = kept.sizes, answer.sampled_logprobs.astype(np.float64)
    if sampling.top_k and sizes.max() > sampling.top_k + max(_TIES, _SHARE_OF_TIES * sampling.top_k):
        raise _kept_ids_error(answer, f"has a set of {sizes.max()} kept ids, with top_k={sampling.top_k}")
    if (np.abs(logprobs[sizes == 1]) > _ROUNDING).any():
        raise _kept_ids_error(answer, "has a set of one kept id, and the log-prob of that id is not 0")
    if sampling.min_p > 0 and (logprobs < np.log(sampling.min_p / sizes) - _ROUNDING).any():
        # The most probable of n kept ids has a probability of at least 1 / n.
        raise _kept_ids_error(answer, f"has a token that is less likely than min_p={sampling.min_p} allows")


def _kept_ids_error(answer: Completion, found: str) -> ProofError:
    return ProofError(
        "kept_ids",
        f"request {answer.key} {found}",
        "the engine did not apply the filters of the request, lost its record of the kept ids, or mixed up requests",
        "start the engine as Lockstep starts it, on vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0); if it was started so, "
        "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
    )
