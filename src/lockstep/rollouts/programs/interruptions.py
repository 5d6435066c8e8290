"""Interrupts completions that think for too long: an end of thinking is inserted, and they continue to an answer.

These are the forced-length interruptions of ScaleRL (arXiv 2510.13786). The inserted ids are context, like a prompt:
the policy does not learn from them and the proof leaves them out (`Completion.sampled`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.contract.protocol import derived_seed
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.rollouts.conversation import Conversation, Program, check_several_calls
from lockstep.tokens.arrays import Ids


@dataclass(frozen=True, slots=True)
class Interruption:
    """When thinking is interrupted, and the ids that are inserted.

    The check for the end of thinking uses ids, not text. It is exact if the end of thinking is one token. An end of
    several tokens is missed if the model writes it with other tokens; then the completion is interrupted although it
    has ended its thinking.

    Attributes:
        after: number of tokens after which a completion that still thinks is interrupted.
        ids: ids that are inserted there.
        end_ids: consecutive ids that mark the end of thinking in a completion.
        earliest: if given, the number of tokens is drawn for each request between this and `after` (ScaleRL uses 10k
            and 12k, so that the policy learns answers at many lengths). None: always `after`.

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

    def place(self, seed: int) -> int:
        """Number of tokens after which a completion is interrupted: a function of the rollout's seed."""
        return self._earliest + derived_seed(seed, "interrupted") % (self.after - self._earliest + 1)

    @property
    def _earliest(self) -> int:
        return self.after if self.earliest is None else self.earliest

    def thinks(self, ids: Ids) -> bool:
        """Whether a completion with these ids has not yet ended its thinking."""
        size = len(self.end_ids)
        if len(ids) < size:
            return True
        return not (np.lib.stride_tricks.sliding_window_view(ids, size) == self.end_ids).all(axis=1).any()

    def check_room(self, limit: int) -> None:
        """Refuse (`InputError`) a limit that leaves no tokens for an answer, unless it ends before interruptions."""
        if self._earliest < limit <= self.after + len(self.ids):
            raise InputError(
                f"max_thinking_length={self.after} and an interruption of {len(self.ids)} tokens leave "
                f"nothing for an answer within the {limit} tokens of a completion: lower max_thinking_length, "
                "shorten interruption, or raise the limit"
            )


def interrupted(interruption: Interruption, sampling: Sampling) -> Program:
    """The program of a rollout whose thinking is interrupted.

    First the engine samples up to the place of the interruption. An unfinished completion is then continued, id for id,
    for the rest of its `max_tokens`. If it still thinks, the interruption is inserted before its continuation. The
    sampling distribution is the same as without the split. Inserted ids count towards `max_tokens`. They are not part
    of the text in which stop strings are searched.

    Raises:
        InputError: the settings leave no room for an answer, or have penalties that count the tokens of a completion.
    """
    interruption.check_room(sampling.max_tokens)
    check_several_calls(sampling, "an interrupted completion")

    async def program(conversation: Conversation) -> None:
        turn = await conversation.sample(interruption.place(conversation.seed))
        if turn.finish_reason == "stop" or conversation.room < 1:
            return
        if interruption.thinks(turn.token_ids):
            conversation.insert(interruption.ids)
        await conversation.sample()

    return program
