"""What a training command is about exists: looked at before anything heavy is imported."""

from __future__ import annotations

from lockstep.cli.fields.adapter import AdaptedRunArguments
from lockstep.errors import InputError
from lockstep.models.packaged import PACKAGED_MODEL
from lockstep.models.resolve import resolve_model
from lockstep.tasks.data_files import data_file
from lockstep.tasks.rewards import names_model, reward_place


def check_inputs(arguments: AdaptedRunArguments) -> None:
    """Check the names of model, data and reward functions.

    Raises:
        InputError: a model or data is not named, or a file or directory that is named does not exist.
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
    """Refuse a directory that is missing or holds no model. (The packaged model may have to be converted, which takes a while.)

    Raises:
        InputError: as `resolve_model`.
    """
    if name.lower() != PACKAGED_MODEL:
        resolve_model(name)
