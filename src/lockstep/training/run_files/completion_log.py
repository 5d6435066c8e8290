"""`log_completions`: at every log, print completions of the generation that the trainer learned from last.

`training/trainers/online.py` calls it. The completions go to `report/completions.py` as plain rows.
"""

from __future__ import annotations

from lockstep.report.completions import Row, chosen_rows, print_completions
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.step.generation import Generation


def rows_of(generation: Generation) -> list[Row]:
    """One row per completion. Its advantage is the mean over its tokens: in some methods each token has another advantage."""
    advantages = {
        s.name: sum(s.advantages.tolist()) / max(len(s.advantages), 1)
        for batch in generation.micro_batches
        for s in batch
    }
    return [
        Row(group.prompt.source, r.text, r.scores, advantages[str(r.completion.key)], r.extra)
        for group in generation.groups
        for r in group.rollouts
    ]


def show_generation(generation: Generation | None, config: OnlineConfig, step: int) -> None:
    """Print the completions of a generation that `config` asks for."""
    if generation is None or not config.log_completions:
        return
    rows = chosen_rows(rows_of(generation), config.num_completions_to_print, unique_prompts=config.log_unique_prompts)
    print_completions(rows, step)
