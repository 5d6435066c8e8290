"""Answers the calls of one rollout, and records the ids of each.

Calls run in the event loop of the rollout, one after the other, on its `Conversation`. `Turns` finds the longest known
beginning of a call's messages, and the ids of that turn are continued. For other messages the chat template makes the
ids, and the rollout branches.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.contract.protocol import FinishReason
from lockstep.errors import InputError, LockstepError
from lockstep.extras.agents.agent_calls import Answer, AnsweredCall, Call, Listener
from lockstep.extras.agents.agent_messages import THINKING, normal_form
from lockstep.extras.agents.request_fields import Refused, bad_value, ended, no_room, unreadable
from lockstep.extras.agents.streamed_answers import Teller
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.conversation import Branch, Conversation, OutOfRoom, Turn
from lockstep.rollouts.programs.tool_program import is_drawn
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.chat import Message, picture_part, pictures_in
from lockstep.tokens.extension import Extension, Insert
from lockstep.tokens.turns import Conventions, ParsedTurn


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """A sampled turn, as the end of its conversation.

    Attributes:
        messages: the conversation up to this turn and with it, as the chat template gets it.
        context_ids: (C,) the ids after which the turn was sampled.
        turn_ids: (S,) the sampled ids.
        asked: number of messages before the first sampled turn of the conversation.
        finish_reasons: that of each assistant's turn after those messages. None: it was not sampled in this rollout.
    """

    messages: tuple[Message, ...]
    context_ids: Ids
    turn_ids: Ids
    asked: int
    finish_reasons: tuple[FinishReason | None, ...]


class Turns:
    """The turns of one rollout, by the messages that they end."""

    def __init__(self) -> None:
        self._turns: dict[bytes, KnownTurn] = {}

    def add(self, turn: KnownTurn, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Remember a turn, the end of these messages as the client knows them. Of equal ones, the later turn counts."""
        self._turns[_digests(messages, tools)[-1]] = turn

    def longest(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> KnownTurn | None:
        """The turn whose messages are the longest beginning of `messages`, which go on after it."""
        for digest in reversed(_digests(messages, tools)[:-1]):
            if digest in self._turns:
                return self._turns[digest]
        return None


def _digests(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[bytes]:
    """A digest of each beginning of a conversation: of its first message, of its first two messages, and so on."""
    state = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    found = []
    for message in messages:
        # A client may send half of a character.
        text = normal_form(message).encode(errors="surrogatepass")
        state.update(len(text).to_bytes(8, "big") + text)
        found.append(state.copy().digest())
    return found


# Gives the extension for a set of tools.
Extensions = Callable[[tuple[dict, ...]], Extension]


@dataclass(slots=True)
class Counts:
    """What happened in the calls of one rollout.

    Attributes:
        answered: sampled turns.
        extended: turns whose ids extend those of an earlier turn.
        rewritten: calls that extend an earlier turn in messages, which the template shows differently now.
        repeated: calls that got the answer of an earlier call again.
        refused: calls that got an error.
        aborted: calls whose client went away before the answer.
        malformed: tool calls in sampled turns that could not be read.
        unmet: sampled turns that lack what their call asked for: a tool call, one call at most, or JSON.
    """

    answered: int = 0
    extended: int = 0
    rewritten: int = 0
    repeated: int = 0
    refused: int = 0
    aborted: int = 0
    malformed: int = 0
    unmet: int = 0


class Recording:
    """One rollout that answers calls. It must be made in the event loop of the rollout.

    Args:
        reader: the reader of the run's prompts, which also reads the images of messages.

    Attributes:
        counts: what happened so far.
        failure: gets the first error that is not the agent's fault. The program raises it.
    """

    def __init__(self, conversation: Conversation, extensions: Extensions, reader: PromptReader) -> None:
        self._conversation, self._extensions, self._reader = conversation, extensions, reader
        self._loop = asyncio.get_running_loop()
        # Calls of one rollout wait for each other: each may use all room that is left, and their order makes seeds.
        self._turn = asyncio.Lock()
        self._turns = Turns()
        self._answers: dict[str, Answer] = {}
        self._messages: dict[str, tuple[Message, ...]] = {}
        # By the URL that the client sent: the image's file as a `data:` URL, and the image as the model takes it.
        self._seen: dict[str, tuple[str, Picture]] = {}
        self._gate = threading.Lock()
        self._open: set[asyncio.Task[Any]] = set()
        self._ended = False
        # The conversation of the last answer as the client knows it, and its last turn.
        self._last: tuple[tuple[Message, ...], KnownTurn] | None = None
        self.counts = Counts()
        self.failure: asyncio.Future[None] = self._loop.create_future()

    def submit(self, call: Call, listener: Listener | None = None) -> Future[Answer]:
        """Begin to answer a call, from any thread. Cancelling the future cancels the call, and its request.

        The listener follows the answer while its turn is sampled, and hears nothing of a repeated answer.

        Raises:
            Refused: the rollout has ended.
        """
        with self._gate:
            if self._ended:
                raise ended()
            return asyncio.run_coroutine_threadsafe(self._answer(call, listener), self._loop)

    async def end(self) -> None:
        """End the rollout: open calls are cancelled, and later calls are refused."""
        with self._gate:
            self._ended = True
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _answer(self, call: Call, listener: Listener | None) -> Answer:
        if self._ended:
            # It was submitted before the end.
            raise ended()
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            async with self._turn:
                known = self._answers.get(call.name) if call.may_repeat else None
                if known is not None:
                    self.counts.repeated += 1
                    return known
                answer = self._answers[call.name] = await self._sampled(call, listener)
                return answer
        except Refused:
            self.counts.refused += 1
            raise
        except asyncio.CancelledError:
            self.counts.aborted += 1
            raise
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise

    async def _sampled(self, call: Call, listener: Listener | None) -> Answer:
        extension = self._extensions(call.tools)
        messages = self._whole(call)
        if messages[-1]["role"] == "assistant":
            raise bad_value("messages", "the last message is the assistant's; there is nothing to answer")
        try:
            known = self._turns.longest(messages, call.tools)
            start = len(known.messages) if known is not None else 0
            new = tuple(_in_form(m, extension.conventions) for m in messages[start:])
            new = await self._with_pictures(known, new)
            context = self._context(extension, known, new)
            before = known.messages if known is not None else ()
            shown = self._reader.shown_by([*before, *new], context)
        except InputError as error:
            raise bad_value("messages", str(error)) from error
        except (LockstepError, Refused):
            raise
        except Exception as error:
            # Only the client's messages are read here. Whatever they make a chat template do, the run goes on.
            raise unreadable("messages", error) from error
        try:
            branch = self._continued(context, shown)
            if known is not None and is_drawn(self._conversation.seed):
                extension.check(known.messages[:-1], known.context_ids, known.turn_ids, new, branch.ids)
            name, created = self._made_up("answer", 24), int(time.time())
            progress = None
            if listener is not None:
                listener.begun(name, created)
                teller = Teller(extension, listener, self._loop, wishes=call.wishes)
                progress = teller.progress
            turn = await branch.sample(call.max_tokens, progress, call.wishes.stop)
        except OutOfRoom as error:
            # Frameworks look for the words "context length" and then take the conversation as cut.
            raise no_room(
                f"{error}: the rollout's budget (max_completion_length) or the model's context length "
                "(vllm_max_model_length) is used up"
            ) from error
        parsed = extension.read(turn.token_ids)
        answer = self._written(call, extension, turn, parsed, name, created, len(context))
        conversation = (*messages, answer.as_message())
        # Instructions are not carried over, as in OpenAI's API.
        self._messages[answer.name] = conversation[call.instructions is not None :]
        # The template gets a turn as it was sampled, with its thinking, which most clients do not send back.
        before, asked, reasons = _earlier(known, messages, new)
        said, reasons = _with_ids(parsed.message, answer), (*reasons, turn.finish_reason)
        added = KnownTurn((*before, *new, said), context, turn.token_ids, asked, reasons)
        self._turns.add(added, conversation, call.tools)
        self._last = conversation, added
        return answer

    def _whole(self, call: Call) -> tuple[Message, ...]:
        """All messages of a call, with those of the answer that it follows."""
        earlier: tuple[Message, ...] = ()
        if call.previous is not None:
            if call.previous not in self._messages:
                name = "previous_response_id"
                raise bad_value(name, f"{name} names no response of this rollout")
            earlier = self._messages[call.previous]
        return (*([call.instructions] if call.instructions is not None else []), *earlier, *call.messages)

    def _context(self, extension: Extension, known: KnownTurn | None, new: tuple[Message, ...]) -> Ids:
        """The ids before the turn: those of the turn that is extended and what follows it, or all from the template."""
        if known is None:
            return extension.prompt(new)
        found = extension.next(known.messages[:-1], known.context_ids, known.turn_ids, new)
        if isinstance(found, Insert):
            self.counts.extended += 1
            return joined([known.context_ids, known.turn_ids, found.ids])
        self.counts.rewritten += 1
        return found.ids

    async def _with_pictures(self, known: KnownTurn | None, new: tuple[Message, ...]) -> tuple[Message, ...]:
        """New messages with their images as the model takes them.

        Raises:
            InputError: the run shows no images, there are too many, or one cannot be read.
        """
        urls = [part["image"] for part in _images_in(new)]
        if not urls:
            return new
        self._reader.check_count(len(urls) + len(pictures_in(known.messages if known is not None else ())))
        if unread := list(dict.fromkeys(url for url in urls if url not in self._seen)):
            # In a thread: the other rollouts of this loop go on meanwhile.
            read = await asyncio.to_thread(self._reader.files_and_pictures, unread)
            self._seen |= dict(zip(unread, read, strict=True))
        return tuple(_each_image(message, lambda url: picture_part(self._seen[url][1])) for message in new)

    def _continued(self, context: Ids, shown: PromptPictures) -> Branch:
        """The branch that ends with these ids and pictures: an old one that they continue exactly, or a new one."""
        branches = list(enumerate(self._conversation.branches))
        found = [(len(b.ids), place) for place, b in branches if _continues(context, shown, b)]
        if not found:
            branch = self._conversation.branch(context, shown)
            branch.insert(context[:0], room_after=1)
            return branch
        length, place = max(found)
        branch = self._conversation.branches[place]
        branch.insert(context[length:], room_after=1, pictures=shown)
        return branch

    def _written(
        self,
        call: Call,
        extension: Extension,
        turn: Turn,
        parsed: ParsedTurn,
        name: str,
        created: int,
        before: int,
    ) -> Answer:
        wishes = call.wishes
        self.counts.malformed += len(parsed.errors) if wishes.reads_calls else 0
        # A client that offers no tools reads a call as text.
        shown = parsed if wishes.reads_calls else extension.read(turn.token_ids, calls_are_text=True)
        calls = parsed.calls if wishes.reads_calls else ()
        content = wishes.before_stop(shown.content)
        self.counts.unmet += not wishes.are_met(content, [c.name for c in calls])
        answered = tuple(
            # Some models write ids of their own, which their templates expect to see again.
            AnsweredCall(c.id or self._made_up(f"call {i}", 9), c.name, _as_text(c.arguments))
            for i, c in enumerate(calls[:1] if wishes.one_call else calls)
        )
        answer = Answer(
            name=name,
            created=created,
            content=content,
            reasoning=shown.reasoning,
            calls=answered,
            finish_reason=turn.finish_reason,
            prompt_tokens=before,
            completion_tokens=len(turn.token_ids),
            logprobs=self._logprobs(turn) if wishes.logprobs else None,
        )
        self.counts.answered += 1
        return answer

    def _logprobs(self, turn: Turn) -> tuple[tuple[str, float], ...]:
        """Text and log-prob of each id of a turn. End tokens and other special tokens have no text."""
        texts = [self._conversation.decode(turn.token_ids[i : i + 1]) for i in range(len(turn.token_ids))]
        return tuple(zip(texts, map(float, turn.logprobs), strict=True))

    def _made_up(self, use: str, length: int) -> str:
        """An id of letters and digits (Mistral's wants nine).

        Templates show the ids of tool calls to the model, so it depends on the seed and the number of the turn only.
        """
        text = f"{self._conversation.seed} {self.counts.answered} {use}"
        return hashlib.blake2b(text.encode()).hexdigest()[:length]

    def notes(self) -> dict[str, Any]:
        """The last answer's conversation for reward functions (`prompt`, `messages`, `finish_reasons`), and the counts.

        A finish reason of None: the agent wrote the turn itself.
        """
        counts = {"agent": asdict(self.counts)}
        if self._last is None:
            return {"prompt": [], "messages": [], "finish_reasons": [], **counts}
        given, turn = self._last
        messages = [_each_image(m, lambda url: {"type": "image", "image": self._seen[url][0]}) for m in given]
        said = {"prompt": list(messages[: turn.asked]), "messages": list(messages[turn.asked :])}
        return {**said, "finish_reasons": list(turn.finish_reasons), **counts}


def _earlier(
    known: KnownTurn | None, messages: tuple[Message, ...], new: tuple[Message, ...]
) -> tuple[tuple[Message, ...], int, tuple[FinishReason | None, ...]]:
    """What is known before the new messages: messages, the number of those that were asked, finish reasons."""
    if known is None:
        return (), len(messages), ()
    written = sum(message["role"] == "assistant" for message in new)
    return known.messages, known.asked, (*known.finish_reasons, *[None] * written)


def _continues(context: Ids, shown: PromptPictures, branch: Branch) -> bool:
    """Whether ids begin with those of a branch, and show its pictures there."""
    ids = branch.ids
    same = shown.digests_before(len(ids)) == branch.pictures.digests
    return len(ids) <= len(context) and np.array_equal(context[: len(ids)], ids) and same


def _images_in(messages: Iterable[Message]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part.get("type") == "image"]


def _each_image(message: Message, own: Callable[[str], dict[str, Any]]) -> Message:
    """A message with another part in place of each image part."""
    if not isinstance(message["content"], list):
        return message
    parts = [own(part["image"]) if part.get("type") == "image" else part for part in message["content"]]
    return {**message, "content": parts}


def _in_form(message: Message, how: Conventions) -> Message:
    """An assistant's message that was not sampled in this rollout, as the template takes it."""
    found = dict(message)
    if THINKING in found and how.thinking_field is not None:
        found[how.thinking_field] = found.pop(THINKING)
    if how.arguments_as_text and found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in found["tool_calls"]
        ]
    return found


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_ids(message: Message, answer: Answer) -> Message:
    """A sampled turn with the ids of its calls that the client knows. The client may know only the first call."""
    if not (message.get("tool_calls") and answer.calls):
        return message
    sampled = message["tool_calls"]
    known = [{**call, "id": own.id} for call, own in zip(sampled, answer.calls, strict=False)]
    return {**message, "tool_calls": [*known, *sampled[len(known) :]]}
