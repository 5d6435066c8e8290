"""Small verifiable problems that a 135M model can learn in minutes on a CPU.

Every problem is a chat with a system message and worked examples, so that answers have few tokens from the start. Training and
evaluation problems come from one shuffled list of all problems of a kind, so that no evaluation problem is ever trained on.
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
        system: the system message.
        question: makes the text of a problem from its two numbers.
        answer: computes the right answer.
        numbers: largest value. Both numbers are drawn from 10 to this value, inclusive.
        examples: worked examples, shown in every prompt and never used as problems.
    """

    system: str
    question: Callable[[int, int], str]
    answer: Callable[[int, int], int]
    numbers: int
    examples: tuple[tuple[int, int], ...]


# The prompts of `larger` have 97 tokens for the packaged model: three whole cache blocks and one token. So vLLM computes one
# prompt token per completion and takes the others from its cache.
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
        InputError: there is no such kind, or fewer problems than requested.
    """
    if kind not in KINDS:
        raise InputError(f"arithmetic has no problems of kind {kind!r}; it has {', '.join(KINDS)}")
    spec = KINDS[kind]
    # Numbers have two digits each, so that all prompts have the same length.
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
