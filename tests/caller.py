"""A tiny model that calls tools: its next token depends on its last token, and a little on everything before.

Its tokenizer has one token for each part of a call, so that a turn is a walk over a few tokens. The model writes
well-formed calls, malformed ones, several calls in a turn, and turns without a call. Both engines compute it like
every other model. Here are also the tool that it calls, `multiply`, and an environment that has this tool, `Product`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from tiny import make_model, make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerFast

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME, SECOND, LAST = '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}\n"
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | '
    "tojson }}}</tool_call>"
    "{% endfor %}<|end|>"
    "{% elif message['role'] == 'tool' %}<|tool|>{{ message['content'] }}<|end|>"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DIGITS = "0123456789"
# Beyond the time limit of a test: a wait that does not end early is seen.
NEVER = 3600.0
# How `transformers` reads a turn of this template. TRL's trainers need it.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": OPEN,
            "close_pattern": CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}
# What may follow a token, with its weight.
STEPS: dict[str, dict[str, float]] = {
    "<|assistant|>": {OPEN: 0.7, **dict.fromkeys(DIGITS, 0.03)},
    OPEN: {NAME: 0.95, CLOSE: 0.05},
    NAME: dict.fromkeys(DIGITS, 0.1),
    SECOND: dict.fromkeys(DIGITS, 0.1),
    LAST: {CLOSE: 0.95, "<|end|>": 0.05},
    CLOSE: {"<|end|>": 0.85, OPEN: 0.15},
    **{digit: {SECOND: 0.45, LAST: 0.4, "<|end|>": 0.15} for digit in DIGITS},
}


def make_caller_tokenizer(template: str = TEMPLATE, tool: str = "multiply") -> PreTrainedTokenizerFast:
    """The tokenizer of `tests/tiny.py` with the tokens of a call of this tool."""
    return add_call_tokens(make_tokenizer(), template, tool)


def add_call_tokens(tokenizer: PreTrainedTokenizerFast, template: str, tool: str) -> PreTrainedTokenizerFast:
    """The tokenizer, with the tokens of a call and a template that shows calls."""
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True)])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in (OPEN, CLOSE, _named(NAME, tool), SECOND, LAST)]
    )
    tokenizer.chat_template, tokenizer.response_template = template, RESPONSE_TEMPLATE
    return tokenizer


def make_caller(tokenizer: PreTrainedTokenizerFast, tool: str = "multiply") -> PreTrainedModel:
    """The model, for this tokenizer and the tool that it calls."""
    return make_walker(tokenizer, steps_of(tool))


def steps_of(tool: str) -> dict[str, dict[str, float]]:
    """`STEPS` with calls of this tool."""
    return {
        _named(text, tool): {_named(after, tool): weight for after, weight in following.items()}
        for text, following in STEPS.items()
    }


def make_walker(
    tokenizer: PreTrainedTokenizerFast, steps: dict[str, dict[str, float]], **more: object
) -> PreTrainedModel:
    """A model whose next token follows from its last one:

    `steps` has the weights. `more` are fields of its config, and `scale`.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 8, "scale": 0.02}
    model = make_model("qwen2", **{**sizes, **more})  # type: ignore[arg-type]
    teach_steps(model, tokenizer, steps)
    return model


def teach_steps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: dict[str, dict[str, float]]
) -> None:
    """Write embeddings and a head into a model, such that its next token follows from its last one."""
    generator = torch.Generator().manual_seed(0)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embeddings.copy_(torch.randn(embeddings.shape, generator=generator))
        # After the last norm, the embedding of the last token has about this length.
        unit = embeddings / embeddings.norm(dim=1, keepdim=True)
        size = embeddings.shape[1] ** 0.5
        places = [id_of(tokenizer, text) for text in steps]
        logits = torch.full((len(steps), len(embeddings)), -6.0, dtype=torch.float64)
        for row, following in enumerate(steps.values()):
            for after, weight in following.items():
                logits[row, id_of(tokenizer, after)] = 4.0 + torch.tensor(weight).log()
        solved = torch.linalg.lstsq(size * unit[places].double(), logits).solution.T
        # Every process makes the very same model.
        head.copy_((solved * 2**12).round() / 2**12)


def id_of(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The id of a text that is one token."""
    (found,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(found)


def _named(text: str, tool: str) -> str:
    return text.replace("multiply", tool)


def save_caller(folder: Path, template: str = TEMPLATE, tool: str = "multiply") -> str:
    """A model directory that transformers and vLLM load."""
    tokenizer = make_caller_tokenizer(template, tool)
    make_caller(tokenizer, tool).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Product:
    """An environment with the tool `multiply`. Its reward is the number of calls. It fails as the column `how` says."""

    def reset(self, how: str = "", **row: Any) -> str:
        self.how, self.row, self.calls = how, row, 0
        if how == "reset":
            raise RuntimeError("no board")
        return " x" * 400 if how == "long" else " now"

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.calls += 1
        if self.how == "hang":
            threading.Event().wait(NEVER)
        return a * b

    def get_reward(self) -> float:
        if self.how == "get_reward":
            raise RuntimeError("no score")
        return float(self.calls)
