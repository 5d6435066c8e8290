"""A tiny vision-language model that calls a tool, as `tests/caller.py` makes for text, and tools that give pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from caller import DIGITS, LAST, OPEN, SECOND, TEMPLATE, add_call_tokens, steps_of, teach_steps
from seeing import is_in_tiles, make_seeing, make_seeing_tokenizer, picture, save_processor
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

TOOL = "draw"


def make_seeing_caller_tokenizer(family: str = "qwen2_5_vl") -> PreTrainedTokenizerFast:
    """The tokenizer of a family's tiny model with the tokens of a call of `draw`."""
    image = "<image>" if is_in_tiles(family) else "<|vision_start|><|image_pad|><|vision_end|>"
    parts = (
        "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
        f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        "{% endfor %}{% endif %}{% endmacro %}"
    )
    template = parts + TEMPLATE.replace(
        "{{ message['content'] or '' }}", "{{ shown(message['content']) }}"
    ).replace("{{ message['content'] }}", "{{ shown(message['content']) }}")
    return add_call_tokens(make_seeing_tokenizer(family), template, TOOL)


def make_seeing_caller(family: str = "qwen2_5_vl", calls: float = 0.98) -> PreTrainedModel:
    """The model. What stands before its last token moves its log-probs by a few tenths, pictures too.

    Args:
        calls: about the share of its turns that begin with a call.
    """
    model = make_seeing(family, scale=SCALE)
    # A call has one argument.
    steps = steps_of(TOOL) | {digit: {LAST: 0.75, SECOND: 0.05, "<|end|>": 0.2} for digit in DIGITS}
    steps["<|assistant|>"] = {OPEN: calls, **dict.fromkeys(DIGITS, (1 - calls) / len(DIGITS))}
    teach_steps(model, make_seeing_caller_tokenizer(family), steps)
    return model


SCALE = 0.05


def save_seeing_caller(folder: Path, family: str = "qwen2_5_vl", calls: float = 0.98) -> str:
    """A directory with the model, its tokenizer and its image processor."""
    make_seeing_caller(family, calls).save_pretrained(folder)
    make_seeing_caller_tokenizer(family).save_pretrained(folder)
    return save_processor(folder, family)


def caller_in(folder: str, family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model with its tokenizer, in the directory of another model of the family, whose engine gets its weights."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(make_seeing_caller(family).state_dict())
    return model, make_seeing_caller_tokenizer(family)


def draw(a: int) -> Any:
    """Draws a number.

    Args:
        a: The number.
    """
    if a < 2:
        return picture(a)
    if a < 4:
        return [{"type": "text", "text": "no file "}, {"type": "image", "image": "there is no such file.png"}]
    if a < 6:
        return f"<|image_pad|> <image> {a}"
    return [
        {"type": "text", "text": "one "},
        {"type": "image", "image": picture(a, 16, 16)},
        {"type": "text", "text": " and"},
    ]
