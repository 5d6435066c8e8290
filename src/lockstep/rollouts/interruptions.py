"""Completions that think for too long are told to stop: an end of thinking is put behind their ids, and they go on to an answer.

The forced-length interruptions of ScaleRL (arXiv 2510.13786). Called by `rollouts/collect.py` in an engine's place. What is put in
is context like a prompt: it was not sampled, so nothing is learned from it and it has no part in the proof (`Completion.sampled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.engines.answers import check_answers
from lockstep.engines.protocol import Completion, GenerationRequest, OnAnswer, RequestKey, derived_seed
from lockstep.errors import InputError
from lockstep.tokens.arrays import Flags, Ids, filled, flags, joined, whole_numbers

Generate = Callable[[Sequence[GenerationRequest], OnAnswer | None], dict[RequestKey, Completion]]
Decode = Callable[[Ids], str]


@dataclass(frozen=True, slots=True)
class Interruption:
    """When thinking is interrupted, and by what.

    Whether a completion has ended its thinking is read off its ids, never off its text. That is exact where the end of thinking is
    one token, as it is in models that are trained to think. An end of several tokens is missed where the model spells it by others
    (a piece of it joined to the word before), and such a completion is interrupted though it has ended its thinking.

    Attributes:
        after: tokens at which a completion that is still thinking is interrupted.
        ids: what is put behind them.
        end_ids: ids that stand side by side in a completion that has ended its thinking.
        earliest: the tokens at which it is are drawn between this and `after`, for each request (ScaleRL has 10k and 12k, so that
            answers are learned for many lengths); None: always `after`.

    Raises:
        ValueError: a number of tokens is below 1, `earliest` is behind `after`, or there are no ids.
    """

    after: int
    ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    earliest: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self._earliest <= self.after:
            raise ValueError(f"interrupted after {self._earliest} to {self.after} tokens")
        if not self.ids or not self.end_ids:
            raise ValueError(f"interrupted by the ids {self.ids}, ended by {self.end_ids}")

    def place(self, request: GenerationRequest) -> int:
        """Tokens at which a request's completion is interrupted: a function of its seed."""
        return self._earliest + derived_seed(request.seed, "interrupted") % (self.after - self._earliest + 1)

    @property
    def _earliest(self) -> int:
        return self.after if self.earliest is None else self.earliest

    def thinks(self, completion: Completion) -> bool:
        """Whether a completion has not ended its thinking."""
        ids, size = completion.token_ids, len(self.end_ids)
        if len(ids) < size:
            return True
        return not (np.lib.stride_tricks.sliding_window_view(ids, size) == self.end_ids).all(axis=1).any()

    def check_room(self, limit: int) -> None:
        """Refuse a limit on a completion's tokens that leaves none for an answer; one that no thinking reaches is right.

        Raises:
            InputError: it does.
        """
        if self._earliest < limit <= self.after + len(self.ids):
            raise InputError(
                f"max_thinking_length={self.after} and an interruption of {len(self.ids)} tokens leave nothing for an answer "
                f"within the {limit} tokens of a completion: lower max_thinking_length, shorten interruption, or raise the limit"
            )


def generate_interrupted(
    requests: Sequence[GenerationRequest],
    generate: Generate,
    interruption: Interruption,
    decode: Decode,
    on_answer: OnAnswer | None = None,
) -> dict[RequestKey, Completion]:
    """Answer every request, by key, with thinking interrupted.

    All are asked for the tokens before their interruption first. Those that have not finished by themselves are asked to go on,
    id for id, for what is left of their `max_tokens`; those that still think, behind the interruption. The distribution of what is
    sampled is as if it had been sampled at once.

    Args:
        generate: an engine's; called twice at most.
        decode: text of ids without special tokens, as engines look for stop strings in it. What is put in is no part of that text.
        on_answer: given each completion when it is finished.

    Returns:
        Completions under the keys and prompts of the requests. What was put in counts towards `max_tokens`.

    Raises:
        InputError: a request leaves no room for an answer, or has penalties that look at a completion alone.
        ProofError: as an engine's `generate`.
    """
    for request in requests:
        interruption.check_room(request.sampling.max_tokens)
        if request.sampling.presence_penalty or request.sampling.frequency_penalty:
            raise InputError(
                "presence_penalty and frequency_penalty would count anew where a completion goes on: with max_thinking_length "
                "they are not supported"
            )
    asked = {request.key: request for request in requests}
    begun = [_limited(request, interruption.place(request)) for request in requests]

    def whole(first: Completion) -> bool:
        request = asked[first.key]
        return first.finish_reason == "stop" or request.sampling.max_tokens <= interruption.place(request)

    def hand_over(completion: Completion) -> None:
        if on_answer is not None:
            on_answer(completion)

    firsts = _asked_of(generate, begun, lambda first: hand_over(first) if whole(first) else None)
    unfinished = [request for request in begun if not whole(firsts[request.key])]
    going_on = [_next(asked[r.key], firsts[r.key], interruption) for r in unfinished]

    def joined(second: Completion) -> Completion:
        return _joined(asked[second.key], firsts[second.key], second, interruption, decode)

    seconds = _asked_of(generate, going_on, lambda second: hand_over(joined(second))) if going_on else {}
    return {key: joined(seconds[key]) if key in seconds else first for key, first in firsts.items()}


def _asked_of(
    generate: Generate, requests: Sequence[GenerationRequest], on_answer: OnAnswer
) -> dict[RequestKey, Completion]:
    """An engine's answers, checked to be to what was asked; of which versions they may be is for the whole to be asked of."""
    answers = generate(requests, on_answer).values()
    return check_answers(
        requests, answers, sorted({v for answer in answers for v in np.unique(answer.weight_versions).tolist()})
    )


def _limited(request: GenerationRequest, limit: int) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, max_tokens=min(request.sampling.max_tokens, limit)))


def _inserted(first: Completion, interruption: Interruption) -> Ids:
    return whole_numbers(interruption.ids if interruption.thinks(first) else ())


def _next(request: GenerationRequest, first: Completion, interruption: Interruption) -> GenerationRequest:
    behind = joined([first.token_ids, _inserted(first, interruption)])
    return replace(
        _limited(request, request.sampling.max_tokens - len(behind)),
        prompt_ids=joined([request.prompt_ids, behind]),
        seed=derived_seed(request.seed, "going on"),
    )


def _joined(
    request: GenerationRequest, first: Completion, second: Completion, interruption: Interruption, decode: Decode
) -> Completion:
    inserted = _inserted(first, interruption)
    if not len(inserted):
        # The engine has looked for stop strings in each part; one may stand across both.
        second = _stopped(first, second, request.sampling.stop, decode)
    count = len(inserted)
    return replace(
        first,
        token_ids=joined([first.token_ids, inserted, second.token_ids]),
        logprobs=joined([first.logprobs, filled(0.0, count), second.logprobs]),
        # What was put in was first read by the weights that went on behind it.
        weight_versions=joined(
            [first.weight_versions, np.repeat(second.weight_versions[:1], count), second.weight_versions]
        ),
        finish_reason=second.finish_reason,
        sampled=_mask(first, count, second) if count else None,
    )


def _mask(first: Completion, inserted: int, second: Completion) -> Flags:
    return flags(np.repeat([True, False, True], [len(first.token_ids), inserted, len(second.token_ids)]))


def _stopped(first: Completion, second: Completion, stop: tuple[str, ...], decode: Decode) -> Completion:
    """The part that goes on, up to the token that completes a stop string which the part before has begun."""
    longest = max(map(len, stop), default=0)
    for count in range(1, len(second.token_ids) + 1):
        if len(decode(second.token_ids[: count - 1])) >= longest - 1:
            # What is still to come stands behind all that a string from before can reach.
            break
        own = second.token_ids[:count]
        text = decode(joined([first.token_ids, own]))
        if any(s in text for s in stop):
            return replace(
                second,
                token_ids=own,
                logprobs=second.logprobs[:count],
                weight_versions=second.weight_versions[:count],
                finish_reason="stop",
            )
    return second
