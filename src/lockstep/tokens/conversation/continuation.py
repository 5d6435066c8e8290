"""Makes the ids between a sampled turn and the next one, from the template's rendering of the whole conversation.

A proof at start shows that the ids are right.

Proof `template`.
Shows: what was inserted after a turn is what the chat template renders for this conversation, from the token that
closes the turn on.
Does not show: turns of other rollouts than the drawn ones.
When: every insertion in one rollout in four, drawn by its seed; the template renders the conversation once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.chat import Message, Template, shared_start
from lockstep.tokens.conversation.turns import ParsedTurn, TurnReader
from lockstep.tokens.picture_ids import pictures_in


@dataclass(frozen=True, slots=True)
class Insert:
    """The rollout goes on after its own ids.

    Attributes:
        ids: (N,) ids to insert after the sampled turn; they were not sampled.
    """

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
    """Continues conversations of one template.

    Args:
        template: the deployed template.
        reader: reads sampled turns.
        end_ids: ids that end a turn.
    """

    def __init__(self, template: Template, reader: TurnReader, end_ids: Iterable[int]) -> None:
        self.template, self.reader, self._end_ids = template, reader, frozenset(end_ids)
        self._end_texts = [text for i in self._end_ids if (text := template.control.get(i))]

    def rendered(self, messages: Sequence[Message], turn: Message, new_messages: Sequence[Message]) -> tuple[str, int]:
        """The text of a conversation with a turn and the messages after it, and the position of the token that closes the turn.

        If there are no messages after the turn, the text ends with the turn. If the template then does not close the turn, the
        position is the end of the text.

        Raises:
            InputError: the template refuses these messages, or does not close the turn with an end token.
        """
        *earlier, last = _with_turn(messages, turn)
        render = self.template.text if new_messages else self.template.finished
        text, changed = (render([*earlier, message, *new_messages]) for message in (last, _with_other_end(last)))
        # The common end of both texts begins inside the turn, or at the token that closes it.
        common_end = len(text) - shared_start(text[::-1], changed[::-1])
        positions = [position for end in self._end_texts if (position := text.find(end, common_end)) >= 0]
        if not positions and not new_messages:
            return text, len(text)
        if not positions:
            raise InputError(
                "the chat template does not close an assistant turn with an end token before the next message: name the token "
                "that ends a turn in the model's generation config (eos_token_id), or use another template"
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
        # A branch may leave out the sampled end token if the template ends the turn with another token. It keeps all other tokens.
        shortest = len(own_ids) - (len(own_ids) > end and int(own_ids[-1]) in self._end_ids)
        for length in range(len(own_ids), shortest - 1, -1):
            sampled, inserted = own_ids[end:length], ids[length:]
            if np.array_equal(ids[:length], own_ids[:length]) and self._ends_whole(sampled, inserted, whole):
                return
        if not np.array_equal(ids[:shortest], own_ids[:shortest]):
            raise ProofError(
                "turns",
                "the ids before the next turn do not begin with the ids before the last turn and the ids that were sampled in it",
                "sampled turns were decoded and encoded again, or belong to another rollout",
                "this is a defect of Lockstep: report it with this message",
            )
        found, wanted = ids[len(own_ids) :], whole[-len(ids[len(own_ids) :]) :]
        found_text, wanted_text = (self.template.tokenizer.decode(part.tolist()) for part in (found, wanted))
        raise ProofError(
            "template",
            f"the ids after a turn are {found_text!r:.200}, and the chat template ends this conversation with {wanted_text!r:.200}",
            "the token that closes the turn is missing or doubled, or the inserted messages are those of another rollout",
            "this is a defect of Lockstep: report it with this message and the name of the model",
        )

    def _ends_whole(self, turn: Ids, inserted: Ids, whole: Ids) -> bool:
        """Whether the whole conversation, from the token that closes the turn, ends with the sampled and the inserted ids."""
        for sampled in range(len(turn) + 1):
            tail = joined([turn[len(turn) - sampled :], inserted])
            if not len(tail) or int(tail[0]) not in self._end_ids or not np.array_equal(whole[-len(tail) :], tail):
                continue
            before = turn[len(turn) - sampled - 1 : len(turn) - sampled]
            # An end token before the one that closes the turn would close it twice.
            return not len(before) or int(before[0]) not in self._end_ids
        return False

    def _renders_turn(self, text: str, turn: ParsedTurn) -> bool:
        return self.reader.read(self.template.ids(text)).shown == turn.shown


def closing_tokens(template: Template) -> set[int]:
    """The control tokens that the template writes after a made-up turn, before a message of the user or of a tool."""
    messages: list[Message] = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "said wombat"}]
    found = set()
    for role in ("user", "tool"):
        try:
            text = template.text([*messages, {"role": role, "content": "next"}])
        except InputError:
            continue
        end = text.find("said wombat") + len("said wombat")
        after = template.control_pattern.search(text, end)
        if after is not None and not text[end : after.start()].strip():
            found |= {i for i, token in template.control.items() if token == after[0]}
    return found


def _overlap(turn: Ids, suffix: Ids) -> int:
    """How many ids at the start of a suffix are already at the end of a turn, because the model has sampled them to close it."""
    turn_end = turn[len(turn) - min(len(turn), len(suffix)) :]
    lengths = (len(turn_end) - np.flatnonzero(turn_end == suffix[0])).tolist()
    return next((n for n in lengths if np.array_equal(turn_end[len(turn_end) - n :], suffix[:n])), 0)


def _with_turn(messages: Sequence[Message], turn: Message) -> list[Message]:
    """The conversation with a turn at its end. If its last message is the assistant's, the turn is joined with this message."""
    if not messages or messages[-1]["role"] != "assistant":
        return [*messages, turn]
    last = messages[-1]
    return [*messages[:-1], {**last, **turn, "content": (last.get("content") or "") + turn["content"]}]


def _with_other_end(message: Message) -> Message:
    """The message with another end: its last call gets other arguments, or its content gets more text."""
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        text = isinstance(function["arguments"], str)
        other = {**calls[-1], "function": {**function, "arguments": '{"other": "end"}' if text else {"other": "end"}}}
        return {**message, "tool_calls": [*calls[:-1], other]}
    return {**message, "content": (message.get("content") or "") + "other end"}
