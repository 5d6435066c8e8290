"""An engine without a model: each next id follows from all ids before it.

And an inbox that changes what passes through it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lockstep.contract.inbox import Inbox, check_request
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.tokens.arrays import KeptIds

END = 0
LETTERS = "_abc"
VOCABULARY = 384


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in ids if i != END)


# What a driver needs of a tokenizer.
TOKENIZER: Any = SimpleNamespace(decode=lambda ids, **_: decode(ids))


def next_token(before: Sequence[int]) -> tuple[int, float]:
    """A deterministic language model: the next id depends on every id before it, and on its position."""
    draw = random.Random(repr(tuple(before)))
    token = END if draw.random() < 0.06 else draw.randrange(1, 4)
    return token, -draw.random() - 0.1


def kept_of(before: Sequence[int]) -> list[int]:
    """The set of ids from which the next token is sampled: another one at every place."""
    token, _ = next_token(before)
    return [token, 10 + len(before)]


def kept_ids(sets: list[list[int]]) -> KeptIds:
    return KeptIds([i for ids in sets for i in ids], [2 * (n + 1) for n in range(len(sets))])


@dataclass
class PlayedEngine:
    """Answers in rounds, in reverse order, and looks for stop strings only in its own answer, as engines do."""

    rounds: list[list[GenerationRequest]] = field(default_factory=list)
    # Version of the weights in each round. The last one holds for all further rounds.
    versions: Sequence[int] = (7,)
    change: Callable[[list[Completion]], list[Completion]] = lambda answers: answers
    context: int = 10**6
    patience: float = 10.0

    @property
    def version(self) -> int:
        return self.versions[min(len(self.rounds), len(self.versions) - 1)]

    def settings(self) -> Any:
        return SimpleNamespace(max_model_len=self.context, vocab_size=VOCABULARY, request_limits={})

    def serve(self, inbox: Inbox) -> None:
        while True:
            with inbox.taken(0, self.patience) as requests:
                if requests is None:
                    return
            for request in requests:
                check_request(request, self.version, self.context, VOCABULARY)
            version = self.version
            self.rounds.append(requests)
            for answer in self.change([self.one(request, version) for request in reversed(requests)]):
                inbox.answer(answer, sorted(set(self.versions)))
            inbox.settle()

    def one(self, request: GenerationRequest, version: int) -> Completion:
        ids, logps, sets, reason = [], [], [], ""
        while not reason:
            sets.append(kept_of((*request.prompt_ids.tolist(), *ids)))
            token, logp = next_token((*request.prompt_ids.tolist(), *ids))
            ids.append(token)
            logps.append(logp)
            stopped = token == END or any(s in decode(ids) for s in request.sampling.stop)
            reason = "stop" if stopped else "length" if len(ids) == request.sampling.max_tokens else ""
        kept = kept_ids(sets) if request.sampling.is_filtered else None
        return Completion(
            request.key, request.prompt_ids, ids, logps, (version,) * len(ids), reason, None, kept
        )  # type: ignore[arg-type]


class ChangedAnswers:
    """An inbox in which each answer is changed before it arrives."""

    def __init__(self, inbox: Inbox, change: Callable[[Completion], Completion]) -> None:
        self._inbox, self._change = inbox, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)

    def answer(
        self, completion: Completion, versions: Collection[int], vocab_size: int | None = None
    ) -> None:
        self._inbox.answer(self._change(completion), versions, vocab_size)
