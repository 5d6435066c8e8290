"""The program of a rollout with tools or an environment: turns, and what answers them, until nothing answers a turn.

It samples a turn, reads the tool calls from the turn's ids, runs them, and inserts the ids of their results
(`tokens/extension.py`). An environment may answer a turn without a call with a message of the user. Where the chat
template shows earlier turns differently from then on, it starts a branch. It leaves in `Conversation.notes`:

| note | what it is |
|---|---|
| `prompt` | the messages before the first turn, if the environment's `reset` added to them |
| `messages` | the messages after the prompt, as TRL gives them to reward functions |
| `finish_reasons` | the finish reason of each assistant's turn in `messages`, in order |
| `tool_calls`, `tool_failures` | numbers of calls, and of those that failed, malformed calls included |
| `rewards` | the reward of the environment, by the name of its class |
| `failed` | why the environment could not go on; absent if it could |
| `environment` | names the environment that belongs to the rollout until it is scored |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.contract.protocol import derived_seed
from lockstep.errors import InputError
from lockstep.images.content import Content
from lockstep.images.prompts import PromptReader
from lockstep.images.reading import with_data_urls
from lockstep.rollouts.conversation import Conversation, OutOfRoom, Turn
from lockstep.rollouts.group import Rollout
from lockstep.rollouts.programs.environments import Environment, EnvironmentFailed, Environments
from lockstep.rollouts.programs.tools import Tool, ToolCalls, ToolResult, failed_call
from lockstep.tokens import chat as template
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.extension import Branch, Extension, Message, ParsedTurn

# One rollout in this many is rendered again.
_CHECKED = 4


@dataclass(slots=True)
class _Said:
    """The conversation so far: all messages for the chat template, and those after the prompt for rewards."""

    shown: list[Message]
    kept: list[Message]


class ToolProgram:
    """The program of every rollout of a run with tools or environments.

    Args:
        extensions: extends the conversations of each kind of environment, by its name; without environments it is None.
        iterations: how often a rollout may call tools and go on; None: any number of times.
        longest_token: number of characters of the longest token.
        reader: the reader of the run's prompts.
    """

    def __init__(
        self,
        extensions: Mapping[str | None, Extension],
        tools: Mapping[str, Tool],
        calls: ToolCalls,
        environments: Environments | None,
        iterations: int | None,
        longest_token: int,
        reader: PromptReader,
    ) -> None:
        self._extensions, self._tools, self._calls, self._reader = extensions, tools, calls, reader
        self._environments, self._iterations, self._longest_token = environments, iterations, longest_token
        # The environments of rollouts that are not scored yet, by the seeds of their rollouts.
        self._held: dict[int, Environment] = {}

    async def __call__(self, conversation: Conversation) -> None:
        """Make one rollout."""
        notes = conversation.notes
        notes |= {"messages": [], "finish_reasons": [], "tool_calls": 0, "tool_failures": 0}
        try:
            if self._environments is None:
                # The driver marks a rollout that is out of room as cut at the length limit.
                await self._talk(conversation, None, _Said(self._asked(conversation), notes["messages"]))
            else:
                await self._act(conversation, self._environments)
        except EnvironmentFailed as error:
            notes["failed"] = str(error)

    def environment_of(self, rollout: Rollout) -> Any:
        """The user's object that a rollout acted on. It stays as the rollout left it until `release`."""
        held = self._held.get(rollout.notes.get("environment", -1))
        return held.instance if held is not None else None

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Use the environments of these rollouts again: they are scored."""
        for rollout in rollouts:
            self._give_back(rollout.notes.get("environment", -1))

    def release_all(self) -> None:
        """Use all environments again whose rollouts do not run: their generations are given up, or begin again."""
        for seed in list(self._held):
            self._give_back(seed)

    def close(self) -> None:
        """End all environments and the threads of the tools."""
        if self._environments is not None:
            self._environments.close()
        self._calls.close()

    async def _act(self, conversation: Conversation, environments: Environments) -> None:
        """A rollout with an environment, from its `reset` to its reward."""
        row = {**conversation.prompt.columns, "prompt": conversation.prompt.source}
        environment = await environments.take(environments.name_of(row))
        self._give_back(conversation.seed)
        self._held[conversation.seed] = environment
        conversation.notes["environment"] = conversation.seed
        begun = await environment.reset(environments.row_of(row), conversation.environment_seed)
        asked, longest = self._asked(conversation), conversation.context * self._longest_token
        if begun is not None:
            self._check_count(environment, "reset", begun, asked)
        shown = _with_content(asked, None if begun is None else begun.shown(longest))
        said = _Said(shown, conversation.notes["messages"])
        if begun is not None and any(begun.parts):
            ids = self._extensions[environment.name].prompt(said.shown)
            if len(ids) >= conversation.context:
                why = f"with its text, the prompt has {len(ids)} tokens and leaves no room for an answer"
                raise environment.fail("reset", why)
            asked = with_data_urls(conversation.prompt.source)
            conversation.notes["prompt"] = _with_content(asked, begun.kept(longest))
            conversation.branch(ids, self._reader.shown_by(said.shown, ids))
        with suppress(OutOfRoom):
            await self._talk(conversation, environment, said)
        reward = await environment.reward()
        conversation.notes["rewards"] = {environment.title: reward}

    async def _talk(self, conversation: Conversation, environment: Environment | None, said: _Said) -> None:
        """Turns and what answers them, until nothing answers a turn, a turn is cut, or no iterations are left."""
        extension = self._extensions[environment.name if environment is not None else None]
        tools = {**self._tools, **environment.tools} if environment is not None else self._tools
        notes, rounds = conversation.notes, 0
        while True:
            context = conversation.ids
            turn = await conversation.sample()
            parsed = extension.read(turn.token_ids)
            said.kept.append(_kept(parsed))
            notes["finish_reasons"].append(turn.finish_reason)
            # A longer text does not fit: then it is not encoded as a whole only to find that out.
            longest = conversation.room * self._longest_token + 1
            if turn.finish_reason == "length":
                return
            if parsed.calls or parsed.errors:
                if rounds == self._iterations:
                    return
                rounds += 1
                asked = [(call.name, call.arguments) for call in parsed.calls]
                results = await self._calls.run(tools, asked, f"turn {rounds} of rollout {conversation.key}")
                results = self._within_limit(results, said.shown)
                notes["tool_calls"] += len(results) + len(parsed.errors)
                notes["tool_failures"] += sum(result.failed for result in results) + len(parsed.errors)
                if environment is not None:
                    environment.check(results)
                shown, kept = _answers(extension, parsed, results, longest)
            else:
                if (
                    environment is None
                    or (heard := await environment.next_user_message(parsed.content)) is None
                ):
                    return
                self._check_count(environment, "next_user_message", heard, said.shown)
                contents = heard.shown(longest), heard.kept(longest)
                shown, kept = ([{"role": "user", "content": content}] for content in contents)
            go_on(conversation, extension, said.shown, context, turn, shown, self._reader)
            said.shown += [parsed.message, *shown]
            said.kept += kept

    def _within_limit(self, results: list[ToolResult], before: Sequence[Message]) -> list[ToolResult]:
        """The results, with errors for the model instead of those that would show it too many pictures."""
        found: list[ToolResult] = []
        for result in results:
            try:
                self._reader.check_said(before, [r.content for r in (*found, result)])
            except InputError as error:
                result = failed_call(result.name, str(error), ticket=result.ticket)
            found.append(result)
        return found

    def _check_count(
        self, environment: Environment, method: str, said: Content, before: Sequence[Message]
    ) -> None:
        """Check the number of pictures with those that an environment has given. It fails if they are too many."""
        try:
            self._reader.check_said(before, [said])
        except InputError as error:
            raise environment.fail(method, str(error)) from error

    def _asked(self, conversation: Conversation) -> list[Message]:
        """The messages of the prompt, with its pictures."""
        prompt = conversation.prompt
        return self._reader.messages_of({**prompt.columns, "prompt": prompt.source}, prompt.pictures)

    def _give_back(self, seed: int) -> None:
        held = self._held.pop(seed, None)
        if held is not None and self._environments is not None:
            self._environments.give_back(held)


def go_on(
    conversation: Conversation,
    extension: Extension,
    messages: Sequence[Message],
    context: Ids,
    turn: Turn,
    new: Sequence[Message],
    reader: PromptReader,
) -> None:
    """Give a rollout the messages that follow a turn, so that the next turn can be sampled.

    Args:
        messages: the messages before the turn.
        context: (C,) ids before the turn.
        new: the messages after it.
        reader: the reader of the run's prompts.

    Raises:
        OutOfRoom: there is no room for them and for one id of the next turn. Then no ids are inserted.
        ProofError: the template does not show the messages like this. One rollout in four is checked.
    """
    found = extension.next(messages, context, turn.token_ids, new)
    inserted = found.ids
    whole = found.ids if isinstance(found, Branch) else joined([conversation.ids, found.ids])
    shown = reader.shown_by([*messages, *new], whole)
    if isinstance(found, Branch):
        conversation.branch(found.ids, shown)
        inserted = found.ids[:0]
    # Messages that the model cannot answer would be the last ones that reward functions get.
    conversation.insert(inserted, room_after=1, pictures=shown)
    if is_drawn(conversation.seed):
        extension.check(messages, context, turn.token_ids, new, conversation.ids)


def is_drawn(seed: int) -> bool:
    """Whether the chat template renders the turns of the rollout with this seed a second time, as a proof."""
    return derived_seed(seed, "template") % _CHECKED == 0


def _with_content(prompt: Sequence[Message], content: template.Content | None) -> list[Message]:
    """The messages of a prompt, with more content at the end of the last one."""
    messages = list(prompt)
    if content:
        before = messages[-1].get("content") or ""
        if isinstance(before, str) and isinstance(content, str):
            whole: template.Content = before + content
        else:
            whole = [*_parts(before), *_parts(content)]
        messages[-1] = {**messages[-1], "content": whole}
    return messages


def _parts(content: template.Content) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _kept(turn: ParsedTurn) -> Message:
    """A turn as reward functions get it: TRL's form, whatever form the chat template takes."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def _answers(
    extension: Extension, turn: ParsedTurn, results: Sequence[ToolResult], longest: int
) -> tuple[list[Message], list[Message]]:
    """The messages that answer a turn's calls, in their order: for the template, and for reward functions."""
    shown: list[Message] = []
    kept: list[Message] = []
    for call, result in zip(turn.calls, results, strict=True):
        shown.append(extension.result(call, result.content.shown(longest)))
        kept.append({"role": "tool", "name": result.name, "content": result.content.kept(longest)})
    for error in turn.errors:
        text = json.dumps({"error": error}, ensure_ascii=False)[:longest]
        shown.append(extension.error(text))
        kept.append({"role": "tool", "content": text})
    return shown, kept
