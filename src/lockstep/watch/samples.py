"""Proofs of answers: samples of a group are independent draws, and every answer ends where its request says.

With one seed for all requests, all completions of a group are equal (fault A5), and the advantages are always zero.
With equal seeds in pairs, a group has half as many completions as it seems. A very certain model may rightly repeat
itself. So the check computes the probability of the repetition under the engine's own log-probs (in which inserted
tokens have probability 1).

Proof `samples`.
Shows: no two requests of a generation have one seed, and no prompt has a seed again at another version; the
completions of a group (all branches of each rollout) are independent draws: a repetition of all, or a common
beginning of two, is refused if its probability by the engine's own log-probs is below 1e-9 per generation.
Does not show: repetitions of a very confident model, which are correct; an engine that gives requests of different
prompts the same random numbers.
When: every generation.

Proof `ends`.
Shows: `stop` means that an end token or a stop string comes last and none came before; `length` means that the limit
of the request is reached; read from ids.
Does not show: an end that the model would have sampled later; answers that a `rollout_func` made.
When: every request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.tokens.arrays import Ids, Reals, joined

# Probability of a false alarm, for one group and for one generation.
# A group: P(all n equal and p(s)^(n−1) ≤ α) ≤ α for independent samples.
# A generation: e = ½ + ½·[all equal]·p(s)^(−(n−1)/2) has mean ≤ 1, so P(product over groups > 1/α) ≤ α.
_ALPHA = 1e-9


def check_samples(groups: Iterable[Sequence[Sequence[Completion]]]) -> None:
    """Check that no group repeats a sample against all odds. A sample is all branches of one rollout."""
    groups = list(groups)
    evidence = 0.0
    for samples in groups:
        first = samples[0]
        repeats = len(samples) > 1 and all(_equal(other, first) for other in samples[1:])
        logprob = sum(math.fsum(branch.logprobs.tolist()) for branch in first)
        log_chance = (len(samples) - 1) * logprob if repeats else 0.0
        evidence += _log_evidence(log_chance) if repeats else math.log(0.5)
        if repeats and log_chance < math.log(_ALPHA):
            raise ProofError(
                "samples",
                f"all {len(samples)} completions of prompt {first[0].key.prompt_id} are the same "
                f"{sum(len(branch.token_ids) for branch in first)} tokens; by their own log-probs that has a chance of "
                f"1e{log_chance / math.log(10):.0f}",
                "the engine samples every request with the same seed, or answers several requests with one completion",
                "give every request its own seed, and turn off anything that de-duplicates requests",
            )
    if evidence > -math.log(_ALPHA):
        raise ProofError(
            "samples",
            f"completions repeat in group after group of a generation: the chance of that is below {_ALPHA:.0e}",
            "the engine samples every request with the same seed, or answers several requests with one completion",
            "give every request its own seed, and turn off anything that de-duplicates requests",
        )

    _check_pairs(groups)


def _check_pairs(groups: Sequence[Sequence[Sequence[Completion]]]) -> None:
    """Bet in each pair of a group that the second completion follows the first. The mean pay must be below 1 ÷ α."""
    pairs = [pair for samples in groups for pair in itertools.combinations(map(_whole, samples), 2)]
    if not pairs:
        return
    pays = np.array([log_pay(*pair) for pair in pairs])
    if np.logaddexp.reduce(pays) - math.log(len(pays)) < -math.log(_ALPHA):
        return
    one, other = pairs[int(pays.argmax())]
    raise ProofError(
        "samples",
        f"the completions {one.key} and {other.key} begin with the same {_agree(one, other)} tokens; among "
        f"{len(pairs)} pairs that has a chance below {_ALPHA:.0e} by their own log-probs",
        "the engine samples several requests with the same seed, or answers several requests with one completion",
        "give every request its own seed, and turn off anything that de-duplicates requests",
    )


class _Sample(NamedTuple):
    """All branches of a rollout, one after the other."""

    key: RequestKey
    token_ids: Ids
    logprobs: Reals


def _whole(branches: Sequence[Completion]) -> _Sample:
    ids, logprobs = joined([b.token_ids for b in branches]), joined([b.logprobs for b in branches])
    return _Sample(branches[0].key, ids, logprobs)


def log_pay(one: _Sample, other: _Sample) -> float:
    """Log of the pay of a bet that puts half on the token of `one`, while the completions agree. Its mean is 1."""
    agree = _agree(one, other)
    pay = float(np.logaddexp(math.log(0.5), math.log(0.5) - other.logprobs[:agree].astype(np.float64)).sum())
    parted = agree < min(len(one.token_ids), len(other.token_ids))
    return pay + (math.log(0.5) if parted else 0.0)


def _agree(one: _Sample, other: _Sample) -> int:
    """Number of ids with which both completions begin."""
    length = min(len(one.token_ids), len(other.token_ids))
    differ = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    return int(differ[0]) if len(differ) else length


class Seeds:
    """The seeds that a run has used last for each prompt."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, frozenset[int]]] = {}

    def check(self, seeds: Mapping[RequestKey, int], version: int) -> None:
        """Check, before a generation is sampled, that no requests share a seed, and no prompt has an earlier one.

        A generation that is sampled again has the same version and the same seeds.
        """
        owners: dict[int, RequestKey] = {}
        by_prompt: dict[str, set[int]] = {}
        for key, seed in seeds.items():
            if seed in owners:
                raise _same_seed(f"the requests {owners[seed]} and {key} have the same seed")
            owners[seed] = key
            by_prompt.setdefault(key.prompt_id, set()).add(seed)
        for prompt, own in by_prompt.items():
            before, used = self._last.get(prompt, (version, frozenset()))
            if before != version and own & used:
                raise _same_seed(f"prompt {prompt} has a seed again that it had at version {before}")
            self._last[prompt] = version, frozenset(own)


def _same_seed(found: str) -> ProofError:
    return ProofError(
        "samples",
        found,
        "seeds do not depend on prompt, sample and version, so that samples repeat each other",
        "this is a defect of Lockstep, or of a program that replaces its seeds: report it with this message",
    )


def _equal(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    """Whether two samples have the same branches, behind the same prompts."""
    return len(one) == len(other) and all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.prompt_ids, b.prompt_ids)
        for a, b in zip(one, other, strict=True)
    )


def _log_evidence(log_chance: float) -> float:
    """log(½ + ½·exp(−log_chance / 2)), without overflow."""
    half = -log_chance / 2
    return math.log(0.5) + half + math.log1p(math.exp(-half))


# Ids of the prompt with which an answer is decoded a second time, because an engine's text may begin with a space
# that the text of the ids alone loses.
_BEFORE = 4


class Ends:
    """Checks that every answer ended where its request says.

    Args:
        end_ids: ids that end a completion.
        decode: gives the text of ids, with special tokens: a stop string may be one.
    """

    def __init__(self, end_ids: Sequence[int], decode: Callable[[Ids], str]) -> None:
        self._end_ids, self._decode = np.array(end_ids, dtype=np.int64), decode

    def check(self, request: GenerationRequest, answer: Completion) -> None:
        """Check that an answer, of one token at least, ends at its end, and for the reason that it names."""
        ids, limit = answer.token_ids, request.sampling.max_tokens
        ends = np.isin(ids, self._end_ids)
        if ends[:-1].any():
            raise _wrong(
                request, f"goes on for {len(ids) - 1 - int(ends.argmax())} tokens after an end token"
            )
        if len(ids) > limit:
            raise _wrong(request, f"has {len(ids)} tokens, and at most {limit} were asked for")
        found = [self._stopped(text, request.sampling) for text in self._texts(request, ids)]
        if all(self._stopped(text, request.sampling) for text in self._texts(request, ids[:-1])):
            raise _wrong(request, "goes on after a stop string")
        stopped = bool(ends[-1])
        if answer.finish_reason == "stop" and not (stopped or any(found)):
            raise _wrong(
                request, "is said to have stopped, and neither an end token nor a stop string comes last"
            )
        if answer.finish_reason == "length" and (stopped or all(found)):
            raise _wrong(
                request, "is said to have reached its limit, and an end token or a stop string comes last"
            )
        if answer.finish_reason == "length" and len(ids) < limit:
            raise _wrong(request, f"is said to have reached its limit of {limit} tokens, and has {len(ids)}")

    def _texts(self, request: GenerationRequest, ids: Ids) -> Iterator[tuple[str, int]]:
        """The text of an answer, decoded alone and after the prompt, and how much is of the first `min_tokens`."""
        if not request.sampling.stop:
            yield "", 0
            return
        early = ids[: request.sampling.min_tokens]
        for before in (ids[:0], request.prompt_ids[-_BEFORE:]):
            start = len(self._decode(before))
            text, earlier = (self._decode(joined([before, part]))[start:] for part in (ids, early))
            yield text, len(earlier)

    def _stopped(self, text: tuple[str, int], sampling: Sampling) -> bool:
        whole, earlier = text
        # A stop string that was complete within the first `min_tokens` does not count.
        return any(
            stop in whole[max(0, earlier + 1 - len(stop)) if sampling.min_tokens else 0 :]
            for stop in sampling.stop
        )


def _wrong(request: GenerationRequest, what: str) -> ProofError:
    return ProofError(
        "ends",
        f"the answer to request {request.key} {what}",
        "the engine ignores or removes end tokens, has another limit, or something cuts its answers",
        "compare the engine's end tokens, limit and stop strings with those of the run; remove what rewrites "
        "answers on their way",
    )
