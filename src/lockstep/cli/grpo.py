"""`lockstep grpo`: train with GRPO from a config, and end with a summary and a report."""

from __future__ import annotations

from dataclasses import asdict

from lockstep.cli.arguments import RunArguments, parse, resolved
from lockstep.cli.quiet import quiet_libraries
from lockstep.errors import InputError


def run(words: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        LockstepError: as `lockstep.training.run.run_grpo`; bad input before anything is started.
    """
    quiet_libraries()
    from lockstep.training.config import GRPOConfig

    arguments, config, dry_run = parse(words, GRPOConfig, RunArguments)
    if dry_run:
        print(resolved(arguments, config), end="")
        return 0
    return _train(arguments, config)


def _train(arguments: RunArguments, config) -> int:
    from lockstep.cli.data import data_of
    from lockstep.models.resolve import resolve_model
    from lockstep.report.summary import summary_lines
    from lockstep.tasks.rewards import load_reward, names_model
    from lockstep.training.run import curve_settings, run_grpo
    from lockstep.training.run_directory import open_run

    model, dataset = arguments.model_name_or_path, arguments.dataset_name
    if model is None or dataset is None:
        raise InputError(f"{'model_name_or_path' if model is None else 'dataset_name'} is not set")
    named = [resolve_model(name) if names_model(name) else load_reward(name) for name in arguments.reward_funcs or ()]
    data = data_of(arguments)
    rewards = named or list(data.rewards)
    if not rewards:
        raise InputError("reward_funcs is not set, and data of one's own has no reward function of its own")
    resolve_model(model)
    with open_run(config.output_dir, {**asdict(arguments), **curve_settings(config)}) as place:
        if place.checkpoint:
            print(f"going on from {place.checkpoint}", flush=True)
        finished = run_grpo(config, place, model, rewards, data.train, data.evaluation)
    print()
    for line in summary_lines(finished.summary):
        print(line)
    print(f"report           {finished.report}")
    return 0
