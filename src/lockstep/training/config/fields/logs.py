"""Fields about what a run prints, reports and keeps of its rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.training.config.option import COUNT, Bookkeeping, Bounds, option


@dataclass
class LogFields:
    """Fields of `OnlineConfig` about logs, and about rollouts that are printed, sent to trackers, shown in the report, or kept."""

    logging_steps: float = option(
        10,
        "Optimizer steps between two logs.",
        group="logging",
        common=True,
        bounds=Bounds(0, above=True),
        bookkeeping=Bookkeeping.LOGS,
    )
    logging_nan_inf_filter: bool = option(False, "Hide NaN losses; off, so that you see them.", group="logging")
    log_completions: bool = option(
        False,
        "Print prompts, completions, rewards and advantages of the last generation at every log, and send them to wandb, "
        "trackio and TensorBoard as a table.",
        group="logging",
        common=True,
        bookkeeping=Bookkeeping.LOGS,
    )
    log_multimodal: bool = option(
        True, "Put small copies of images into the report, beside prompts and rollouts.", group="logging"
    )
    num_completions_to_print: int | None = option(
        None,
        "How many completions to print; default: all.",
        group="logging",
        bounds=COUNT,
        bookkeeping=Bookkeeping.LOGS,
    )
    log_unique_prompts: bool = option(
        False,
        "Print only one completion per prompt.",
        group="logging",
        bookkeeping=Bookkeeping.LOGS,
    )
    rollouts_size_limit: float = option(
        1.0,
        "Gigabytes of training rollouts that output_dir/rollouts keeps. If there are more, steps between others are removed. "
        "0: none are kept.",
        group="logging",
        bounds=Bounds(0),
        bookkeeping=Bookkeeping.LOGS,
    )
