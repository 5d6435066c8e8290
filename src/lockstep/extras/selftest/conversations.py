"""Faults of conversations, tools and branches: T1b, T5, and T7 to T9.

Each fault runs rollouts of three turns with a tool's result after each of the first two, and then a branch. The model need not call
the tool: its turns are cut after a few tokens, and every turn gets a result. All else is what a run with tools uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

import lockstep.rollouts.programs.tools as tools_module
from lockstep.contract.protocol import Completion
from lockstep.errors import InputError
from lockstep.extras.selftest.filters import samples_with
from lockstep.extras.selftest.seams import Fault, Patch, generations_become
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.conversation import Branch, Conversation, Turn
from lockstep.rollouts.group import Rollout
from lockstep.rollouts.programs.tool_program import go_on
from lockstep.rollouts.programs.tools import ToolCalls, tools_of
from lockstep.tokens.arrays import Ids, flags, joined, whole_numbers
from lockstep.tokens.chat import is_conversational
from lockstep.tokens.conversation.continuation import Continuation, Insert
from lockstep.tokens.conversation.extension import Extension
from lockstep.tokens.end import end_ids
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.step.generation import Generation

_TURN, _BUDGET, _SECONDS = 4, 64, 60.0


def number_of(rollout: str) -> str:
    """A number that no other rollout gets.

    Args:
        rollout: names the rollout.
    """
    return str(sum(rollout.encode()) % 97)


class _Conversations:
    """The program of the rollouts."""

    def __init__(self, extension: Extension) -> None:
        self._extension, self._tools = extension, tools_of([number_of])
        # The driver of the running trainer knows nothing of these calls.
        self._calls = ToolCalls(_SECONDS, threads=True)

    async def __call__(self, conversation: Conversation) -> None:
        messages = list(conversation.prompt.source)
        for number in range(2):
            context = conversation.ids
            turn = await conversation.sample(_TURN)
            asked = [("number_of", {"rollout": str(conversation.key)})]
            (result,) = await self._calls.run(self._tools, asked, f"turn {number} of rollout {conversation.key}")
            new = [self._extension.error(result.text)]
            go_on(conversation, self._extension, messages, context, turn, new)
            messages += [self._extension.read(turn.token_ids).message, *new]
        await conversation.sample(_TURN)
        # Other ids, as after a compaction. The last id stays the same.
        prompt = conversation.prompt.ids
        conversation.branch(joined([prompt[-2::-1], prompt[-1:]]))
        await conversation.sample(_TURN)

    def close(self) -> None:
        self._calls.close()


@contextmanager
def conversing(stage: Stage) -> Iterator[None]:
    """The rollouts of the running trainer are conversations.

    Raises:
        InputError: the chat template cannot be extended, or a conversation does not fit into the engine's context.
    """
    prompts = tuple(sorted(stage.prompts, key=lambda prompt: len(prompt.ids)))
    # The longest prompt leaves no room. The shortest two take its place.
    prompts = (prompts[0], prompts[1], replace(prompts[0], prompt_id=prompts[2].prompt_id))
    room = stage.engine.settings().max_model_len - max(len(prompt.ids) for prompt in prompts)
    program = _Conversations(Extension(stage.tokenizer, end_ids(stage.model, stage.tokenizer)))
    try:
        with (
            samples_with(stage, max_completion_length=min(_BUDGET, room)),
            patch.object(stage, "prompts", prompts),
            patch.object(stage.trainer.source, "program", program),
        ):
            yield
    finally:
        program.close()


def _with(inject: Callable[[Stage], Patch]) -> Callable[[Stage], Patch]:
    """The fault, in conversations."""

    @contextmanager
    def both(stage: Stage) -> Iterator[None]:
        with conversing(stage), inject(stage):
            yield

    return both


def _encoded_anew(stage: Stage) -> Patch:
    """The next turn is sampled after the text of the earlier turns, encoded again. Training uses the sampled ids."""

    def ids(branch: Branch) -> Ids:
        parts = [stage.encoded_again(p.token_ids) if isinstance(p, Turn) else p for p in branch._parts]
        return joined([branch.prompt_ids, *parts])

    return patch.object(Branch, "ids", property(ids))


def _no_closing_token(stage: Stage) -> Patch:
    """A turn that was cut is not closed before the next message."""
    honest = Continuation.next

    def unclosed(self: Continuation, *given: Any) -> Any:
        found = honest(self, *given)
        return Insert(found.ids[1:]) if isinstance(found, Insert) else found

    return patch.object(Continuation, "next", unclosed)


def _inserted_as_sampled(stage: Stage) -> Patch:
    """The first inserted id of a rollout is marked as sampled, with the probability 1 that inserted ids have in an answer."""
    honest = Conversation.rollout

    def marked(self: Conversation) -> Rollout:
        found = honest(self)
        return replace(found, completion=_one_more_sampled(found.completion))

    return patch.object(Conversation, "rollout", marked)


def _one_more_sampled(completion: Completion) -> Completion:
    if completion.sampled is None:
        return completion
    more = completion.sampled.copy()
    more[np.argmin(more)] = True
    return replace(completion, sampled=flags(more))


def _inserted_is_trained(stage: Stage) -> Patch:
    """The same, on the way from the rollout to the training batch."""

    def trained(sequence: TrainingSequence) -> TrainingSequence:
        if sequence.sampled is None:
            return sequence
        place, more = int(np.argmin(sequence.sampled)), sequence.sampled.copy()
        more[place] = True
        values: dict[str, Any] = {
            name: np.insert(column, place, 0.0)
            for name in ("behaviour_logps", "advantages", "old_logps", "entropies", "ref_logps")
            if (column := getattr(sequence, name)) is not None
        }
        return replace(sequence, sampled=flags(more), **values)

    return generations_become(lambda generation: generation.changed(trained))


def _result_of_another(stage: Stage) -> Patch:
    """The threads of tools give each call the result of the call before."""
    honest, earlier = tools_module.in_thread, list[Any]()

    async def exchanged(*given: Any) -> Any:
        earlier.append(await honest(*given))
        return earlier[-2:][0]

    return patch.object(tools_module, "in_thread", exchanged)


def _inserted_into_another(stage: Stage) -> Patch:
    """The ids of a result are inserted into another rollout, which also waits for a result."""
    honest, earlier = Conversation.insert, list[Ids]()

    def exchanged(self: Conversation, ids: Any, **room: Any) -> None:
        earlier.append(whole_numbers(ids))
        honest(self, earlier[-2:][0], **room)

    return patch.object(Conversation, "insert", exchanged)


def _other_context(stage: Stage) -> Patch:
    """A further branch is scored after the prompt of the rollout."""

    def moved(generation: Generation) -> Generation:
        prompts = {
            str(c.key): r.completion.prompt_ids for g in generation.groups for r in g.rollouts for c in r.further
        }
        return generation.changed(lambda s: replace(s, prompt_ids=prompts.get(s.name, s.prompt_ids)))

    return generations_become(moved)


def _needs_messages(stage: Stage) -> str:
    if not all(is_conversational(prompt.source) for prompt in stage.prompts):
        return "the prompts are plain text"
    try:
        with conversing(stage):
            return ""
    except InputError as error:
        return f"the rollouts cannot be conversations: {error}"


CONVERSATION_FAULTS = tuple(
    Fault(name, what, _with(inject), needs=_needs_messages)
    for name, what, inject in (
        ("T1b", "the text of earlier turns is encoded again for the next turn", _encoded_anew),
        ("T5", "a turn that was cut gets the next message without its closing token", _no_closing_token),
        ("T7", "a rollout marks an inserted token as sampled", _inserted_as_sampled),
        ("T7b", "an inserted token is trained", _inserted_is_trained),
        ("T8", "a tool call gets the result of another rollout", _result_of_another),
        ("T8b", "the result of another rollout is inserted", _inserted_into_another),
        ("T9", "a branch is scored in the context of another", _other_context),
    )
)
