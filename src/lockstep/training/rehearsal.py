"""One call of reward functions and judges before any model is loaded: what they would get wrong later is named at the start.

Comes from: a trainer's constructor. The completions are made up: each is the text of the first row's prompt, which any policy may
sample. What is answered is checked and thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, TrainerState

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.judges import PairwiseJudge, judge_pairs
from lockstep.rollouts.rewards import call_functions
from lockstep.training.config import OnlineConfig


def made_up_group(dataset: Dataset, config: OnlineConfig) -> RolloutGroup:
    """A group of the first row's prompt, of the size that the run samples; every completion is the prompt's own text."""
    row = dataset[0]
    prompt = Prompt("rehearsal", (0,), row["prompt"], {k: v for k, v in row.items() if k != "prompt"})
    rollouts = [
        Rollout(
            Completion(RequestKey(prompt.prompt_id, i), prompt.ids, (0,), (0.0,), (0,), "stop"), _text(row["prompt"])
        )
        for i in range(config.group_size)
    ]
    return RolloutGroup(prompt, tuple(rollouts))


def rehearse_functions(entries: Sequence[Any], group: RolloutGroup, timeout: float) -> None:
    """Call the reward functions among a trainer's `reward_funcs`; reward models are left out.

    Args:
        timeout: seconds that coroutine functions may take.

    Raises:
        InputError: as the call in training would.
    """
    functions = [entry for entry in entries if callable(entry) and not isinstance(entry, PreTrainedModel)]
    if functions:
        with _named():
            call_functions([group], functions, TrainerState(), timeout)


def rehearse_judge(judge: PairwiseJudge, pair: RolloutGroup) -> None:
    """Call a judge.

    Raises:
        InputError: as the call in training would.
    """
    with _named():
        judge_pairs([pair], judge)


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error} (in a rehearsal before any model is loaded, on made-up completions; rehearse_rewards=False goes without)"
        ) from error


def _text(source: Any) -> str:
    text = source if isinstance(source, str) else source[-1]["content"] if source else ""
    return text if isinstance(text, str) else ""
