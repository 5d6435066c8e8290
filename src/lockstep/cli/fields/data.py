"""Loads the data that the arguments of a command name."""

from __future__ import annotations

from lockstep.cli.fields.arguments import RunArguments
from lockstep.errors import InputError
from lockstep.tasks.data import TaskData, load_data


def data_of(arguments: RunArguments) -> TaskData:
    """Load the data.

    Raises:
        InputError: no data is named, or the data cannot be loaded.
    """
    if arguments.dataset_name is None:
        raise InputError("dataset_name is not set")
    return load_data(
        arguments.dataset_name,
        subset=arguments.dataset_config,
        train_split=arguments.dataset_train_split,
        test_split=arguments.dataset_test_split,
        train_size=arguments.train_size,
        eval_size=arguments.eval_size,
        seed=arguments.dataset_seed,
        types=arguments.dataset_types or (),
    )
