"""Checks that the inputs of a training command exist, before anything heavy is imported."""

from __future__ import annotations

from lockstep.cli.fields.adapter import AdaptedRunArguments
from lockstep.errors import InputError
from lockstep.models.packaged import PACKAGED_MODEL
from lockstep.models.resolve import resolve_model
from lockstep.tasks.data_files import data_file
from lockstep.tasks.rewards import names_model, reward_place


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
    data_file(arguments.dataset_name)
    for name in arguments.reward_funcs or ():
        if names_model(name):
            check_model(name)
        else:
            reward_place(name)
    check_model(arguments.model_name_or_path)


def check_model(name: str) -> None:
    """Refuse a directory that is missing or holds no model. The packaged model is not checked: its conversion can take a while.

    Raises:
        InputError: as `resolve_model`.
    """
    if name.lower() != PACKAGED_MODEL:
        resolve_model(name)
