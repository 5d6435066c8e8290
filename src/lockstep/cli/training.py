"""What the training commands share: a config and data become a run of a method, with a summary and a report at its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lockstep.cli.adapter import AdaptedRunArguments, adapter_arguments, check_adapter, settings_of
from lockstep.cli.arguments import Given, build, read, resolved, said_of
from lockstep.cli.inputs import check_inputs
from lockstep.cli.library_log import LibraryLog, libraries_aside
from lockstep.cli.quiet import quiet_libraries
from lockstep.errors import InputError
from lockstep.report.busy import busy, watched_by


def train(words: list[str], command: str, method: Callable[[], Any]) -> int:
    """Run a training command; returns the exit code.

    Args:
        method: imports and gives the method's trainer class.

    Raises:
        LockstepError: as `lockstep.training.run.run_method`; bad input before anything is started.
    """
    given = read(words, command)
    about = said_of(given, AdaptedRunArguments)
    check_adapter(about)
    if not given.dry_run:
        check_inputs(about)
    from rich.console import Console

    from lockstep.report.status import StatusLine

    # One of several ranks speaks. A dry run's output is a config file, and nothing else.
    speaks = os.environ.get("RANK", "0") == "0" and not given.dry_run
    with libraries_aside() as log, watched_by(StatusLine(Console())) if speaks else nullcontext():
        return _run(given, method, log)


def _run(given: Given, method: Callable[[], Any], log: LibraryLog) -> int:
    with busy("loading PyTorch and transformers"):
        quiet_libraries()
        kind = method()
        arguments, config = build(given, kind.config_class, AdaptedRunArguments)
        adapter = adapter_arguments(arguments)
    if given.dry_run:
        if config.process_index == 0:
            print(resolved(arguments, config), end="")
        return 0
    try:
        return _train(kind, arguments, config, adapter, log)
    finally:
        _leave_ranks()


def _train(kind: Any, arguments: AdaptedRunArguments, config: Any, adapter: dict[str, Any], log: LibraryLog) -> int:
    from lockstep.cli.data import data_of
    from lockstep.models.resolve import resolve_model
    from lockstep.rollouts.ranks import Ranks
    from lockstep.tasks.rewards import load_reward, names_model
    from lockstep.training.run import curve_settings, run_method
    from lockstep.training.run_files.run_directory import open_run_together

    model = arguments.model_name_or_path
    assert model is not None
    named = [resolve_model(name) if names_model(name) else load_reward(name) for name in arguments.reward_funcs or ()]
    with busy(f"loading the data {arguments.dataset_name}"):
        data = data_of(arguments)
    # A reward model of Online DPO's own stands instead of the data's.
    by_config = getattr(config, "reward_model_path", None) is not None
    rewards = named or ([] if by_config else list(data.rewards))
    if not rewards and not by_config:
        raise InputError("reward_funcs is not set, and data of one's own has no reward function of its own")
    resolve_model(model)
    settings = {"method": kind.method, **settings_of(arguments), **curve_settings(config)}
    ranks = Ranks(config.vllm_server_timeout)
    with open_run_together(ranks, config.output_dir, settings) as place:
        moved = log.move_to(place.folder)
        if ranks.owner:
            print(f"notes and warnings of libraries go to {moved}", flush=True)
        if place.checkpoint and ranks.owner:
            print(f"going on from {place.checkpoint}", flush=True)
        finished = run_method(
            kind,
            config,
            place,
            model,
            reward_funcs=rewards or None,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            **adapter,
        )
    if ranks.owner:
        _show(finished)
    return 0


def _leave_ranks() -> None:
    """Take leave of the other ranks. Threads that still serve them when the process ends can abort it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _show(finished: Any) -> None:
    from lockstep.report.summary import summary_lines

    print()
    for line in summary_lines(finished.summary):
        print(line)
    print(f"report           {finished.report}")
