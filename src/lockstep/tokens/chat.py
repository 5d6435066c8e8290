"""The only place where a dataset's prompt (text or messages) becomes token ids.

The prompt comes from the `prompt` column, and the ids go into requests to an engine. An engine's answer is never tokenized again.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError

Message = dict[str, Any]


def is_conversational(prompt: str | list[Message]) -> bool:
    """Whether a prompt is a list of messages (`role`, `content`). Otherwise it is plain text."""
    return isinstance(prompt, list)


def render_prompt(
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of one prompt.

    Plain text is encoded with the tokenizer's own special tokens. Messages go through the chat template, with the generation
    prompt. If the last message is the assistant's, the ids continue that message instead (TRL's convention).

    Raises:
        InputError: the prompt is empty, is of another type, contains more than text, or has messages and there is no chat
            template.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    elif is_conversational(prompt) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        if any(not isinstance(m.get("content"), str | None) for m in prompt):
            raise InputError("a message's content must be text; images and other parts are not supported yet")
        if tokenizer.chat_template is None:
            raise InputError("prompts are messages but the tokenizer has no chat template; give prompts as text")
        continues = prompt[-1]["role"] == "assistant"
        try:
            rendered = tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                tokenize=True,
                return_dict=True,
                **(chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        ids = list(rendered["input_ids"])
    else:
        raise InputError(f"a prompt must be text or a non-empty list of messages with a role, got {prompt!r:.200}")
    if not ids:
        raise InputError(f"a prompt has no tokens: {prompt!r:.200}")
    return tuple(ids)
