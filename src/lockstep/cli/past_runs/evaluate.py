"""`lockstep evaluate`: samples the held-out problems with a model, under every proof, and prints the mean reward.

It takes the fields of `lockstep grpo`. A run prints the command for its own model at its end.
"""

from __future__ import annotations

from typing import Any

import lockstep
from lockstep.cli.fields.adapter import AdaptedRunArguments
from lockstep.cli.fields.arguments import read, said_of
from lockstep.cli.fields.inputs import check_inputs, check_sizes
from lockstep.cli.process.library_log import libraries_aside
from lockstep.cli.process.loading import load_config
from lockstep.errors import InputError
from lockstep.files import temporary_folder
from lockstep.report.busy import busy, watched_by
from lockstep.report.say import say


def evaluate(words: list[str]) -> int:
    """Run the command.

    Raises:
        InputError: bad arguments; no held-out problems; an adapter, which must be merged first.
        LockstepError: trainer and engine do not agree.
    """
    given = read(words, "evaluate")
    about = said_of(given, AdaptedRunArguments)
    check_sizes(about)
    if not given.dry_run:
        check_inputs(about)
        if about.use_peft:
            raise InputError("use_peft: merge the adapter with 'lockstep merge', and evaluate the whole model")
        if about.eval_size == 0 and about.dataset_test_split is None:
            raise InputError("there is nothing to evaluate on: set eval_size, or dataset_test_split")
    from lockstep.report.status import StatusLine

    with libraries_aside(), watched_by(StatusLine()):
        loaded = load_config(given, lambda: lockstep.GRPOConfig, AdaptedRunArguments)
        if loaded is None:
            return 0
        arguments, config = loaded
        if config.world_size > 1:
            raise InputError("lockstep evaluate runs in one process; start it without torchrun")
        metrics = _evaluated(arguments, config)
    proven = metrics.get("eval_parity/checked_share")
    say(
        f"held-out reward {metrics['eval_reward']:.3f} ± {metrics['eval_reward_ci95']:.3f}   "
        f"({metrics['eval_problems']:.0f} problems, {metrics['eval_samples']:.0f} samples, 95 % interval"
        + (f"; gap proven on {proven:.0%} of the tokens)" if proven is not None else ")")
    )
    return 0


def _evaluated(arguments: AdaptedRunArguments, config: Any) -> dict[str, float]:
    with busy("loading the trainer"):
        from transformers import PrinterCallback

        from lockstep import GRPOTrainer
        from lockstep.cli.fields.data import data_of
        from lockstep.cli.training import acting_arguments
        from lockstep.tasks.rewards import load_reward, names_model

    modules: dict[Any, Any] = {}
    with busy(f"loading the data {arguments.dataset_name}"):
        data = data_of(arguments)
    rewards = [n if names_model(n) else load_reward(n, modules) for n in arguments.reward_funcs or ()]
    assert arguments.model_name_or_path is not None
    # The directory of the config may hold the run that trained the model. Nothing is written there.
    with temporary_folder("lockstep-evaluate-") as folder:
        config.output_dir, config.disable_tqdm = str(folder), True
        with busy(f"loading {arguments.model_name_or_path}"):
            trainer = GRPOTrainer(
                arguments.model_name_or_path,
                rewards or list(data.rewards) or None,
                args=config,
                train_dataset=data.train,
                eval_dataset=data.evaluation,
                **acting_arguments(arguments, modules),
            )
        trainer.remove_callback(PrinterCallback)
        try:
            return trainer.evaluate()
        finally:
            trainer.close()
