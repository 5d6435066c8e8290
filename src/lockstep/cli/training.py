"""`lockstep grpo` and the other commands that run a trainer, `lockstep evaluate` too.

`lockstep grpo` and the other training commands: train from a config and data, and write a summary and a report at the
end.

Makes the arguments and the config of a command that runs a trainer, and prints them for `--dry_run`.

Comes from: the command's own file, with a command line that was read and checked without torch (`cli/fields.py`).

`lockstep evaluate`: samples the held-out problems with a model, under every proof, and prints the mean reward.

It takes the fields of `lockstep grpo`. A run prints the command for its own model at its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import lockstep
from lockstep.cli.fields import (
    AdaptedRunArguments,
    Arguments,
    Given,
    adapter_arguments,
    build,
    check_effect,
    check_inputs,
    check_sizes,
    factory_names,
    read,
    resolved,
    said_of,
    settings_of,
    without_unused,
)
from lockstep.cli.output import LibraryLog, libraries_aside, quiet_libraries
from lockstep.cli.past_runs import next_lines
from lockstep.cli.process import run_to_its_end
from lockstep.config.option import Part
from lockstep.errors import InputError
from lockstep.files import temporary_folder
from lockstep.progress import busy, told_to, watched_by
from lockstep.safe_text import complain, say
from lockstep.start_up import collector_off, import_peft


def load_config(
    given: Given, config_class: Callable[[], type], arguments_class: type[Arguments]
) -> tuple[Arguments, Any] | None:
    """The command's arguments and the trainer's config. Imports torch and transformers.

    Args:
        config_class: imports and gives the class of the config.
        arguments_class: `RunArguments`, or a subclass with more fields of the command.

    Returns:
        Both objects. None for a dry run, after it has printed every field as YAML.

    Raises:
        InputError: fields contradict each other, or this machine does not support them.
    """
    with busy("loading PyTorch and transformers"), collector_off():
        quiet_libraries()
        import_peft()
        arguments, config = build(given, config_class(), arguments_class)
    if not given.dry_run:
        return arguments, config
    # The output of a dry run is one config file and nothing else, also with several ranks.
    if config.process_index == 0:
        say(resolved(arguments, config), end="")
    return None


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
        LockstepError: as `lockstep.run.run.run_method`; bad input, before anything is started; a SystemExit inside
            the run.
    """
    given = read(words, command)
    about = said_of(given, AdaptedRunArguments)
    check_effect(about)
    check_sizes(about)
    if not given.dry_run:
        check_inputs(about)
    from lockstep.progress import StatusLine
    from lockstep.terminal import Terminal

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
        from lockstep.cli.fields import data_of
        from lockstep.models.resolve import resolve_model
        from lockstep.rollouts.ranks import Ranks
        from lockstep.run.files.directory import open_run_together
        from lockstep.run.files.identity import curve_settings
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
        for line in next_lines(
            place.folder, adapter=arguments.use_peft, typed=given.typed if evaluated else None
        ):
            say(line)
    return 0


def acting_arguments(arguments: AdaptedRunArguments, modules: dict[Any, Any]) -> dict[str, Any]:
    """A trainer's `tools`, `environment_factory`, `rollout_func` and `agent`; only those that are named."""
    from lockstep.tasks.rewards import load_function

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


# What `lockstep evaluate` does of a run.
EVALUATES = (Part.HELD_OUT, Part.REWARDS, Part.ACTING)


def with_one_group(given: Given) -> Given:
    """A command line whose generations have one group. A command that learns nothing has no other size to choose."""
    count = given.values.get("num_generations", 0)
    size = ("--per_device_train_batch_size", str(count)) if count > 0 else ()
    return replace(given, words=(*given.words, *size))


def evaluate(words: list[str]) -> int:
    """Run the command.

    Raises:
        InputError: bad arguments; no held-out problems; an adapter, which must be merged first.
        LockstepError: trainer and engine do not agree.
    """
    given = without_unused(read(words, "evaluate"), "evaluate", EVALUATES)
    given = with_one_group(given)
    about = said_of(given, AdaptedRunArguments)
    check_effect(about, given)
    check_sizes(about)
    if not given.dry_run:
        check_inputs(about)
        refuse_adapter(about)
        if about.eval_size == 0 and about.dataset_test_split is None:
            raise InputError("there is nothing to evaluate on: set eval_size, or dataset_test_split")
    from lockstep.progress import StatusLine

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


def refuse_adapter(about: AdaptedRunArguments) -> None:
    """Refuse an adapter in a command that does not train.

    Raises:
        InputError: `use_peft` is on.
    """
    if about.use_peft:
        raise InputError(
            "use_peft: nothing is trained here; merge the adapter with 'lockstep merge', give the whole model, "
            "and --use_peft False"
        )


def _evaluated(arguments: AdaptedRunArguments, config: Any) -> dict[str, float]:
    with busy("loading the trainer"):
        from transformers import PrinterCallback

        from lockstep import GRPOTrainer
        from lockstep.cli.fields import data_of
        from lockstep.tasks import MADE
        from lockstep.tasks.rewards import load_reward, names_model

    modules: dict[Any, Any] = {}
    if arguments.dataset_name in MADE and not arguments.train_size:
        # A trainer has a row to train on, also if it does not train.
        arguments.train_size = 1
    with busy(f"loading the data {arguments.dataset_name}"):
        data = data_of(arguments)
    rewards = [n if names_model(n) else load_reward(n, modules) for n in arguments.reward_funcs or ()]
    assert arguments.model_name_or_path is not None
    # The directory of the config may hold the run that trained the model. Nothing is written there.
    with temporary_folder("lockstep-evaluate-") as folder:
        config.output_dir, config.disable_tqdm, config.push_to_hub = str(folder), True, False
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
