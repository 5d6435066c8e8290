"""Fields about what a run prints, reports and keeps of its rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.training.config.fields.trl import doc


@dataclass
class LogFields:
    """Fields of `OnlineConfig` about rollouts that are printed, sent to trackers, shown in the report, or kept."""

    log_completions: bool = field(
        default=False,
        metadata=doc(
            "Print prompts, completions, rewards and advantages of the last generation at every log, and send them to wandb, "
            "trackio and TensorBoard as a table."
        ),
    )
    log_multimodal: bool = field(
        default=True, metadata=doc("Put small copies of images into the report, beside prompts and rollouts.")
    )
    num_completions_to_print: int | None = field(
        default=None, metadata=doc("How many completions to print; default: all.")
    )
    log_unique_prompts: bool = field(default=False, metadata=doc("Print only one completion per prompt."))
    rollouts_size_limit: float = field(
        default=1.0,
        metadata=doc(
            "Gigabytes of training rollouts that output_dir/rollouts keeps. If there are more, steps between others are removed. "
            "0: none are kept."
        ),
    )
