"""Interrupts completions that think for too long: an end of thinking is inserted after their ids, and they continue to an answer.

These are the forced-length interruptions of ScaleRL (arXiv 2510.13786). `rollouts/collect.py` calls this module instead of an
engine. The inserted ids are context, like a prompt. They were not sampled, so the policy does not learn from them and the
proof leaves them out (`Completion.sampled`).
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
    """When thinking is interrupted, and the ids that are inserted.

    The check for the end of thinking uses the ids of a completion, not its text. The check is exact if the end of thinking
    is one token, as in models that are trained to think. An end of several tokens is missed if the model writes it with other
    tokens (for example with a part joined to the word before). Such a completion is interrupted although it has ended its
    thinking.

    Attributes:
        after: number of tokens after which a completion that still thinks is interrupted.
        ids: ids that are inserted there.
        end_ids: consecutive ids that mark the end of thinking in a completion.
        earliest: if given, the number of tokens is drawn for each request between this and `after` (ScaleRL uses 10k and 12k, so
            that the policy learns answers at many lengths). None: always `after`.

    Raises:
        ValueError: a number of tokens is below 1, `earliest` is above `after`, or there are no ids.
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
        """Number of tokens after which a request's completion is interrupted. It is a function of the request's seed."""
        return self._earliest + derived_seed(request.seed, "interrupted") % (self.after - self._earliest + 1)

    @property
    def _earliest(self) -> int:
        return self.after if self.earliest is None else self.earliest

    def thinks(self, completion: Completion) -> bool:
        """Whether a completion has not yet ended its thinking."""
        ids, size = completion.token_ids, len(self.end_ids)
        if len(ids) < size:
            return True
        return not (np.lib.stride_tricks.sliding_window_view(ids, size) == self.end_ids).all(axis=1).any()

    def check_room(self, limit: int) -> None:
        """Refuse a length limit that leaves no tokens for an answer. A limit that ends before every interruption is accepted.

        Raises:
            InputError: the limit leaves no tokens for an answer.
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
    """Answer every request, by key, and interrupt thinking.

    First all requests are limited to the tokens before their interruption. Then the unfinished completions are continued, id
    for id, for the rest of their `max_tokens`. If a completion still thinks, the interruption is inserted before its
    continuation. The sampling distribution is the same as without the split.

    Args:
        generate: an engine's `generate`; called at most twice.
        decode: text of ids without special tokens, in which the engine looks for stop strings. Inserted ids are not part of that
            text.
        on_answer: called with each completion when it is finished.

    Returns:
        Completions with the keys and prompts of the requests. Inserted ids count towards `max_tokens`.

    Raises:
        InputError: a request leaves no room for an answer, or has penalties that count the tokens of a completion.
        ProofError: as in an engine's `generate`.
    """
    for request in requests:
        interruption.check_room(request.sampling.max_tokens)
        if request.sampling.presence_penalty or request.sampling.frequency_penalty:
            raise InputError(
                "presence_penalty and frequency_penalty would start counting again when a completion continues: they are not "
                "supported with max_thinking_length"
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
    """An engine's answers, checked against their requests. The versions are checked later, on the joined completions."""
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
        # The engine has looked for stop strings in each part. A stop string may also begin in one part and end in the other.
        second = _stopped(first, second, request.sampling.stop, decode)
    count = len(inserted)
    return replace(
        first,
        token_ids=joined([first.token_ids, inserted, second.token_ids]),
        logprobs=joined([first.logprobs, filled(0.0, count), second.logprobs]),
        # The inserted ids get the version of the weights that continued after them: these weights read the ids first.
        weight_versions=joined(
            [first.weight_versions, np.repeat(second.weight_versions[:1], count), second.weight_versions]
        ),
        finish_reason=second.finish_reason,
        sampled=_mask(first, count, second) if count else None,
    )


def _mask(first: Completion, inserted: int, second: Completion) -> Flags:
    return flags(np.repeat([True, False, True], [len(first.token_ids), inserted, len(second.token_ids)]))


def _stopped(first: Completion, second: Completion, stop: tuple[str, ...], decode: Decode) -> Completion:
    """The second part, cut after the token that completes a stop string which began in the first part."""
    longest = max(map(len, stop), default=0)
    for count in range(1, len(second.token_ids) + 1):
        if len(decode(second.token_ids[: count - 1])) >= longest - 1:
            # Later tokens are too far from the first part to complete such a stop string.
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
