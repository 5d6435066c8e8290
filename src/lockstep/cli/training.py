"""`lockstep grpo` and the other training commands: train from a config and data, and write a summary and a report at the end."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lockstep
from lockstep.cli.fields.adapter import AdaptedRunArguments, adapter_arguments, check_adapter, settings_of
from lockstep.cli.fields.arguments import Given, read, said_of
from lockstep.cli.fields.inputs import check_inputs, check_sizes, factory_names
from lockstep.cli.past_runs.next_commands import next_lines
from lockstep.cli.process.guard import run_to_its_end
from lockstep.cli.process.library_log import LibraryLog, libraries_aside
from lockstep.cli.process.loading import load_config
from lockstep.collector import collector_off
from lockstep.errors import InputError
from lockstep.report.busy import busy, watched_by
from lockstep.report.say import complain, say
from lockstep.report.waits import told_to

# The trainer class of each command.
TRAINERS = {
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "online-dpo": "OnlineDPOTrainer",
    "reinforce-pp": "ReinforcePPTrainer",
    "ppo": "PPOTrainer",
}


def train(command: str, words: list[str]) -> int:
    """Run a training command; returns the exit code.

    Args:
        command: a key of `TRAINERS`.
        words: the rest of the command line.

    Raises:
        LockstepError: as `lockstep.run.run.run_method`; bad input, before anything is started; a SystemExit inside the run.
    """
    given = read(words, command)
    about = said_of(given, AdaptedRunArguments)
    check_adapter(about)
    check_sizes(about)
    if not given.dry_run:
        check_inputs(about)
    from lockstep.report.status import StatusLine
    from lockstep.report.terminal import Terminal

    # Only rank 0 prints.
    if os.environ.get("RANK", "0") != "0":
        shown: AbstractContextManager[None] = nullcontext()
    else:
        # The output of a dry run is a config file and nothing else.
        shown = told_to(complain) if given.dry_run else watched_by(StatusLine(Terminal()))
    with libraries_aside() as log, shown:
        return _run(given, command, log)


def _run(given: Given, command: str, log: LibraryLog) -> int:
    loaded = load_config(given, lambda: _trainer_class(command).config_class, AdaptedRunArguments)
    if loaded is None:
        return 0
    arguments, config = loaded
    try:
        with run_to_its_end():
            return _train(_trainer_class(command), arguments, config, log, given)
    finally:
        _leave_ranks()


def _trainer_class(command: str) -> Any:
    return getattr(lockstep, TRAINERS[command])


def _train(kind: Any, arguments: AdaptedRunArguments, config: Any, log: LibraryLog, given: Given) -> int:
    with busy("loading the trainer"), collector_off():
        from lockstep.cli.fields.data import data_of
        from lockstep.models.resolve import resolve_model
        from lockstep.rollouts.across_ranks.ranks import Ranks
        from lockstep.run.files.run_directory import open_run_together
        from lockstep.run.files.run_identity import curve_settings
        from lockstep.run.run import run_method
        from lockstep.tasks.rewards import load_reward, names_model

        adapter = adapter_arguments(arguments)
    model = arguments.model_name_or_path
    assert model is not None
    modules: dict[Any, Any] = {}
    names = arguments.reward_funcs or ()
    named = [resolve_model(name) if names_model(name) else load_reward(name, modules) for name in names]
    acting = acting_arguments(arguments, modules)
    with busy(f"loading the data {arguments.dataset_name}"):
        data = data_of(arguments)
    # Online DPO's `reward_model_path` replaces the data's own reward functions.
    by_config = getattr(config, "reward_model_path", None) is not None
    rewards = named or ([] if by_config else list(data.rewards))
    if not rewards and not by_config and not {"environment_factory", "agent"} & acting.keys():
        raise InputError("reward_funcs is not set, and data of one's own has no reward function of its own")
    resolve_model(model)
    settings = {"method": kind.method, **settings_of(arguments), **curve_settings(config)}
    ranks = Ranks(config.generation_timeout)
    with open_run_together(ranks, config.output_dir, settings) as place:
        moved = log.move_to(place.folder)
        if ranks.owner:
            say(f"notes and warnings of libraries go to {moved}", flush=True)
        if place.checkpoint and ranks.owner:
            say(f"going on from {place.checkpoint}", flush=True)
        finished = run_method(
            kind,
            config,
            place,
            model,
            reward_funcs=rewards or None,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            **adapter,
            **acting,
        )
    if ranks.owner:
        _show(finished)
        evaluated = data.evaluation is not None and kind.method == "GRPO"
        for line in next_lines(place.folder, adapter=arguments.use_peft, typed=given.typed if evaluated else None):
            say(line)
    return 0


def acting_arguments(arguments: AdaptedRunArguments, modules: dict[Any, Any]) -> dict[str, Any]:
    """A trainer's `tools`, `environment_factory`, `rollout_func` and `agent`; only those that are named."""
    from lockstep.tasks.functions import load_function

    found: dict[str, Any] = {}
    if arguments.tools:
        found["tools"] = [load_function(name, "tool", modules) for name in arguments.tools]
    factories = {
        n: load_function(place, "environment", modules)
        for n, place in factory_names(arguments.environment_factory).items()
    }
    if factories:
        found["environment_factory"] = factories.get(None, factories)
    if arguments.rollout_func is not None:
        found["rollout_func"] = load_function(arguments.rollout_func, "rollout_func", modules)
    if arguments.agent is not None:
        found["agent"] = load_function(arguments.agent, "agent", modules)
    elif arguments.agent_command is not None:
        found["agent"] = arguments.agent_command
    return found


def _leave_ranks() -> None:
    """Destroy the process group. Its threads can abort the process if they still run when the process ends."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _show(finished: Any) -> None:
    from lockstep.report.summary import summary_lines

    say()
    for line in summary_lines(finished.summary):
        say(line)
    say(f"report           {finished.report}")
