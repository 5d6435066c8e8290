"""The input of both programs: a model that never ends early, prompts of known length, a reward, and rollouts to learn from.

Made by `run.py` in a folder of its own; read by the programs of `play.py`.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# A token that the model practically never samples. With it as the end token, every completion reaches the length limit, so both
# programs do the same work.
_NEVER = "<file_sep>"
_TEXT = "the river town winter carried seven letters under an old bridge while nobody asked why it had grown"


@dataclass(frozen=True)
class Workload:
    """Sizes of a step.

    Attributes:
        prompt_tokens: tokens of every prompt; None: the prompts of the arithmetic recipe, with its worked examples.
        trl_batch: completions in one forward of TRL. TRL's default is 8. In a whole step, beside another program with an engine,
            8 long completions need more than 24 GiB of memory.
        trl_learning_batch: the same number, for steps with given rollouts.
    """

    prompts: int
    completions: int
    tokens: int
    prompt_tokens: int | None
    trl_batch: int
    trl_learning_batch: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.completions


WORKLOADS = {
    "short": Workload(2, 8, 32, None, 16, 16),
    "long": Workload(4, 16, 64, 512, 4, 8),
    # More sequences than an engine may decode together (`benchmarks/sampling.py`).
    "many": Workload(16, 8, 16, None, 8, 8),
}


def growth(name: str) -> Workload:
    """`completions-N`: N completions of 32 tokens, 8 per prompt; `length-N`: 8 completions of N tokens."""
    kind, number = name.rsplit("-", 1)
    completions, tokens = (int(number), 32) if kind == "completions" else (8, int(number))
    # Long completions share a forward of TRL as far as 32,768 positions go.
    return Workload(completions // 8, 8, tokens, None, 8, max(1, min(8, 32768 // tokens)))


def workload(name: str) -> Workload:
    """A workload by its name."""
    return WORKLOADS[name] if name in WORKLOADS else growth(name)


def make_model(folder: Path) -> str:
    """The directory of the 135M model with another end token, which both programs load."""
    from lockstep.models.policy import load_policy
    from lockstep.models.resolve import resolve_model
    from lockstep.tokens.tokenizer import load_tokenizer

    source = resolve_model("smollm2-135m-instruct")
    model, tokenizer = load_policy(source), load_tokenizer(source)
    end = tokenizer.convert_tokens_to_ids(_NEVER)
    assert end not in (None, tokenizer.unk_token_id, tokenizer.eos_token_id), "the vocabulary lacks the token"
    tokenizer.eos_token = _NEVER
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def prompts(work: Workload, model: str) -> list[str]:
    """Prompt texts that both programs tokenise alike."""
    from lockstep.tasks.arithmetic import arithmetic
    from lockstep.tokens.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    if work.prompt_tokens is None:
        chats = arithmetic("larger", work.prompts, 1, seed=5)[0]["prompt"]
        return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [_of_length(tokenizer, work.prompt_tokens, seed) for seed in range(work.prompts)]


def _of_length(tokenizer: Any, tokens: int, seed: int) -> str:
    """Random words that are exactly this many tokens."""
    words = _TEXT.split()
    drawn = random.Random(seed)
    text = ""
    while (length := len(tokenizer(text)["input_ids"])) < tokens:
        text += f" {drawn.choice(words)}" if tokens - length > 1 else "."
    assert length == tokens, "a word of several tokens stepped over the length"
    return text


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
    path.write_text(json.dumps([asdict(rollout) for rollout in rollouts]))


def read_rollouts(path: Path) -> list[Recorded]:
    """Read the rollouts from the file."""
    return [Recorded(**found) for found in json.loads(path.read_text())]
