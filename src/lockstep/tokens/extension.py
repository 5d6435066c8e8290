"""Extends a conversation in ids between two sampled turns, and proves at start that this is exact.

`Extension.next` gets the ids that the engine sampled and the messages that follow. The result is an `Insert` or a
`Branch`. An `Insert` has the ids that come after the sampled ones: the end of the template's rendering of the whole
conversation, from the token that closes the sampled turn. A `Branch` has the ids of another prompt, because the
template renders the earlier turns differently from now on. The ids of a sampled turn are never made from text.

Proof `template`.
Shows: what was inserted after a turn is what the chat template renders for this conversation, from the token that
closes the turn on.
Does not show: turns of other rollouts than the drawn ones.
When: every insertion in one rollout in four, drawn by its seed; the template renders the conversation once more.

A proof at start runs once per `Extension`, on random conversations of several kinds: what the assistant did, and what
follows. It takes from the ids of the whole conversation the part that a model would have sampled, and continues after
it. The sampled and the inserted ids, or the ids of the branch, must be the template's ids of the whole conversation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.chat import (
    Content,
    HasPictureIds,
    Message,
    Template,
    picture_part,
    pictures_in,
    shared_start,
)
from lockstep.tokens.tool_calls import ToolCall, schemas_of
from lockstep.tokens.turns import Conventions, ParsedTurn, TurnReader, made_up_call, tool_call_field


@dataclass(frozen=True, slots=True)
class Insert:
    """The rollout goes on after its own ids. `ids` (N,) are inserted after the sampled turn; they were not sampled."""

    ids: Ids


@dataclass(frozen=True, slots=True)
class Branch:
    """The rollout goes on from another prompt, because the template now renders earlier ids differently.

    Attributes:
        ids: (N,) the whole prompt of the branch.
        reason: what is different. Reports show it.
    """

    ids: Ids
    reason: str


EARLIER_DIFFERS = "the template shows the earlier messages differently when new messages follow"
TURN_DIFFERS = "the template shows the sampled turn differently when new messages follow"
END_DIFFERS = "the template ends this turn with another token than the model"


class Continuation:
    """Continues conversations of one template. `end_ids` end a turn."""

    def __init__(self, template: Template, reader: TurnReader, end_ids: Iterable[int]) -> None:
        self.template, self.reader, self._end_ids = template, reader, frozenset(end_ids)
        self._end_texts = [text for i in self._end_ids if (text := template.control.get(i))]

    def rendered(
        self, messages: Sequence[Message], turn: Message, new_messages: Sequence[Message]
    ) -> tuple[str, int]:
        """The text of a conversation with a turn and what follows, and the position of the token that closes the turn.

        If nothing follows the turn, the text ends with it. If the template then does not close it, the position is the
        end of the text.

        Raises:
            InputError: the template refuses these messages, or does not close the turn with an end token.
        """
        *earlier, last = _with_turn(messages, turn)
        render = self.template.text if new_messages else self.template.finished
        text, changed = (render([*earlier, end, *new_messages]) for end in (last, _with_other_end(last)))
        # The common end of both texts begins inside the turn, or at the token that closes it.
        common_end = len(text) - shared_start(text[::-1], changed[::-1])
        positions = [position for end in self._end_texts if (position := text.find(end, common_end)) >= 0]
        if not positions and not new_messages:
            return text, len(text)
        if not positions:
            raise InputError(
                "the chat template does not close an assistant turn with an end token before the next message: "
                "name the token that ends a turn in the model's generation config (eos_token_id), or use "
                "another template"
            )
        return text, min(positions)

    def next(
        self, messages: Sequence[Message], context_ids: Ids, turn_ids: Ids, new_messages: Sequence[Message]
    ) -> Insert | Branch:
        """What follows a sampled turn. See `Extension.next`."""
        turn = self.reader.read(turn_ids)
        before = self.template.text(messages)
        text, turn_end = self.rendered(messages, turn.message, new_messages)
        pictures = pictures_in([*messages, *new_messages])
        if not text.startswith(before):
            return Branch(self.template.ids(text, pictures), EARLIER_DIFFERS)
        if not self._renders_turn(text[len(before) : turn_end], turn):
            return Branch(self.template.ids(text, pictures), TURN_DIFFERS)
        suffix = self.template.ids(text[turn_end:], pictures_in(new_messages))
        closed = _overlap(turn_ids, suffix)
        if closed or not len(turn_ids) or int(turn_ids[-1]) not in self._end_ids:
            return Insert(suffix[closed:])
        return Branch(joined([context_ids, turn_ids[:-1], suffix]), END_DIFFERS)

    def check(
        self,
        messages: Sequence[Message],
        turn: Message,
        new_messages: Sequence[Message],
        own_ids: Ids,
        ids: Ids,
        end: int,
    ) -> None:
        """See `Extension.check`. The first `end` of `own_ids` are the ids before the turn."""
        text = self.template.text([*_with_turn(messages, turn), *new_messages])
        whole = self.template.ids(text, pictures_in([*messages, *new_messages]))
        if np.array_equal(ids, whole):
            return
        # A branch may leave out the sampled end token, and no other, if the template ends the turn differently.
        shortest = len(own_ids) - (len(own_ids) > end and int(own_ids[-1]) in self._end_ids)
        for length in range(len(own_ids), shortest - 1, -1):
            sampled, inserted = own_ids[end:length], ids[length:]
            if np.array_equal(ids[:length], own_ids[:length]) and self._ends_whole(sampled, inserted, whole):
                return
        if not np.array_equal(ids[:shortest], own_ids[:shortest]):
            raise ProofError(
                "turns",
                "the ids before the next turn do not begin with the ids before the last turn and the ids that "
                "were sampled in it",
                "sampled turns were decoded and encoded again, or belong to another rollout",
                "this is a defect of Lockstep: report it with this message",
            )
        found, wanted = ids[len(own_ids) :], whole[-len(ids[len(own_ids) :]) :]
        found_text, wanted_text = (self.template.tokenizer.decode(part.tolist()) for part in (found, wanted))
        raise ProofError(
            "template",
            f"the ids after a turn are {found_text!r:.200}, and the chat template ends this conversation with "
            f"{wanted_text!r:.200}",
            "the token that closes the turn is missing or doubled, or the inserted messages are those of "
            "another rollout",
            "this is a defect of Lockstep: report it with this message and the name of the model",
        )

    def _ends_whole(self, turn: Ids, inserted: Ids, whole: Ids) -> bool:
        """Whether the whole conversation ends, from the closing token on, with the sampled and the inserted ids."""
        for sampled in range(len(turn) + 1):
            tail = joined([turn[len(turn) - sampled :], inserted])
            closes = len(tail) and int(tail[0]) in self._end_ids
            if not closes or not np.array_equal(whole[-len(tail) :], tail):
                continue
            before = turn[len(turn) - sampled - 1 : len(turn) - sampled]
            # An end token before the one that closes the turn would close it twice.
            return not len(before) or int(before[0]) not in self._end_ids
        return False

    def _renders_turn(self, text: str, turn: ParsedTurn) -> bool:
        return self.reader.read(self.template.ids(text)).shown == turn.shown


def closing_tokens(template: Template) -> set[int]:
    """The control tokens that the template writes after a made-up turn, before a message of the user or of a tool."""
    said = "said wombat"
    messages = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": said}]
    found = set()
    for role in ("user", "tool"):
        try:
            text = template.text([*messages, {"role": role, "content": "next"}])
        except InputError:
            continue
        end = text.find(said) + len(said)
        after = template.control_pattern.search(text, end)
        if after is not None and not text[end : after.start()].strip():
            found |= {i for i, token in template.control.items() if token == after[0]}
    return found


def _overlap(turn: Ids, suffix: Ids) -> int:
    """How many ids at the start of a suffix the model has already sampled at the end of a turn, to close it."""
    turn_end = turn[len(turn) - min(len(turn), len(suffix)) :]
    lengths = (len(turn_end) - np.flatnonzero(turn_end == suffix[0])).tolist()
    return next((n for n in lengths if np.array_equal(turn_end[len(turn_end) - n :], suffix[:n])), 0)


def _with_turn(messages: Sequence[Message], turn: Message) -> list[Message]:
    """The conversation with a turn at its end, joined with the last message if that is the assistant's."""
    if not messages or messages[-1]["role"] != "assistant":
        return [*messages, turn]
    last = messages[-1]
    return [*messages[:-1], {**last, **turn, "content": (last.get("content") or "") + turn["content"]}]


def _with_other_end(message: Message) -> Message:
    """The message with another end: its last call gets other arguments, or its content gets more text."""
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        other = '{"other": "end"}' if isinstance(function["arguments"], str) else {"other": "end"}
        last = {**calls[-1], "function": {**function, "arguments": other}}
        return {**message, "tool_calls": [*calls[:-1], last]}
    return {**message, "content": (message.get("content") or "") + "other end"}


EXTENDS, BRANCHES, REFUSED = "extends", "branches", "refused"
CALLS = (
    "call, result",
    "text and call, result",
    "two calls, results",
    "thinking and call, result",
    "answer, result",
)
USER_TURN = "answer, user"
CASES = (USER_TURN, "thinking, user", *CALLS)
_WORDS = ("tell me", "é", "日本", "🙂", "a  b", "12 + 34", "<b>", "{}", "I'm", "\u00a0x")
_PIECES = (*_WORDS, " ", "\n", ".\n\n", "\t")
_DRAWS = 6


def proven_cases(continuation: Continuation) -> dict[str, str]:
    """The outcome of each case that the template supports: "extends", "branches: reason" or "refused: reason"."""
    conventions = continuation.reader.conventions
    return {case: _outcome(continuation, case) for case in CASES if _applies(conventions, case)}


def _applies(conventions: Conventions, case: str) -> bool:
    if "thinking" in case and conventions.thinking_field is None:
        return False
    if "call" in case:
        return conventions.shows_calls
    return case != "answer, result" or not conventions.shows_calls


def _outcome(continuation: Continuation, case: str) -> str:
    if "two calls" in case and continuation.reader.conventions.max_calls == 1:
        return f"{REFUSED}: the template shows one tool call per turn"
    try:
        outcomes = [_proven(continuation, "thinking" in case, *drawn) for drawn in drawn(continuation, case)]
    except InputError as error:
        return f"{REFUSED}: {error}"
    return next((outcome for outcome in outcomes if outcome != EXTENDS), EXTENDS)


def drawn(continuation: Continuation, case: str) -> Iterator[tuple[list[Message], Message, list[Message]]]:
    """Random conversations of a case: the messages before a turn, the turn, and the messages that follow it."""
    conventions, draw = continuation.reader.conventions, random.Random(case)
    for _ in range(_DRAWS):
        texts = ("".join(draw.choices(_PIECES, k=draw.randint(0, 6))) for _ in range(4))
        question, answer, thought, result = texts
        arguments = [{"city": f"P{n} é日本", "count": n} for n in range(1 + ("two" in case))]
        calls = [made_up_call(conventions, "look_up", given, n) for n, given in enumerate(arguments)]
        last: Message = {"role": "assistant", "content": f"w{answer}n"}
        if conventions.thinking_field is not None and ("thinking" in case or conventions.thinks_first):
            last[conventions.thinking_field] = f"n{thought}t"
        if "call" in case:
            last["content"] = last["content"] if "text" in case else ""
            last["tool_calls"] = [tool_call_field(conventions, call) for call in calls]
        follow = [{"role": "user", "content": result}]
        if "result" in case:
            follow = [continuation.reader.result(call, result) for call in calls]
        yield [{"role": "user", "content": f"q{question}"}], last, follow


def _proven(
    continuation: Continuation, thinks: bool, asked: list[Message], last: Message, follow: Sequence[Message]
) -> str:
    """The outcome of one conversation; an `InputError` if the ids are not those of the template, or it refuses."""
    template = continuation.template
    before = template.text(asked)
    text, at = continuation.rendered(asked, last, follow)
    # A template may hide the thinking of earlier turns. A model samples the turn as it is shown while it is the last.
    own, end = continuation.rendered(asked, last, ()) if thinks else (text, at)
    if not own.startswith(before):
        return f"{BRANCHES}: {EARLIER_DIFFERS}"
    context, whole, suffix = template.ids(before), template.ids(text), template.ids(text[at:])
    cut = len(whole) - len(suffix)
    if not np.array_equal(whole[cut:], suffix):
        what = "the end of a conversation differently alone than within the conversation"
        raise InputError(f"the tokenizer encodes {what}")
    # The tokenizer may join the end of the prompt with the start of the turn. Then only the texts can be compared.
    joins = not np.array_equal(whole[: len(context)], context) or own[:end] != text[:at]
    turn = template.ids(own[len(before) : end]) if joins else whole[len(context) : cut]

    def is_whole(sampled: Ids, step: Insert | Branch) -> bool:
        ids = step.ids if isinstance(step, Branch) else joined([context, sampled, step.ids])
        if joins:
            return template.tokenizer.decode(ids) == template.tokenizer.decode(whole)
        return np.array_equal(ids, whole)

    steps = []
    for sampled in (turn, joined([turn, suffix[:1]])):
        step = continuation.next(asked, context, sampled, follow)
        if not is_whole(sampled, step):
            raise InputError(
                "the sampled and the inserted ids together are not the template's rendering of the whole conversation"
            )
        steps.append(step)
    _check_calls(continuation, turn, last)
    return next((f"{BRANCHES}: {step.reason}" for step in steps if isinstance(step, Branch)), EXTENDS)


def _check_calls(continuation: Continuation, turn: Ids, last: Message) -> None:
    if not last.get("tool_calls") or not continuation.reader.reads_calls:
        return
    read = continuation.reader.read(turn).message
    calls, found = (
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        for message in (last, read)
    )
    if calls != found:
        raise InputError(f"the calls {calls} are read as {found}: name another format with tool_format")
    if read["content"].split() != last["content"].split():
        raise InputError("the template does not show the text of a turn before its tool calls")


__all__ = ["Branch", "Extension", "Insert", "Message", "ParsedTurn", "Tool", "ToolCall"]

Tool = dict[str, Any] | Callable[..., Any]


class Extension:
    """Extends conversations of one tokenizer, chat template and set of tools.

    Args:
        tokenizer: the tokenizer, with the chat template with which the trained model will be used.
        end_ids: ids that end a turn (`tokens/chat.py`).
        chat_template_kwargs: further arguments of the template.
        tools: functions with type hints and docstring, or JSON schemas in OpenAI's form.
        tool_format: the format of the tool calls (`tokens/tool_calls.py`). None: the one in which the template renders
            them.
        placeholder: the id of the template's text for a picture; None: no message shows pictures.

    Attributes:
        conventions: how the template renders an assistant turn.
        reads_calls: whether tool calls are read.
        continuation: makes the ids between an ended turn and the next one.
        cases: what happens in each proven case: "extends", "branches: reason" or "refused: reason".

    Raises:
        InputError: conversations of this template cannot be extended. The message says why and what to do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_format: str | None = None,
        placeholder: int | None = None,
    ) -> None:
        schemas = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools or ()]
        self._template = Template(tokenizer, end_ids, chat_template_kwargs, schemas, placeholder)
        ends = sorted({*end_ids, *closing_tokens(self._template)})
        self._reader = TurnReader(self._template, ends, schemas_of(schemas), tool_format)
        self.continuation = Continuation(self._template, self._reader, ends)
        self.conventions, self.reads_calls = self._reader.conventions, self._reader.reads_calls
        if tools and not self.reads_calls:
            raise InputError(
                "the chat template renders tool calls in no format that can be read here: name the format "
                "with tool_format, or give the model a template with a known one"
            )
        self.cases = proven_cases(self.continuation)
        refused = {case: why for case, why in self.cases.items() if why.startswith(REFUSED)}
        needed = next((case for case in self.cases if (case in CALLS) == bool(tools)), "")
        if needed in refused:
            raise InputError(f"this chat template cannot be extended in ids ({needed}): {refused[needed]}")

    def prompt(self, messages: Sequence[Message]) -> Ids:
        """Ids (N,) of a conversation, with the opening of the next assistant turn.

        Raises:
            InputError: the template refuses these messages.
        """
        return self._template.ids(self._template.text(messages), pictures_in(messages))

    def read(self, turn_ids: Ids, *, calls_are_text: bool = False) -> ParsedTurn:
        """A sampled turn (N,) as a message, with its tool calls. No sampled ids raise an error.

        With `calls_are_text`, tool calls stay in the content as text.
        """
        return self._reader.read(turn_ids, calls_are_text=calls_are_text)

    def result(self, call: ToolCall, content: Content) -> Message:
        """The message that gives the model the result of a call."""
        return self._reader.result(call, content)

    def error(self, text: str) -> Message:
        """The message that answers a turn with only malformed calls."""
        return {"role": self.conventions.error_role, "content": text}

    def why_no_pictures(self, picture: HasPictureIds) -> str | None:
        """Why messages after a turn (tool results, user messages) cannot show such a picture; None: they can."""
        messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "now"}]
        content, call = [picture_part(picture)], ToolCall("look", {}, "123456789")
        for shown in (self.result(call, content), {"role": "user", "content": content}):
            try:
                self.prompt([*messages, shown])
            except InputError as error:
                return f"the chat template shows no images in messages of the role {shown['role']!r}: {error}"
        return None

    def next(
        self, messages: Sequence[Message], context_ids: Ids, turn_ids: Ids, new_messages: Sequence[Message]
    ) -> Insert | Branch:
        """What follows a sampled turn: the new messages and the opening of the next assistant turn.

        Args:
            messages: the conversation before the turn. If its last message is the assistant's, the turn continues
                that message.
            context_ids: (C,) the ids before the turn.
            turn_ids: (N,) ids of the turn, with the token that ended it if the engine sampled one.
            new_messages: results of tools, or the next message of the user.

        Raises:
            InputError: the template refuses these messages, or does not close a turn before them.
        """
        return self.continuation.next(messages, context_ids, turn_ids, new_messages)

    def check(
        self,
        messages: Sequence[Message],
        context_ids: Ids,
        turn_ids: Ids,
        new_messages: Sequence[Message],
        ids: Ids,
    ) -> None:
        """Check the ids before the next turn: the template's rendering of the conversation must end with the same ids.

        Args:
            messages, context_ids, turn_ids, new_messages: as in `next`.
            ids: (I,) all ids before the next turn, as they are in the rollout.

        Raises:
            ProofError: the token that closes the turn is missing or doubled, or the inserted ids are not the new
                messages.
        """
        turn = self._reader.read(turn_ids).message
        own = joined([context_ids, turn_ids])
        self.continuation.check(messages, turn, new_messages, own, ids, len(context_ids))
