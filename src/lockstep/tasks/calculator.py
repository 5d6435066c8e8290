"""An agentic task that a 135M model can learn in minutes on a CPU: products of two numbers of two digits, with a calculator.

The model cannot compute such products itself. Every prompt shows one worked example with a call of the tool `multiply`. The reward
is the final answer (`exact_match`). `right_call` measures the calls alone.
"""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset

from lockstep.errors import InputError

_SYSTEM = "Use the tool multiply for every multiplication."
_EXAMPLE = (12, 34)
_NUMBERS = range(10, 100)


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def right_call(completions: list[Any], a: list[int], b: list[int], **_: Any) -> list[float]:
    """1 if the first message is one call of `multiply` with the two numbers of the question, else 0."""
    wanted = [[("multiply", {"a": x, "b": y})] for x, y in zip(a, b, strict=True)]
    return [float(_calls(messages[0]) == calls) for messages, calls in zip(completions, wanted, strict=True)]


def calculator(train_size: int, eval_size: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and evaluation problems with columns `prompt` (messages), `answer` (text), `a` and `b`.

    Raises:
        InputError: there are fewer problems than requested.
    """
    pairs = [(a, b) for a in _NUMBERS for b in _NUMBERS if (a, b) != _EXAMPLE]
    if train_size + eval_size > len(pairs):
        raise InputError(f"calculator has {len(pairs)} problems, {train_size + eval_size} were asked for")
    random.Random(seed).shuffle(pairs)
    return _product_rows(pairs[eval_size : eval_size + train_size]), _product_rows(pairs[:eval_size])


def _product_rows(pairs: list[tuple[int, int]]) -> Dataset:
    x, y = _EXAMPLE
    shown = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _product_question(x, y)},
        # As text, because the packaged model's chat template shows no calls. `tool_format: pythonic` reads this form.
        {"role": "assistant", "content": f"[multiply(a={x}, b={y})]"},
        {"role": "tool", "content": str(x * y)},
        {"role": "assistant", "content": str(x * y)},
    ]
    return Dataset.from_dict(
        {
            "prompt": [[*shown, {"role": "user", "content": _product_question(a, b)}] for a, b in pairs],
            "answer": [str(a * b) for a, b in pairs],
            "a": [a for a, _ in pairs],
            "b": [b for _, b in pairs],
        }
    )


def _product_question(a: int, b: int) -> str:
    return f"What is {a} * {b}?"


def _calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]
