"""One rollout while it is being made: the ids so far, each marked as sampled or inserted.

A program is a coroutine that makes one rollout: it asks for the next turn, inserts ids, or starts a branch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.contract.inbox import Progress
from lockstep.contract.protocol import Completion, FinishReason, GenerationRequest, RequestKey, derived_seed
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError, LockstepError
from lockstep.images.pictures import NO_PICTURES, PromptPictures
from lockstep.rollouts.group import Prompt, Rollout, TurnEnd
from lockstep.tokens.arrays import (
    Ids,
    KeptIds,
    Reals,
    filled,
    flags,
    joined,
    joined_kept_ids,
    reals,
    whole_numbers,
)

Ask = Callable[[GenerationRequest, Progress | None], Awaitable[Completion]]
Decode = Callable[[Ids], str]
Program = Callable[["Conversation"], Awaitable[None]]


class OutOfRoom(LockstepError):
    """A program wanted to add more ids than the rollout's budget or the engine's context has room for.

    If the program does not catch it, the rollout ends there as one that was cut at the length limit.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The N ids that the engine sampled in one call: its answer, up to the token that completes a stop string."""

    answer: Completion
    _decode: Decode

    @property
    def token_ids(self) -> Ids:
        """(N,) int64 ids, the end token included where one was sampled."""
        return self.answer.token_ids

    @property
    def logprobs(self) -> Reals:
        """(N,) float32 log-prob of each id under the sampling distribution."""
        return self.answer.logprobs

    @property
    def weight_versions(self) -> Ids:
        """(N,) int64 version of the weights that sampled each id."""
        return self.answer.weight_versions

    @property
    def kept_ids(self) -> KeptIds | None:
        """One set per id, if a filter was in force (`Completion.kept_ids`)."""
        return self.answer.kept_ids

    @property
    def finish_reason(self) -> FinishReason:
        """`stop` for an end token or a stop string, `length` for a limit."""
        return self.answer.finish_reason

    @property
    def text(self) -> str:
        """The decoded ids, without special tokens. They are decoded at each use."""
        return self._decode(self.answer.token_ids)


class Branch:
    """Ids that follow one prompt: sampled and inserted ones, in order. Only one call may be open at a time.

    Attributes:
        prompt_ids: (P,) int64 ids before the branch. None of them is learned from in this branch.
        pictures: the pictures whose placeholders are in the ids so far.
        turns: the sampled turns, in order.
        ran_out: whether the program wanted to add more ids than there was room for.
    """

    def __init__(self, conversation: Conversation, prompt_ids: Ids, pictures: PromptPictures) -> None:
        self.prompt_ids, self.pictures = whole_numbers(prompt_ids), pictures
        self.turns: list[Turn] = []
        self._conversation = conversation
        # What follows the prompt, in order.
        self._parts: list[Turn | Ids] = []
        self._key: RequestKey | None = None
        self.ran_out = self._busy = False

    @property
    def ids(self) -> Ids:
        """The prompt's ids and everything after them."""
        return joined([self.prompt_ids, *map(_ids_of, self._parts)]) if self._parts else self.prompt_ids

    @property
    def room(self) -> int:
        """Number of ids that may still be added to this branch."""
        return min(self._conversation.budget, self._conversation.context - len(self.prompt_ids) - self._added)

    @property
    def _added(self) -> int:
        return sum(map(len, map(_ids_of, self._parts)))

    async def sample(
        self, max_tokens: int | None = None, progress: Progress | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """Let the engine continue this branch.

        Args:
            max_tokens: largest number of ids of this turn; None: as many as there is room for.
            progress: called in the engine's thread with the ids of the turn so far, if the engine reports progress.
            stop: strings that end this turn, beside the run's stop strings.

        Raises:
            OutOfRoom: there is no room for an id.
            InputError: the sampling settings count the tokens of one call only, and this is not the first call.
        """
        if self._busy:
            raise LockstepError(
                f"rollout {self._conversation.key} asked for a turn before the last one of its branch was there"
            )
        room = self.room
        if room < 1:
            raise self._out(1, room)
        most = room if max_tokens is None else min(room, max_tokens)
        self._busy = True
        try:
            answer = await self._conversation.call(self.ids, self.pictures, most, progress, stop)
        finally:
            self._busy = False
        if self._key is None:
            self._key = answer.key
        turn = Turn(self._stopped_across(answer), self._conversation.decode)
        self.turns.append(turn)
        self._parts.append(turn)
        self._conversation.took(turn, self, self._added)
        return turn

    def insert(
        self, ids: Ids | Sequence[int], room_after: int = 0, pictures: PromptPictures = NO_PICTURES
    ) -> None:
        """Add ids that the engine did not sample. They are context: nothing is learned from them.

        Args:
            room_after: number of ids that must still fit after them.
            pictures: the pictures of the whole branch with these ids, if the ids show any.

        Raises:
            OutOfRoom: there is no room for all of them and for `room_after` more; then none is added.
        """
        inserted = whole_numbers(ids)
        if self._busy:
            raise LockstepError(
                f"rollout {self._conversation.key} inserted ids while the engine sampled after them"
            )
        room = self.room
        if len(inserted) + room_after > room:
            raise self._out(len(inserted) + room_after, room)
        if len(inserted):
            self._parts.append(inserted)
            self.pictures = pictures or self.pictures
            self._conversation.spend(len(inserted))

    def _out(self, wanted: int, room: int) -> OutOfRoom:
        self.ran_out = True
        return OutOfRoom(
            f"rollout {self._conversation.key} wanted to add {wanted} ids and has room for {max(room, 0)}"
        )

    def _stopped_across(self, answer: Completion) -> Completion:
        """The answer, cut after the token that completes a stop string which began in the turn before.

        The engine looks for stop strings in each of its answers. If nothing was inserted between two turns, and the
        first was cut by a limit, both are one text.
        """
        before: list[Ids] = []
        for part in reversed(self._parts):
            if not isinstance(part, Turn) or part.finish_reason == "stop":
                break
            before.insert(0, part.token_ids)
        stop, decode = self._conversation.sampling.stop, self._conversation.decode
        longest = max(map(len, stop), default=0)
        for count in range(1, len(answer.token_ids) + 1) if before and stop else ():
            if len(decode(answer.token_ids[: count - 1])) >= longest - 1:
                # Later tokens are too far from the turn before to complete such a stop string.
                break
            text = decode(joined([*before, answer.token_ids[:count]]))
            if any(s in text for s in stop):
                return replace(
                    answer,
                    token_ids=answer.token_ids[:count],
                    logprobs=answer.logprobs[:count],
                    weight_versions=answer.weight_versions[:count],
                    finish_reason="stop",
                    kept_ids=None if answer.kept_ids is None else answer.kept_ids.part(0, count),
                )
        return answer

    def completion(self) -> Completion | None:
        """The branch as one completion; None if nothing was sampled in it."""
        if self._key is None:
            return None
        if len(self._parts) == 1 and not self.ran_out:
            return self.turns[0].answer
        is_turn, ids = [isinstance(part, Turn) for part in self._parts], [*map(_ids_of, self._parts)]
        logprobs = [p.logprobs if isinstance(p, Turn) else filled(0.0, len(p)) for p in self._parts]
        sampled = flags(np.repeat(is_turn, [*map(len, ids)]))
        # All turns or none have sets: they share the sampling distribution.
        kept = [turn.kept_ids for turn in self.turns if turn.kept_ids is not None]
        return Completion(
            key=self._key,
            prompt_ids=self.prompt_ids,
            token_ids=joined(ids),
            logprobs=joined(logprobs),
            weight_versions=joined(self._versions()),
            finish_reason="length" if self.ran_out else self.turns[-1].finish_reason,
            sampled=None if all(is_turn) else sampled,
            kept_ids=joined_kept_ids(kept) if kept else None,
            # Those of an earlier turn are the first ones of these.
            pictures=self.turns[-1].answer.pictures,
        )

    def _versions(self) -> list[Ids]:
        """The versions of each part. Inserted ids get that of the weights that continued after them, and read them."""
        following = self.turns[-1].weight_versions[-1:]
        found: list[Ids] = []
        for part in reversed(self._parts):
            versions = part.weight_versions if isinstance(part, Turn) else np.repeat(following, len(part))
            found.append(whole_numbers(versions))
            following = versions[:1]
        return found[::-1]


class Conversation:
    """One rollout from its first call to its end. A program gets it from the driver.

    Attributes:
        prompt: the row: prompt id, ids, source (text or messages) and columns.
        key: prompt id and sample.
        seed: seed of this rollout. Its first call uses it; derive others for other uses (`derived_seed`).
        sampling: sampling settings of the run. `max_tokens` is the budget of the whole rollout: all sampled and
            inserted ids of all branches count.
        context: number of ids that the engine's context holds.
        notes: what the program keeps for rewards and reports, in JSON types.
        branches: all branches, the first one included.
    """

    def __init__(
        self,
        prompt: Prompt,
        key: RequestKey,
        seed: int,
        sampling: Sampling,
        context: int,
        decode: Decode,
        ask: Ask,
    ) -> None:
        self.prompt, self.key, self.seed = prompt, key, seed
        self.sampling, self.context, self.decode = sampling, context, decode
        self.notes: dict[str, Any] = {}
        self.branches: list[Branch] = []
        self._ask = ask
        # Ids that all branches may still add, beside those that open calls may still sample.
        self._left = sampling.max_tokens
        self._reserved = 0
        self._calls, self._seed_of_last_call = 0, seed
        self._turns: list[tuple[Branch, int, FinishReason]] = []
        self.branch(prompt.ids, prompt.pictures)

    @property
    def environment_seed(self) -> int:
        """The seed below 2**32 of the environment or the agent of this rollout."""
        # `random.seed`, NumPy and gymnasium all take seeds of this size.
        return derived_seed(self.seed, "environment") % 2**32

    @property
    def ids(self) -> Ids:
        """The prompt's ids and everything after them, in the current branch."""
        return self.branches[-1].ids

    @property
    def room(self) -> int:
        """Number of ids that may still be added: the budget or the engine's context, whichever ends first."""
        return self.branches[-1].room

    @property
    def budget(self) -> int:
        """Number of ids that all branches together may still add."""
        return self._left - self._reserved

    async def sample(self, max_tokens: int | None = None) -> Turn:
        """Let the engine continue the current branch (`Branch.sample`)."""
        return await self.branches[-1].sample(max_tokens)

    def insert(
        self, ids: Ids | Sequence[int], room_after: int = 0, pictures: PromptPictures = NO_PICTURES
    ) -> None:
        """Add ids that the engine did not sample to the current branch (`Branch.insert`)."""
        self.branches[-1].insert(ids, room_after, pictures)

    def branch(self, prompt_ids: Ids | Sequence[int], pictures: PromptPictures = NO_PICTURES) -> Branch:
        """Continue from other ids: a new branch, which is now the current one.

        Each sampled id is learned from in the branch in which it was sampled, and is context in all others. An older
        branch can still be continued by its own methods. `pictures` are those whose placeholders are in these ids.

        Raises:
            LockstepError: the ids have placeholders of the prompt's pictures, and no pictures are given.
        """
        ids = whole_numbers(prompt_ids)
        if not pictures and (ids == self.prompt.pictures.placeholder).any():
            raise LockstepError(
                f"rollout {self.key}: a branch has placeholders, and its pictures are not given"
            )
        self.branches.append(Branch(self, ids, pictures))
        return self.branches[-1]

    async def call(
        self,
        ids: Ids,
        pictures: PromptPictures,
        most: int,
        progress: Progress | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """The engine's answer to the next call, whose seed depends only on the rollout's seed and the call's number."""
        number, seed = self._calls, self._seed_of_last_call
        if number:
            check_several_calls(self.sampling, f"rollout {self.key}")
            seed = derived_seed(seed, "going on")
        self._calls, self._seed_of_last_call = number + 1, seed
        sampling = self.sampling
        if most != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=most)
        own = tuple(dict.fromkeys(text for text in stop if text not in sampling.stop))
        if own:
            sampling = replace(sampling, stop=(*sampling.stop, *own))
        request = GenerationRequest(self.key._replace(call=number), ids, sampling, seed, pictures, own)
        self._reserved += most
        try:
            return await self._ask(request, progress)
        finally:
            self._reserved -= most

    def took(self, turn: Turn, branch: Branch, end: int) -> None:
        """Count a turn that ends after `end` added ids of a branch."""
        self._turns.append((branch, end, turn.finish_reason))
        self.spend(len(turn.token_ids))

    def spend(self, count: int) -> None:
        """Take ids from the budget."""
        self._left -= count

    def rollout(self) -> Rollout:
        """The finished rollout, without branches in which nothing was sampled; without any, it has no ids."""
        sampled = [branch for branch in self.branches if branch.turns]
        completions = [found for branch in sampled if (found := branch.completion()) is not None]
        if not completions:
            none = whole_numbers([])
            completions = [Completion(self.key, self.prompt.ids, none, reals([]), none, "stop")]
        if self.branches[-1].ran_out:
            completions[-1] = replace(completions[-1], finish_reason="length")
        # The first branch in which the engine sampled has the key of the rollout.
        if completions[0].key != self.key:
            completions[0] = replace(completions[0], key=self.key)
        return Rollout(
            completions[0],
            "\n\n".join(self.decode(completion.token_ids) for completion in completions),
            further=tuple(completions[1:]),
            turns=tuple(TurnEnd(sampled.index(branch), end, reason) for branch, end, reason in self._turns),
            notes=self.notes,
        )


def check_several_calls(sampling: Sampling, who: str) -> None:
    """Refuse (`InputError`) settings that count the tokens of one call, for rollouts of several calls."""
    if names := sampling.counting_fields:
        raise InputError(
            f"{' and '.join(names)} would start again when {who} continues: "
            "not supported for rollouts of several calls"
        )


async def single_turn(conversation: Conversation) -> None:
    """The program of a rollout of one turn."""
    await conversation.sample()


def _ids_of(part: Turn | Ids) -> Ids:
    return part.token_ids if isinstance(part, Turn) else part
