"""Small verifiable problems that a 135M model can learn in minutes on a CPU.

Every problem is a chat with a system line and worked examples, so that answers are a few tokens long from the start. Training
and evaluation draw from one shuffled list of all problems of the kind, so that no evaluation problem is ever trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset

from lockstep.errors import InputError


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem.

    Attributes:
        system: the system line.
        question: text of a problem from its two numbers.
        answer: the right answer.
        numbers: both numbers are drawn from 0 to this, inclusive.
        examples: worked examples, shown in every prompt and never asked.
    """

    system: str
    question: Callable[[int, int], str]
    answer: Callable[[int, int], int]
    numbers: int
    examples: tuple[tuple[int, int], ...]


# The prompts of `larger` have 97 tokens for the packaged model: three whole cache blocks and one token, so that vLLM computes one
# prompt token a completion and takes the others from its cache.
KINDS = {
    "larger": Kind(
        "You compare two numbers. Answer with just the larger of the two, and nothing else.",
        lambda a, b: f"Which number is larger, {a} or {b}?",
        max,
        99,
        ((31, 58), (77, 12)),
    ),
    "sum": Kind(
        "Answer with just the result.",
        lambda a, b: f"What is {a} + {b}?",
        lambda a, b: a + b,
        49,
        ((21, 14), (30, 17), (12, 25)),
    ),
}


def arithmetic(kind: str, train_size: int, eval_size: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and evaluation problems with columns `prompt` (messages) and `answer` (text).

    Raises:
        InputError: no such kind, or more problems asked for than exist.
    """
    if kind not in KINDS:
        raise InputError(f"arithmetic has no problems of kind {kind!r}; it has {', '.join(KINDS)}")
    spec = KINDS[kind]
    # Two digits each, so that all prompts have one length.
    numbers = range(10, spec.numbers + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a != b and (a, b) not in spec.examples]
    if train_size + eval_size > len(pairs):
        raise InputError(f"arithmetic/{kind} has {len(pairs)} problems, {train_size + eval_size} were asked for")
    random.Random(seed).shuffle(pairs)
    held_out, rest = pairs[:eval_size], pairs[eval_size : eval_size + train_size]
    return _dataset(spec, rest), _dataset(spec, held_out)


def _dataset(spec: Kind, pairs: list[tuple[int, int]]) -> Dataset:
    shown = [(spec.question(a, b), str(spec.answer(a, b))) for a, b in spec.examples]
    return Dataset.from_dict(
        {
            "prompt": [chat(spec.system, shown, spec.question(a, b)) for a, b in pairs],
            "answer": [str(spec.answer(a, b)) for a, b in pairs],
        }
    )


def chat(system: str, examples: list[tuple[str, str]], question: str) -> list[dict[str, str]]:
    """Messages that ask a question after worked examples."""
    messages = [{"role": "system", "content": system}]
    for asked, answered in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]
