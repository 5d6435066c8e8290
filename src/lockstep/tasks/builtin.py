"""The problems that come with Lockstep: small verifiable ones that a 135M model can learn in minutes on a CPU.

Every problem of `arithmetic` is a chat with a system message and worked examples, so that answers have few tokens from
the start. Training and evaluation problems come from one shuffled list, so that no evaluation problem is ever trained
on. `reasoning_gym_problems` are those of a data set of reasoning-gym, with its own scorer as the reward function.
`calculator` is agentic: the model cannot compute its products of two numbers of two digits itself, and calls the tool
`multiply`. `dots` is for models that see images.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw

from lockstep.errors import InputError
from lockstep.tasks.rewards import Reward, gym_package, texts

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem.

    Attributes:
        question: makes the text of a problem from its two numbers.
        numbers: largest value. Both numbers are drawn from 10 to this value, inclusive.
        examples: worked examples, shown in every prompt and never used as problems.
    """

    system: str
    question: Callable[[int, int], str]
    answer: Callable[[int, int], int]
    numbers: int
    examples: tuple[tuple[int, int], ...]


# The prompts of `larger` have 97 tokens for the packaged model: three whole blocks of vLLM's cache and one token.
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
    """Training and evaluation problems with columns `prompt` (messages) and `answer` (text)."""
    if kind not in KINDS:
        raise InputError(f"arithmetic has no problems of kind {kind!r}; it has {', '.join(KINDS)}")
    spec = KINDS[kind]
    # Numbers have two digits each, so that all prompts have the same length.
    numbers = range(10, spec.numbers + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a != b and (a, b) not in spec.examples]
    train, held_out = _parted(f"arithmetic/{kind}", pairs, train_size, eval_size, seed)
    return _dataset(spec, train), _dataset(spec, held_out)


def _parted(name: str, pairs: Pairs, train_size: int, eval_size: int, seed: int) -> tuple[Pairs, Pairs]:
    """The pairs of the training and of the evaluation problems, drawn without repetition."""
    if train_size + eval_size > len(pairs):
        raise InputError(f"{name} has {len(pairs)} problems, {train_size + eval_size} were asked for")
    random.Random(seed).shuffle(pairs)
    return pairs[eval_size : eval_size + train_size], pairs[:eval_size]


def _dataset(spec: Kind, pairs: Pairs) -> Dataset:
    shown = [(spec.question(a, b), str(spec.answer(a, b))) for a, b in spec.examples]
    prompts = [chat(spec.system, shown, spec.question(a, b)) for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(spec.answer(a, b)) for a, b in pairs]})


def chat(system: str, examples: list[tuple[str, str]], question: str) -> list[dict[str, str]]:
    """Messages that ask a question after worked examples."""
    messages = [{"role": "system", "content": system}]
    for asked, answered in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]


SYSTEM = "Answer with just the result."

# Seed offsets. They are far apart, so that training, evaluation and example problems differ.
_EVAL_OFFSET, _EXAMPLE_OFFSET = 1_000_000, 2_000_000


def reasoning_gym_problems(
    name: str, train_size: int, eval_size: int, seed: int, examples: int = 2
) -> tuple[Dataset, Dataset, Reward]:
    """Training and evaluation problems of a reasoning-gym data set, and its scorer as a reward function.

    Args:
        name: for example `letter_counting`, `chain_sum` or `gcd`.
        examples: number of worked examples before every question. They are separate problems.

    Returns:
        Two data sets with columns `prompt`, `answer` and `entry` (the problem as JSON), and the reward function. A
        training problem that also occurs in the evaluation set is dropped.
    """
    gym = gym_package()
    try:
        source = gym.create_dataset(name, seed=seed, size=max(train_size, 1))
        held_out = gym.create_dataset(name, seed=seed + _EVAL_OFFSET, size=max(eval_size, 1))
        worked = gym.create_dataset(name, seed=seed + _EXAMPLE_OFFSET, size=max(examples, 1))
    except ValueError as error:
        raise InputError(f"reasoning-gym has no data set {name!r}: {error}") from error
    shown = [(worked[i]["question"], str(worked[i]["answer"])) for i in range(examples)]
    evaluation = [held_out[i] for i in range(eval_size)]
    kept_back = {entry["question"] for entry in evaluation} | {question for question, _ in shown}
    drawn = (source[i] for i in range(train_size))
    training = [entry for entry in drawn if entry["question"] not in kept_back]

    def reasoning_gym_score(completions: list[Any], entry: list[str], **_: Any) -> list[float]:
        pairs = zip(texts(completions), entry, strict=True)
        return [float(source.score_answer(text.strip(), json.loads(problem))) for text, problem in pairs]

    return _gym_rows(training, shown), _gym_rows(evaluation, shown), reasoning_gym_score


class _Problem:
    """An environment for the rows of `reasoning_gym_problems`. The reward is the best score of the answers so far."""

    def reset(self, entry: str, **row: Any) -> None:
        """Begin with the problem of a row's column `entry`."""
        self._entry = json.loads(entry)
        self._score = gym_package().get_score_answer_fn(self._entry["metadata"]["source_dataset"])
        self._best = 0.0

    def get_reward(self) -> float:
        """The best score of the answers so far."""
        return self._best

    def _is_right(self, text: str) -> bool:
        score = float(self._score(text.strip(), self._entry))
        self._best = max(self._best, score)
        return score == 1.0


class SeveralTries(_Problem):
    """The model gives its answers with a tool, as often as it likes."""

    def answer(self, text: str) -> str:
        """Give an answer to the problem.

        Args:
            text: The answer, and nothing else.
        """
        return "right" if self._is_right(text) else "wrong, try again"


class SpokenTries(_Problem):
    """Each turn is an answer, without a tool. After a wrong one the user asks again, while there are tokens."""

    def next_user_message(self, answer: str) -> str | None:
        """Score an answer. Returns None if it is right."""
        return None if self._is_right(answer) else "That is wrong. Try again. " + SYSTEM


def _gym_rows(entries: list[dict[str, Any]], shown: list[tuple[str, str]]) -> Dataset:
    rows = {
        "prompt": [chat(SYSTEM, shown, entry["question"]) for entry in entries],
        "answer": [str(entry["answer"]) for entry in entries],
        "entry": [json.dumps(entry, default=str) for entry in entries],
    }
    return Dataset.from_dict(rows)


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
    """Training and evaluation problems with columns `prompt` (messages), `answer` (text), `a` and `b`."""
    pairs = [(a, b) for a in _NUMBERS for b in _NUMBERS if (a, b) != _EXAMPLE]
    train, held_out = _parted("calculator", pairs, train_size, eval_size, seed)
    return _product_rows(train), _product_rows(held_out)


def _product_rows(pairs: Pairs) -> Dataset:
    x, y = _EXAMPLE
    shown = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _product_question(x, y)},
        # As text, because the packaged model's chat template shows no calls. `tool_format: pythonic` reads this form.
        {"role": "assistant", "content": f"[multiply(a={x}, b={y})]"},
        {"role": "tool", "content": str(x * y)},
        {"role": "assistant", "content": str(x * y)},
    ]
    prompts = [[*shown, {"role": "user", "content": _product_question(a, b)}] for a, b in pairs]
    answers = [str(a * b) for a, b in pairs]
    numbers = {"a": [a for a, _ in pairs], "b": [b for _, b in pairs]}
    return Dataset.from_dict({"prompt": prompts, "answer": answers, **numbers})


def _product_question(a: int, b: int) -> str:
    return f"What is {a} * {b}?"


def _calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


_COLORS = {"red": (214, 39, 40), "blue": (31, 119, 180), "green": (44, 160, 44), "orange": (255, 127, 14)}
# Side of a picture and of the cell of one dot, in pixels. 224 is a multiple of the patches of the usual models.
_SIDE, _CELL = 224, 28
_MOST = 9


def dots(train_size: int, eval_size: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and evaluation problems with columns `prompt` (messages), `image` and `answer` (text).

    Each picture shows up to nine dots of each of four colors, which do not overlap. All answers from 0 to 9 are equally
    frequent.
    """
    draw = random.Random(seed)
    held_out, train = (_picture_rows(count, draw) for count in (eval_size, train_size))
    return train, held_out


def _picture_rows(count: int, draw: random.Random) -> Dataset:
    rows = []
    answers = [i % (_MOST + 1) for i in range(count)]
    draw.shuffle(answers)
    for answer in answers:
        color = draw.choice(list(_COLORS))
        counts = {name: draw.randint(0, _MOST) for name in _COLORS} | {color: answer}
        parts = [{"type": "image", "text": None}, {"type": "text", "text": _color_question(color)}]
        prompt = [{"role": "user", "content": parts}]
        rows.append({"prompt": prompt, "image": _picture(counts, draw), "answer": str(answer)})
    parts_of_message = List({"type": Value("string"), "text": Value("string")})
    messages = List({"role": Value("string"), "content": parts_of_message})
    # Without rows there is nothing to see the columns by.
    features = Features({"prompt": messages, "image": Image(), "answer": Value("string")})
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features)


def _color_question(color: str) -> str:
    return f"How many {color} dots are in the picture? Answer with the number only."


def _picture(counts: dict[str, int], draw: random.Random) -> Pictures.Image:
    found = Pictures.new("RGB", (_SIDE, _SIDE), "white")
    brush = ImageDraw.Draw(found)
    cells = list(itertools.product(range(0, _SIDE, _CELL), repeat=2))
    places = iter(draw.sample(cells, sum(counts.values())))
    for name, count in counts.items():
        for x, y in itertools.islice(places, count):
            radius = draw.randint(6, 10)
            center = [draw.randint(radius + 1, _CELL - radius - 1) + corner for corner in (x, y)]
            brush.ellipse([c - radius for c in center] + [c + radius for c in center], fill=_COLORS[name])
    return found
