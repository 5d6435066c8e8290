"""Uses the library `renderers` for a model family: it makes the ids between two turns, and reads the tool calls of a sampled turn.

A user names the family (`renderer`). Then a `FamilyRenderer` gives the ids between turns, and the calls. The chat
template is still used: it decides whether a turn is extended, and the proofs compare all ids with its rendering. The
library is an optional package; this module is the only one that imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids, joined, whole_numbers
from lockstep.tokens.chat import Message
from lockstep.tokens.conversation.tool_formats import ToolCall

AUTO = "auto"
INSTALL = (
    "renderer needs the package renderers: pip install 'lockstep-rl[renderers]' (beside vLLM: pip install --no-deps "
    "renderers==0.1.12 prime-pydantic-config==0.4.3), or leave renderer out"
)
# The errors that the library raises for ids or messages that it does not expect. It has no error class of its own.
_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, RuntimeError)


class RendererDiffers(InputError):
    """The renderer of a family and the chat template make different ids."""


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """The tool calls of a sampled turn.

    Attributes:
        content: the text outside the thinking and the well-formed calls.
        reasoning: the thinking; None if there is none.
        calls: the well-formed calls, in order.
        errors: one text per malformed call, written for the model.
        outside: (N,) whether an id belongs to no well-formed call.
    """

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    outside: np.ndarray[Any, np.dtype[np.bool_]]


class FamilyRenderer:
    """The renderer of one model family, on a user's tokenizer.

    Args:
        family: a name that `renderers` knows, or "auto": the family that `renderers` finds by the tokenizer's name.
        tokenizer: the tokenizer of the run.
        kwargs: further arguments of the chat template.
        tools: JSON schemas in OpenAI's form.

    Attributes:
        family: the name of the family.

    Raises:
        InputError: the package is not installed, there is no such family, or it does not fit the tokenizer or the arguments.
    """

    def __init__(
        self,
        family: str,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        try:
            from renderers.base import MODEL_RENDERER_MAP, create_renderer
            from renderers.configs import config_from_name
        except ImportError as error:
            raise InputError(f"{INSTALL} ({error})") from error
        known = sorted(set(MODEL_RENDERER_MAP.values()))
        if family == AUTO:
            # For a name that it does not know, the library would ask a hub, and then use a renderer of no family.
            family = MODEL_RENDERER_MAP.get(tokenizer.name_or_path, "")
            if not family:
                raise InputError(
                    f"renderers knows no family for the tokenizer {tokenizer.name_or_path!r}: name the family with renderer "
                    f"({', '.join(known)}), or leave renderer out"
                )
        if family not in known:
            raise InputError(f"renderers knows no family {family!r}: choose one of {', '.join(known)}, or {AUTO}")
        self.family = family
        self._tools = [tool.get("function", tool) for tool in tools]
        try:
            self._renderer = create_renderer(
                tokenizer, config_from_name(family), chat_template_kwargs=dict(kwargs) if kwargs else None
            )
        except (*_ERRORS, ImportError, OSError) as error:
            raise InputError(
                f"the renderer {family!r} does not fit this tokenizer and chat template: {error}"
            ) from error

    def inserted(self, context_ids: Ids, turn_ids: Ids, new_messages: Sequence[Message]) -> Ids | None:
        """The ids (M,) that the library makes between a turn and the next one; None if it makes none here.

        Args:
            context_ids: (C,) the ids before the turn.
            turn_ids: (N,) the ids of the turn, with the token that ended it.
            new_messages: the messages after the turn, with text as content.

        Raises:
            RendererDiffers: the library changed ids of the context or of the turn.
        """
        own = joined([context_ids, turn_ids])
        try:
            found = self._renderer.bridge_to_next_turn(
                context_ids.tolist(), turn_ids.tolist(), list(new_messages), tools=self._tools or None
            )
        except _ERRORS:
            return None
        if found is None:
            return None
        ids = whole_numbers(found.token_ids)
        if not np.array_equal(ids[: len(own)], own):
            raise RendererDiffers(
                f"the renderer {self.family!r} changes ids before the new messages: leave renderer out"
            )
        return ids[len(own) :]

    def read(self, context_ids: Ids, turn_ids: Ids) -> ReadCalls | None:
        """The calls of a turn (N,) without its end token. None if the library cannot read the ids.

        Args:
            context_ids: (C,) ids before a turn. They show whether the turn begins inside its thinking.
        """
        try:
            found = self._renderer.parse_response(
                turn_ids.tolist(), tools=self._tools or None, prompt_ids=context_ids.tolist()
            )
        except _ERRORS:
            return None
        outside = np.ones(len(turn_ids), np.bool_)
        calls, errors, raw = [], [], []
        for call in found.tool_calls:
            if call.name and isinstance(call.arguments, dict):
                calls.append(ToolCall(call.name, call.arguments, call.id))
                if call.token_span is not None:
                    outside[slice(*call.token_span)] = False
            else:
                raw.append(call.raw)
                errors.append(f"is not well-formed ({call.status.value.replace('_', ' ')}): {call.raw!r:.80}")
        content = "".join([found.content, *raw])
        return ReadCalls(content, found.reasoning_content, tuple(calls), tuple(errors), outside)
