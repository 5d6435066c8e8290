"""The input of both programs: a model that never ends early, prompts of known length, a reward, and rollouts.

Made by `run.py` in a folder of its own; read by the programs of `play.py`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.against_trl.tool_model import AROUND, FILLER, TURN, question

# A token that the model practically never samples. With it as the end token, every completion reaches the length
# limit, so both programs do the same work.
_NEVER = "<file_sep>"
_TEXT = "the river town winter carried seven letters under an old bridge while nobody asked why it had grown"


@dataclass(frozen=True)
class Workload:
    """Sizes of a step.

    Attributes:
        prompt_tokens: tokens of every prompt; None: the prompts of the arithmetic recipe, with its worked examples.
        trl_batch: completions in one forward of TRL. TRL's default is 8. In a whole step, beside another program with
            an engine, 8 long completions need more than 24 GiB of memory.
        trl_learning_batch: the same number, for steps with given rollouts.
        calls: calls of a tool in every completion, each at the end of a turn. `tokens` are then those of all turns.
        result_tokens: tokens of what the tool answers.
        call_seconds: seconds that a call takes.
    """

    prompts: int
    completions: int
    tokens: int
    prompt_tokens: int | None
    trl_batch: int
    trl_learning_batch: int
    calls: int = 0
    result_tokens: int = 0
    call_seconds: float = 0.0

    @property
    def sequences(self) -> int:
        return self.prompts * self.completions

    @property
    def inserted(self) -> int:
        """Tokens that the tool's answers add to a completion, with what the chat template puts around them."""
        return self.calls * (self.result_tokens + AROUND)


WORKLOADS = {
    "short": Workload(2, 8, 32, None, 16, 16),
    "long": Workload(4, 16, 64, 512, 4, 8),
    # More sequences than an engine may decode together (`benchmarks/sampling/settings.py`).
    "many": Workload(16, 8, 16, None, 8, 8),
    # An agent: three turns, in a context of 1,024 tokens.
    "agent": Workload(4, 8, 3 * TURN, 1024 - 3 * TURN - 2 * (128 + AROUND), 4, 4, calls=2, result_tokens=128),
}


def growth(name: str) -> Workload:
    """`completions-N`: N completions of 32 tokens, 8 per prompt; `length-N`: 8 completions of N tokens."""
    kind, number = name.rsplit("-", 1)
    completions, tokens = (int(number), 32) if kind == "completions" else (8, int(number))
    # Long completions share a forward of TRL as far as 32,768 positions go.
    return Workload(completions // 8, 8, tokens, None, 8, max(1, min(8, 32768 // tokens)))


def with_calls(name: str) -> Workload:
    """`calls-S`: four short turns with a call of S seconds between each two."""
    return Workload(
        2, 8, 4 * TURN, None, 16, 16, calls=3, result_tokens=8, call_seconds=float(name.rsplit("-", 1)[1])
    )


def workload(name: str) -> Workload:
    """A workload by its name."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    return with_calls(name) if name.startswith("calls-") else growth(name)


def make_model(folder: Path) -> str:
    """The directory of the 135M model with another end token, which both programs load."""
    from lockstep.models.policy import load_policy
    from lockstep.models.resolve import resolve_model
    from lockstep.tokens.chat import load_tokenizer

    source = resolve_model("smollm2-135m-instruct")
    model, tokenizer = load_policy(source), load_tokenizer(source)
    end = tokenizer.convert_tokens_to_ids(_NEVER)
    assert end not in (None, tokenizer.unk_token_id, tokenizer.eos_token_id), "the vocabulary lacks the token"
    tokenizer.eos_token = _NEVER
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def prompts(work: Workload, model: str) -> list[Any]:
    """Prompts, as texts or messages, that both programs tokenise alike."""
    from lockstep.tasks.builtin import arithmetic
    from lockstep.tokens.chat import load_tokenizer

    tokenizer = load_tokenizer(model)
    if work.calls:
        return _questions(tokenizer, work)
    if work.prompt_tokens is None:
        chats = arithmetic("larger", work.prompts, 1, seed=5)[0]["prompt"]
        return [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
        ]
    return [_of_length(tokenizer, work.prompt_tokens, seed) for seed in range(work.prompts)]


def _questions(tokenizer: Any, work: Workload) -> list[Any]:
    """The prompts of a model that calls a tool; with their length, if it is given, counted by the chat template."""
    shown = {"tools": [tool(work)], "add_generation_prompt": True}

    def length(asked: list[dict[str, str]]) -> int:
        return len(tokenizer(tokenizer.apply_chat_template(asked, tokenize=False, **shown))["input_ids"])

    found = []
    for row in range(work.prompts):
        filler = 0 if work.prompt_tokens is None else work.prompt_tokens - length(question(row))
        found.append(question(row, filler))
        assert work.prompt_tokens in (None, length(found[-1])), "a filler is not one token"
    return found


def _of_length(tokenizer: Any, tokens: int, seed: int) -> str:
    """Random words that are exactly this many tokens."""
    words = _TEXT.split()
    drawn = random.Random(seed)
    text = ""
    while (length := len(tokenizer(text)["input_ids"])) < tokens:
        text += f" {drawn.choice(words)}" if tokens - length > 1 else "."
    assert length == tokens, "a word of several tokens stepped over the length"
    return text


def tool(work: Workload) -> Callable[[int], str]:
    """The tool that the model calls."""
    answer = FILLER * work.result_tokens

    def look(n: int) -> str:
        """Look something up.

        Args:
            n: Where.
        """
        if work.call_seconds:
            time.sleep(work.call_seconds)
        return answer

    return look


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that differs inside every group, so that no program can skip a group."""
    return [sum(ids) % 101 / 101 for ids in completion_ids]


@dataclass(frozen=True)
class Recorded:
    """One completion that was sampled before, for the learning half alone."""

    prompt: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


def write_rollouts(path: Path, rollouts: list[Recorded]) -> None:
    """Write rollouts to a file for the programs."""
    path.write_text(json.dumps([asdict(rollout) for rollout in rollouts]), encoding="utf-8")


def read_rollouts(path: Path) -> list[Recorded]:
    """Read the rollouts from the file."""
    return [Recorded(**found) for found in json.loads(path.read_text(encoding="utf-8"))]
