"""`log_completions`: the generation that was learned from last, shown at every log.

Comes from: `training/trainers/online.py`. Goes to: `report/completions.py`, as plain rows.
"""

from __future__ import annotations

from lockstep.report.completions import Row, chosen_rows, print_completions
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.step.generation import Generation


def rows_of(generation: Generation) -> list[Row]:
    """One row a completion; its advantage is the mean over its tokens, which only some methods give different ones."""
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
    """Print what `config` asks to see of a generation."""
    if generation is None or not config.log_completions:
        return
    rows = chosen_rows(rows_of(generation), config.num_completions_to_print, unique_prompts=config.log_unique_prompts)
    print_completions(rows, step)
