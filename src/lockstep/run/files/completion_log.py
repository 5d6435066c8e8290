"""`log_completions`: at every log, show completions of the generation that the trainer learned from last.

The completions go to `report/completions.py` and to trackers as plain rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import TrainerCallback

from lockstep.report.completions import Row, chosen_rows, print_completions
from lockstep.run.files.completion_tables import send_completions
from lockstep.training.batch.sequence import rollouts_of
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.step.generation import Generation


def rows_of(generation: Generation) -> list[Row]:
    """One row per rollout. Its advantage is the mean over its tokens: in some methods each token has another advantage."""
    advantages: dict[str, list[float]] = {}
    for own in rollouts_of([s for batch in generation.micro_batches for s in batch]):
        advantages[own[0].rollout or own[0].name] = [a for s in own for a in s.advantages.tolist()]
    return [
        Row(group.prompt.source, r.text, r.scores, _mean(advantages.get(str(r.key), [])), r.extra, r.finish_reasons)
        for group in generation.groups
        for r in group.rollouts
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def show_generation(
    generation: Generation | None, config: OnlineConfig, step: int, callbacks: Sequence[TrainerCallback]
) -> None:
    """Print the completions of a generation that `config` asks for, and send its table to the trackers among `callbacks`.

    As in TRL, `num_completions_to_print` is about what is printed; trackers get all rows.
    """
    if generation is None or not config.log_completions:
        return
    rows, unique = rows_of(generation), config.log_unique_prompts
    print_completions(chosen_rows(rows, config.num_completions_to_print, unique_prompts=unique), step)
    send_completions(chosen_rows(rows, None, unique_prompts=unique), step, callbacks)
