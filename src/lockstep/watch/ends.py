"""The ends proof: every answer ended where its request says that it ends, and for the reason that the engine gives.

Proof `ends`.
Shows: `stop` means that an end token or a stop string comes last and none came before; `length` means that the limit
of the request is reached; read from ids.
Does not show: an end that the model would have sampled later; answers that a `rollout_func` made.
When: every request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.tokens.arrays import Ids, joined

# Ids of the prompt with which an answer is decoded a second time, because an engine's text may begin with a space that the text of
# the ids alone loses.
_BEFORE = 4


class Ends:
    """The check.

    Args:
        end_ids: ids that end a completion.
        decode: gives the text of ids, with special tokens: a stop string may be one.
    """

    def __init__(self, end_ids: Sequence[int], decode: Callable[[Ids], str]) -> None:
        self._end_ids, self._decode = np.array(end_ids, dtype=np.int64), decode

    def check(self, request: GenerationRequest, answer: Completion) -> None:
        """Check one answer, which has at least one token.

        Raises:
            ProofError: the answer goes on after its end, or has not come to the end that its finish reason names.
        """
        ids, limit = answer.token_ids, request.sampling.max_tokens
        ends = np.isin(ids, self._end_ids)
        if ends[:-1].any():
            raise _wrong(request, f"goes on for {len(ids) - 1 - int(ends.argmax())} tokens after an end token")
        if len(ids) > limit:
            raise _wrong(request, f"has {len(ids)} tokens, and at most {limit} were asked for")
        found = [self._stopped(text, request.sampling) for text in self._texts(request, ids)]
        if all(self._stopped(text, request.sampling) for text in self._texts(request, ids[:-1])):
            raise _wrong(request, "goes on after a stop string")
        stopped = bool(ends[-1])
        if answer.finish_reason == "stop" and not (stopped or any(found)):
            raise _wrong(request, "is said to have stopped, and neither an end token nor a stop string comes last")
        if answer.finish_reason == "length" and (stopped or all(found)):
            raise _wrong(request, "is said to have reached its limit, and an end token or a stop string comes last")
        if answer.finish_reason == "length" and len(ids) < limit:
            raise _wrong(request, f"is said to have reached its limit of {limit} tokens, and has {len(ids)}")

    def _texts(self, request: GenerationRequest, ids: Ids) -> Iterator[tuple[str, int]]:
        """The text of an answer, decoded alone and after the prompt, and how much of it belongs to the first `min_tokens`."""
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
            stop in whole[max(0, earlier + 1 - len(stop)) if sampling.min_tokens else 0 :] for stop in sampling.stop
        )


def _wrong(request: GenerationRequest, what: str) -> ProofError:
    return ProofError(
        "ends",
        f"the answer to request {request.key} {what}",
        "the engine ignores or removes end tokens, has another limit, or something cuts its answers",
        "compare the engine's end tokens, limit and stop strings with those of the run; remove what rewrites answers on their way",
    )
