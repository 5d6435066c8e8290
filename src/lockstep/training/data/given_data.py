"""Makes datasets of what a user gives as data: streams are read, evaluation sets get names, and all are checked.

It is done before a model is loaded, and again for other rows. Then `training/data/prompts.py` makes the prompts.

A stream (`datasets.IterableDataset`) is read before training begins: for training the rows that the run's steps need, in the order
of the stream. From there on they are treated like the rows of any dataset. Therefore the receipt has their digest, and a run is
resumed exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from lockstep.errors import InputError
from lockstep.images.data_sets import has_pictures, with_own_decoder
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.data.prompts import check_dataset, datasets_of_environment

_logger = logging.getLogger(__name__)

# The name of the prompts of a single evaluation set. Those of a set called `math` are named `eval/math`.
SINGLE = "eval"


@dataclass(frozen=True, slots=True)
class GivenData:
    """The datasets of a run.

    Attributes:
        train: the training rows.
        evaluation: one dataset, a mapping of datasets by name, or None, as in `transformers.Trainer`.
        ordered: whether the training rows come from a stream, which has an order of its own.
    """

    train: Dataset
    evaluation: Any
    ordered: bool

    @property
    def named(self) -> dict[str, Any]:
        """All datasets, by the name that their prompts get."""
        return {"train": self.train, **named_sets(self.evaluation)}


def read_data(train: Any, evaluation: Any, config: OnlineConfig, environment_factory: Any) -> GivenData:
    """Read and check what a trainer got.

    Raises:
        InputError: as in `check_dataset`, `named_sets`, `datasets_of_environment` and `check_dispatch`; or a training
            stream without `max_steps`.
    """
    ordered = isinstance(train, IterableDataset)
    if has_pictures(train):
        train = with_own_decoder(train)
    check_dispatch(train, evaluation, config)
    if ordered:
        train = _training_rows(train, config)
    evaluation = read_sets(evaluation)
    if environment_factory is not None:
        train, evaluation = datasets_of_environment(train, evaluation, config, environment_factory)
    check_dataset(train, "train")
    for name, data in named_sets(evaluation).items():
        check_dataset(data, name)
    return GivenData(train, evaluation, ordered)


def check_dispatch(train: Any, evaluation: Any, config: OnlineConfig) -> None:
    """Set `dispatch_batches` for streams, as TRL's trainers do. It changes nothing: each rank reads all rows first.

    Raises:
        InputError: a stream is given, and the config asks for `dispatch_batches=True`. TRL refuses it, in these words.
    """
    several = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    asked: Any = config.accelerator_config
    if not any(isinstance(data, IterableDataset) for data in (train, *several)):
        if asked.dispatch_batches and config.process_index == 0:
            _logger.warning(
                "dispatch_batches=True has no effect here: every rank reads all rows before training begins"
            )
        return
    if asked.dispatch_batches:
        raise InputError(
            "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`: leave it out"
        )
    asked.dispatch_batches = False


def read_sets(given: Any) -> Any:
    """What the user gave as `eval_dataset`, with streams read to their end: a dataset, a mapping of datasets by name, or None."""
    if isinstance(given, Mapping):
        return {name: read_sets(data) for name, data in given.items()}
    own = with_own_decoder(given) if has_pictures(given) else given
    return _rows(own) if isinstance(own, IterableDataset) else own


def named_sets(given: Any) -> dict[str, Any]:
    """The datasets of `eval_dataset`, each by the name that its prompts get.

    Raises:
        InputError: a mapping is empty, or a name is not text.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {SINGLE: given}
    if not given or not all(isinstance(name, str) and name for name in given):
        raise InputError(f"eval_dataset has the names {list(given)!r:.80}; give each evaluation set a name, as text")
    return {f"{SINGLE}/{name}": data for name, data in given.items()}


def _training_rows(stream: IterableDataset, config: OnlineConfig) -> Dataset:
    """As many rows of a stream as the run's generations have prompts, or all if the stream has fewer."""
    if config.max_steps <= 0:
        raise InputError(
            "the train dataset is an IterableDataset: set max_steps, which says how many of its rows the run needs"
        )
    generations = -(-config.max_steps // config.optimizer_steps_per_generation)
    return _rows(stream, generations * config.prompts_per_generation)


def _rows(stream: IterableDataset, count: int | None = None) -> Dataset:
    return Dataset.from_list([dict(row) for row in islice(stream, count)], features=stream.features)
