"""Turns a dataset's prompt (text or messages) into token ids. No other module does this.

The prompt comes from the `prompt` column, and the ids go into requests to an engine. An engine's answer is never tokenized again.
Messages are rendered as in later turns (`tokens/conversation/template.py`): text in a message that looks like a control token stays
text. A prompt of plain text is encoded without changes: text of control tokens becomes control tokens, as in TRL.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.tokens.conversation.template import Message, Template
from lockstep.tokens.picture_ids import pictures_in

__all__ = ["Message", "is_conversational", "render_prompt", "template_of", "with_joined_text"]


def is_conversational(prompt: str | list[Message]) -> bool:
    """Whether a prompt is a list of messages (`role`, `content`). Otherwise it is plain text."""
    return isinstance(prompt, list)


def template_of(
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    placeholder: int | None = None,
) -> Template | None:
    """The template that renders first prompts; None if the tokenizer has no template. `placeholder` as in `Template`."""
    if tokenizer.chat_template is None:
        return None
    return Template(tokenizer, [tokenizer.eos_token_id], chat_template_kwargs, placeholder=placeholder)


def with_joined_text(prompt: Any) -> Any:
    """A prompt in which each content that is a list of text parts (`{"type": "text", "text": …}`) has become one text.

    The parts of a message are joined without a separator, as templates for images and text do. All other contents stay unchanged.

    Keys whose value is None are left out, apart from a message's `content`. Arrow gives every message, call and part the keys of
    all others, with None where a row has none; templates ask whether a key is there.
    """
    if not isinstance(prompt, list):
        return prompt
    messages = [_written_message(m) if isinstance(m, dict) else m for m in prompt]
    return [
        {**m, "content": "".join(part["text"] for part in m["content"])}
        if isinstance(m, dict) and _is_text_parts(m.get("content"))
        else m
        for m in messages
    ]


def _written_message(message: Message) -> Message:
    return {name: _written(value) for name, value in message.items() if value is not None or name == "content"}


def _written(value: Any) -> Any:
    """A value without the keys that are None, at any depth."""
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        # The other ones are files of pictures.
        return {name: _written(entry) for name, entry in value.items() if entry is not None}
    return [_written(entry) for entry in value] if isinstance(value, list) else value


def _is_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def render_prompt(
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    template: Template | None = None,
    *,
    images: bool = False,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Token ids of one prompt.

    Plain text is encoded with the tokenizer's special tokens, unless `add_special_tokens` is off. Messages are rendered by the chat
    template, with the generation prompt. If the last message is the assistant's, there is no generation prompt: the model continues
    this message, as in TRL.

    Args:
        template: the result of `template_of`, so that many prompts share it; None: it is made for this prompt.
        images: whether contents may be lists of parts, as `images/reading.py` makes them.

    Raises:
        InputError: the prompt is empty, is of another type, contains more than text, or has messages and there is no chat
            template.
    """
    prompt = with_joined_text(prompt)
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])
    elif is_conversational(prompt) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        if any(not isinstance(m.get("content"), str | list | None if images else str | None) for m in prompt):
            raise InputError(
                "a message's content must be text or a list of text parts; images need a model that reads them, and other parts "
                "are not supported yet"
            )
        if any(not isinstance(m["role"], str) for m in prompt):
            raise InputError("a message's role must be text")
        if any(m.get("content") is None and m["role"] in ("system", "user") for m in prompt):
            raise InputError("a message of the system or the user has no content")
        template = template if template is not None else template_of(tokenizer, chat_template_kwargs)
        if template is None:
            raise InputError("prompts are messages but the tokenizer has no chat template; give prompts as text")
        ids = template.ids(template.text(prompt), pictures_in(prompt)).tolist()
    else:
        raise InputError(f"a prompt must be text or a non-empty list of messages with a role, got {prompt!r:.200}")
    if not ids:
        raise InputError(f"a prompt has no tokens: {prompt!r:.200}")
    return tuple(ids)
