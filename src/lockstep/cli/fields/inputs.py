"""Checks that the inputs of a training command exist, before anything heavy is imported."""

from __future__ import annotations

from lockstep.cli.fields.adapter import AdaptedRunArguments
from lockstep.errors import InputError
from lockstep.models.packaged import PACKAGED_MODEL
from lockstep.models.resolve import resolve_model
from lockstep.tasks.data_files import data_files
from lockstep.tasks.functions import place_of
from lockstep.tasks.rewards import names_model, reward_place
from lockstep.training.config.checks import check_bounds
from lockstep.training.config.options import with_key


def check_inputs(arguments: AdaptedRunArguments) -> None:
    """Check the names of the model, the data and the reward functions.

    Raises:
        InputError: the model or the data is not named, or a named file or directory does not exist.
    """
    for name in ("model_name_or_path", "dataset_name"):
        if getattr(arguments, name) is None:
            raise InputError(f"{name} is not set")
    assert arguments.model_name_or_path is not None
    assert arguments.dataset_name is not None
    data_files(arguments.dataset_name, arguments.dataset_train_split)
    for name in arguments.reward_funcs or ():
        if names_model(name):
            check_model(name)
        else:
            reward_place(name)
    for name in arguments.tools or ():
        place_of(name, "tool")
    for name in factory_names(arguments.environment_factory).values():
        place_of(name, "environment")
    if arguments.rollout_func is not None:
        place_of(arguments.rollout_func, "rollout_func")
    if arguments.agent is not None:
        place_of(arguments.agent, "agent")
        if arguments.agent_command is not None:
            raise InputError("agent and agent_command are two agents; give one of them")
    check_model(arguments.model_name_or_path)


def factory_names(entries: list[str] | None) -> dict[str | None, str]:
    """Where each environment is, by the name that rows use for it; a single one without a name has the name None.

    Raises:
        InputError: there are several, and one has no name or a name that another one has.
    """
    found: dict[str | None, str] = {}
    for entry in entries or ():
        name, equals, place = entry.partition("=")
        if "/" in name:
            # The sign belongs to the path.
            name, equals, place = entry, "", ""
        key = name if equals else None
        if key in found or (key is None and len(entries or ()) > 1):
            raise InputError(
                f"environment_factory {entry!r}: give each of several environments a name of its own, NAME=file.py:name"
            )
        found[key] = place if equals else entry
    return found


def check_sizes(arguments: AdaptedRunArguments) -> None:
    """Check the numbers of the data and of the adapter.

    Raises:
        InputError: a number is out of its bounds.
    """
    check_bounds(arguments, with_key(type(arguments), "bounds"))


def check_model(name: str) -> None:
    """Refuse a directory that is missing or holds no model. The packaged model is not checked: its conversion can take a while.

    Raises:
        InputError: as `resolve_model`.
    """
    if name.lower() != PACKAGED_MODEL:
        resolve_model(name)
