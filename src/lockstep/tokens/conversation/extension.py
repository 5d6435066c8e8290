"""Extends a conversation in ids: reads a sampled turn, and makes the ids between this turn and the next one.

A rollout calls `Extension.next` with the ids that the engine sampled and the messages that follow. The result is an `Insert` or a
`Branch`. An `Insert` has the ids that come after the sampled ones: the end of the template's rendering of the whole conversation,
from the token that closes the sampled turn. A `Branch` has the ids of another prompt, because the template renders the earlier
turns differently from now on. The ids of a sampled turn are never made from text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.chat import Content, Message, Template
from lockstep.tokens.conversation.continuation import Branch, Continuation, Insert, closing_tokens
from lockstep.tokens.conversation.extension_proof import CALLS, REFUSED, proven_cases
from lockstep.tokens.conversation.tool_calls import schemas_of
from lockstep.tokens.conversation.tool_formats import ToolCall
from lockstep.tokens.conversation.turns import ParsedTurn, TurnReader
from lockstep.tokens.picture_ids import HasPictureIds, picture_part, pictures_in

__all__ = ["Branch", "Extension", "Insert", "Message", "ParsedTurn", "Tool", "ToolCall"]

Tool = dict[str, Any] | Callable[..., Any]


class Extension:
    """Extends conversations of one tokenizer, chat template and set of tools.

    Args:
        tokenizer: the tokenizer, with the chat template with which the trained model will be used.
        end_ids: ids that end a turn (`tokens/end.py`).
        chat_template_kwargs: further arguments of the template.
        tools: functions with type hints and docstring, or JSON schemas in OpenAI's form.
        tool_format: the format of the tool calls (`tokens/conversation/tool_formats.py`). None: the format in which the template
            renders them.
        placeholder: the id of the template's text for a picture; None: no message shows pictures. A message contains a picture as
            one part of its content (`tokens/picture_ids.py`).

    Attributes:
        conventions: how the template renders an assistant turn.
        reads_calls: whether tool calls are read.
        continuation: makes the ids between an ended turn and the next one.
        cases: what happens in each proven case (`tokens/conversation/extension_proof.py`): "extends", "branches: reason" or
            "refused: reason".

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
                "the chat template renders tool calls in no format that can be read here: name the format with tool_format, or "
                "give the model a template with a known one"
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

        Args:
            calls_are_text: whether tool calls stay in the content as text instead of being read.
        """
        return self._reader.read(turn_ids, calls_are_text=calls_are_text)

    def result(self, call: ToolCall, content: Content) -> Message:
        """The message that gives the model the result of a call."""
        return self._reader.result(call, content)

    def error(self, text: str) -> Message:
        """The message that answers a turn with only malformed calls."""
        return {"role": self.conventions.error_role, "content": text}

    def why_no_pictures(self, picture: HasPictureIds) -> str | None:
        """The reason why messages after a turn (tool results, user messages) cannot show pictures; None: they can.

        Args:
            picture: any picture that was processed for the model.
        """
        messages: list[Message] = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "now"}]
        call = ToolCall("look", {}, "123456789")
        for shown in (self.result(call, [picture_part(picture)]), {"role": "user", "content": [picture_part(picture)]}):
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
            messages: the conversation before the turn. If its last message is the assistant's, the turn continues that message.
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
        """Check the ids before the next turn. The template renders the conversation again, and its end must have the same ids.

        Args:
            messages, context_ids, turn_ids, new_messages: as in `next`.
            ids: (I,) all ids before the next turn, as they are in the rollout.

        Raises:
            ProofError: the token that closes the turn is missing or doubled, or the inserted ids are not the new messages.
        """
        turn = self._reader.read(turn_ids).message
        own = joined([context_ids, turn_ids])
        self.continuation.check(messages, turn, new_messages, own, ids, len(context_ids))
