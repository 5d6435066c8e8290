"""Makes the ids between a sampled turn and the next one, from the template's rendering of the whole conversation.

`tokens/conversation/extension.py` is the public side of this module. `tokens/conversation/extension_proof.py` proves at start that
the ids are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.conversation.family_renderer import FamilyRenderer
from lockstep.tokens.conversation.template import Message, Template, shared_start
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


EARLIER = "the template shows the earlier messages differently when new messages follow"
TURN = "the template shows the sampled turn differently when new messages follow"
END = "the template ends this turn with another token than the model"


class Continuation:
    """Continues conversations of one template.

    Args:
        template: the deployed template.
        reader: reads sampled turns.
        end_ids: ids that end a turn.
        renderer: makes the inserted ids after a turn that the model has ended; None: the template makes all of them.
    """

    def __init__(
        self, template: Template, reader: TurnReader, end_ids: Iterable[int], renderer: FamilyRenderer | None = None
    ) -> None:
        self.template, self.reader, self._end_ids = template, reader, frozenset(end_ids)
        self.renderer = renderer
        self._end_texts = [text for i in self._end_ids if (text := template.control.get(i))]

    def rendered(self, messages: Sequence[Message], turn: Message, new_messages: Sequence[Message]) -> tuple[str, int]:
        """The text of a conversation with a turn and the messages after it, and the position of the token that closes the turn.

        If there are no messages after the turn, the text ends with the turn. If the template then does not close the turn, the
        position is the end of the text.

        Raises:
            InputError: the template refuses these messages, or does not close the turn with an end token.
        """
        *said, last = _continued(messages, turn)
        render = self.template.text if new_messages else self.template.finished
        text, changed = (render([*said, message, *new_messages]) for message in (last, _changed(last)))
        # The common end of both texts begins inside the turn, or at the token that closes it.
        start = len(text) - shared_start(text[::-1], changed[::-1])
        places = [place for end in self._end_texts if (place := text.find(end, start)) >= 0]
        if not places and not new_messages:
            return text, len(text)
        if not places:
            raise InputError(
                "the chat template does not close an assistant turn with an end token before the next message: name the token "
                "that ends a turn in the model's generation config (eos_token_id), or use another template"
            )
        return text, min(places)

    def next(
        self, messages: Sequence[Message], context_ids: Ids, turn_ids: Ids, new_messages: Sequence[Message]
    ) -> Insert | Branch:
        """What follows a sampled turn. See `Extension.next`."""
        found = self.by_template(messages, context_ids, turn_ids, new_messages)
        if isinstance(found, Branch) or self.renderer is None or not self._takes_renderer(turn_ids, new_messages):
            return found
        ids = self.renderer.inserted(context_ids, turn_ids, new_messages)
        return found if ids is None else Insert(ids)

    def _takes_renderer(self, turn_ids: Ids, new_messages: Sequence[Message]) -> bool:
        """Whether the renderer makes these ids.

        It does so only for an ended turn, because it would close a turn that was cut in another way than the template. And it does
        so only if no text looks like a control token, because it would turn such text into control tokens.
        """
        ended = len(turn_ids) > 0 and int(turn_ids[-1]) in self._end_ids
        are_texts = all(isinstance(message.get("content"), str) for message in new_messages)
        return ended and are_texts and not self.template.is_guarded(new_messages)

    def by_template(
        self, messages: Sequence[Message], context_ids: Ids, turn_ids: Ids, new_messages: Sequence[Message]
    ) -> Insert | Branch:
        """What follows a sampled turn, made by the template without a renderer."""
        turn = self.reader.read(turn_ids)
        before = self.template.text(messages)
        text, at = self.rendered(messages, turn.message, new_messages)
        shown = pictures_in([*messages, *new_messages])
        if not text.startswith(before):
            return Branch(self.template.ids(text, shown), EARLIER)
        if not self._shows(text[len(before) : at], turn):
            return Branch(self.template.ids(text, shown), TURN)
        suffix = self.template.ids(text[at:], pictures_in(new_messages))
        closed = _overlap(turn_ids, suffix)
        if closed or not len(turn_ids) or int(turn_ids[-1]) not in self._end_ids:
            return Insert(suffix[closed:])
        return Branch(joined([context_ids, turn_ids[:-1], suffix]), END)

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
        text = self.template.text([*_continued(messages, turn), *new_messages])
        whole = self.template.ids(text, pictures_in([*messages, *new_messages]))
        if np.array_equal(ids, whole):
            return
        # A branch may leave out the sampled end token if the template ends the turn with another token. It keeps all other tokens.
        least = len(own_ids) - (len(own_ids) > end and int(own_ids[-1]) in self._end_ids)
        for kept in range(len(own_ids), least - 1, -1):
            said, inserted = own_ids[end:kept], ids[kept:]
            if np.array_equal(ids[:kept], own_ids[:kept]) and self._continues(said, inserted, whole):
                return
        if not np.array_equal(ids[:least], own_ids[:least]):
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
            "what closes the turn is missing or doubled, or the inserted messages are those of another rollout",
            "this is a defect of Lockstep: report it with this message and the name of the model"
            if self.renderer is None
            else f"leave renderer={self.renderer.family!r} out: its ids are not those of this chat template",
        )

    def _continues(self, said: Ids, inserted: Ids, whole: Ids) -> bool:
        """Whether the whole conversation, from the token that closes the turn, ends with the sampled and the inserted ids."""
        for sampled in range(len(said) + 1):
            tail = joined([said[len(said) - sampled :], inserted])
            if not len(tail) or int(tail[0]) not in self._end_ids or not np.array_equal(whole[-len(tail) :], tail):
                continue
            before = said[len(said) - sampled - 1 : len(said) - sampled]
            # An end token before the one that closes the turn would close it twice.
            return not len(before) or int(before[0]) not in self._end_ids
        return False

    def _shows(self, text: str, turn: ParsedTurn) -> bool:
        return self.reader.read(self.template.ids(text)).shown == turn.shown


def closings(template: Template) -> set[int]:
    """The control tokens that the template writes after a made-up turn, before a message of the user or of a tool."""
    said: list[Message] = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "said wombat"}]
    found = set()
    for role in ("user", "tool"):
        try:
            text = template.text([*said, {"role": role, "content": "next"}])
        except InputError:
            continue
        behind = text.find("said wombat") + len("said wombat")
        after = template.looks.search(text, behind)
        if after is not None and not text[behind : after.start()].strip():
            found |= {i for i, token in template.control.items() if token == after[0]}
    return found


def _overlap(turn: Ids, suffix: Ids) -> int:
    """How many ids at the start of a suffix are already at the end of a turn, because the model has sampled them to close it."""
    tail = turn[len(turn) - min(len(turn), len(suffix)) :]
    lengths = (len(tail) - np.flatnonzero(tail == suffix[0])).tolist()
    return next((n for n in lengths if np.array_equal(tail[len(tail) - n :], suffix[:n])), 0)


def _continued(messages: Sequence[Message], turn: Message) -> list[Message]:
    """The conversation with a turn at its end. If its last message is the assistant's, the turn is joined with this message."""
    if not messages or messages[-1]["role"] != "assistant":
        return [*messages, turn]
    last = messages[-1]
    return [*messages[:-1], {**last, **turn, "content": (last.get("content") or "") + turn["content"]}]


def _changed(message: Message) -> Message:
    """The message with another end: its last call gets other arguments, or its content gets more text."""
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        text = isinstance(function["arguments"], str)
        other = {**calls[-1], "function": {**function, "arguments": '{"other": "end"}' if text else {"other": "end"}}}
        return {**message, "tool_calls": [*calls[:-1], other]}
    return {**message, "content": (message.get("content") or "") + "other end"}
