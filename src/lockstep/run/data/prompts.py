"""The prompts of a run: made of what a user gives as data, and their order over the generations.

A user gives a dataset with a `prompt` column, a stream, or several sets with names. `read_data` checks the rows before
a model is loaded, and `read_prompts` makes their ids. A stream (`datasets.IterableDataset`) is read before training
begins: the rows that the run's steps need, in its order. From there on it is a dataset like any other. Therefore the
receipt has the digest of the rows, and a run is resumed exactly.

`PromptOrder` says which prompts a generation has: a pure function of the seed, and, if solved prompts are left out, of
which prompt was solved in which generation. So a resumed run gets the prompts of an uninterrupted one. A loader gives
them to the loop as one `MicroBatch` per micro-step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError, LockstepError, quoted
from lockstep.images.prompts import IdsOf, PromptReader
from lockstep.images.reading import with_own_decoder
from lockstep.progress import busy
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.tokens.chat import (
    Template,
    check_embedded,
    is_conversational,
    template_of,
    with_joined_text,
)

_logger = logging.getLogger(__name__)

# What reward functions get beside the columns.
_ARGUMENTS = frozenset(
    {"prompts", "completions", "completion_ids", "environments", "trainer_state", "log_metric", "log_extra"}
)
# The prompt of a row that has none: an environment adds to it.
_EMPTY = [{"role": "user", "content": ""}]


def datasets_of_environment(
    train: Any, evaluation: Any | None, config: OnlineConfig, factory: Any
) -> tuple[Any, Any | None]:
    """The datasets of a run whose environments give the prompts, as in TRL:

    `reset` adds to the last message, which is then empty.

    Args:
        train, evaluation: datasets, perhaps without a column `prompt`. Without a training dataset every row is empty.
        factory: the `environment_factory`; a mapping is chosen from by the column `environment`.

    Raises:
        InputError: there is no training dataset, and either `max_steps` is not set or the environments are chosen by
            a column.
    """
    if train is None:
        if isinstance(factory, Mapping):
            raise InputError(
                "environment_factory is a mapping, which requires a `train_dataset` with a column "
                "environment: it says which "
                "environment a row has. Give one, or a single environment_factory"
            )
        if config.max_steps <= 0:
            raise InputError("without a train_dataset the environment gives the prompts: set max_steps")
        train = Dataset.from_dict({"prompt": [_EMPTY] * config.prompts_per_generation})
    if isinstance(evaluation, Mapping):
        return with_empty_prompts(train), {
            name: with_empty_prompts(data) for name, data in evaluation.items()
        }
    return with_empty_prompts(train), with_empty_prompts(evaluation)


def with_empty_prompts(data: Any) -> Any:
    """A dataset with a column of empty prompts, if it has none. Anything but a dataset stays as it is."""
    if isinstance(data, Dataset) and len(data) and "prompt" not in data.column_names:
        return data.add_column("prompt", [_EMPTY] * len(data))
    return data


# How a dataset is made of what users give instead.
_MADE_OF = {
    "DatasetDict": "give one of its splits, such as data['train']",
    "IterableDatasetDict": "give one of its splits, such as data['train']",
    "list": "Dataset.from_list makes one of rows",
    "dict": "Dataset.from_dict makes one of columns",
    "DataFrame": "Dataset.from_pandas makes one",
    "str": "datasets.load_dataset reads one",
}


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a dataset that cannot be trained on, before a model is loaded.

    Args:
        name: of the dataset, for errors: `train`, `eval`, `eval/math`.

    Raises:
        InputError: there is no `prompt` column, a column has the name of an argument of reward functions, there are
            no rows, the first cannot be read, or it is not a map-style dataset.
    """
    if dataset is None:
        raise InputError("`train_dataset` is required, unless an environment_factory gives the prompts")
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        advice = next((f"; {text}" for known, text in _MADE_OF.items() if known == kind), "")
        raise InputError(f"the {name} dataset must be a datasets.Dataset, got {kind}{advice}")
    if len(dataset) == 0:
        raise InputError(f"the {name} dataset is empty")
    if "prompt" not in dataset.column_names:
        raise InputError(f"the {name} dataset has no 'prompt' column, only {dataset.column_names}")
    if taken := _ARGUMENTS & set(dataset.column_names):
        raise InputError(
            f"the {name} dataset has a column {min(taken)!r}, which is the name of an argument of reward "
            f"functions: they would not "
            "see the column; rename it"
        )
    next(_read(dataset, f"the {name} dataset"))


def load_prompts(
    dataset: Dataset,
    name: str,
    reader: PromptReader,
    *,
    max_prompt_length: int,
    ids_of: IdsOf | None = None,
    limit: tuple[str, int] | None = None,
) -> list[Prompt]:
    """Every row as a prompt, named `<name>/<row>`.

    Args:
        max_prompt_length: number of tokens that the model's context leaves for a prompt.
        ids_of: makes the ids of a row's prompt, for example with tools; None: they are the prompt's alone.
        limit: the field that bounds a completion, and its value, for the error about a prompt that is too long.

    Raises:
        InputError: a prompt cannot be tokenized, or is too long, or a picture cannot be read. The message names the
            row.
    """
    reader.check_columns(name, dataset.column_names)
    prompts = []
    for index, given in enumerate(_read(dataset, f"the {name} dataset")):
        prompt_id = f"{name}/{index}"
        try:
            # From here on, the run needs no network.
            row = reader.with_files({**given, "prompt": with_joined_text(given["prompt"])})
            ids, pictures = reader.read(row, ids_of)
        except InputError as error:
            raise InputError(f"prompt {prompt_id}: {error}") from error
        if len(ids) > max_prompt_length:
            beside, otherwise = "max_completion_length", ""
            if limit is not None:
                beside, otherwise = f"{limit[0]}={limit[1]}", f", or lower {limit[0]}"
            raise InputError(
                f"prompt {prompt_id} has {len(ids)} tokens; there is room for {max_prompt_length} beside "
                f"{beside}: shorten or drop the row{otherwise}"
            )
        source = row.pop("prompt")
        prompts.append(Prompt(prompt_id, ids, source, row, pictures))
    return prompts


def read_prompts(
    datasets: Mapping[str, Dataset],
    reader: PromptReader,
    longest: int,
    config: OnlineConfig,
    ranks: Ranks,
    ids_of: IdsOf | None = None,
    *,
    vocabulary: int,
) -> dict[str, list[Prompt]]:
    """The prompts of each dataset. Every rank calls this and reads them; the ranks compare what they have read.

    Ranks must have equal prompts, because rollouts travel between ranks with the names of their prompts only.

    Args:
        datasets: by the name that their prompts get.
        longest: number of tokens that prompt and completion may have together.
        ids_of: as in `load_prompts`.
        vocabulary: number of ids that the model embeds.

    Raises:
        InputError: on every rank; a rank cannot use its data (see `load_prompts`), a prompt has a token without an
            embedding, or two ranks have different prompts.
    """
    room = longest - config.completion_limit
    field = "max_new_tokens" if hasattr(config, "max_new_tokens") else "max_completion_length"
    if room < 1:
        raise InputError(
            f"completions of up to {config.completion_limit} tokens leave no room for a prompt: prompt and completion "
            f"may have {longest} together (the model's context, or the limit that the config sets); lower {field}"
        )
    found: dict[str, list[Prompt]] = {}

    def read() -> list[Any]:
        for name, data in datasets.items():
            found[name] = load_prompts(
                data,
                name,
                reader,
                max_prompt_length=room,
                ids_of=ids_of,
                limit=(field, config.completion_limit),
            )
        for prompt in (p for prompts in found.values() for p in prompts):
            check_embedded(prompt.ids, vocabulary, f"prompt {prompt.prompt_id}")
        return digest_of_prompts([p for prompts in found.values() for p in prompts])

    parts = [read()] if ranks.count == 1 else ranks.share("prompts", read)
    if ranks.owner:
        every = [p for prompts in found.values() for p in prompts]
        _tell_guarded(every, template_of(reader.tokenizer, config.template_arguments))
        tell_added(every, reader.tokenizer)
        if (clock := config.template_clock).was_read:
            _logger.info(
                f"the chat template contains the time: every prompt and turn of this run has "
                f"{clock.moment:%Y-%m-%d %H:%M:%S}, "
                "also after a resume"
            )
    odd = [rank for rank, part in enumerate(parts) if part != parts[0]]
    if odd:
        raise InputError(
            f"rank {odd[0]} has other prompts than rank 0 ({parts[odd[0]][0]} and {parts[0][0]} of them): "
            f"give every rank the same "
            "dataset, in the same order"
        )
    return found


def _tell_guarded(prompts: Sequence[Prompt], template: Template | None) -> None:
    """Say how many prompts contain text that looks like a control token."""
    guarded = [
        p.prompt_id
        for p in prompts
        if template and is_conversational(p.source) and template.is_guarded(p.source)
    ]
    if guarded:
        _logger.info(
            f"in {len(guarded)} of {len(prompts)} prompts ({guarded[0]} first), a message contains text that "
            f"looks like "
            "a control token of this tokenizer: it stays text. (TRL makes the control token of it. If you "
            "mean the token, give the "
            "prompt as text instead of messages)"
        )


def tell_added(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn of text prompts that begin with two begin tokens, or end with an end token that their text has not."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    written = str(tokenizer.eos_token or "")
    texts = [p for p in prompts if isinstance(p.source, str)]
    doubled = [p.prompt_id for p in texts if begin is not None and p.ids[:2].tolist() == [begin, begin]]
    ended = [p.prompt_id for p in texts if p.ids[-1] == end and not str(p.source).rstrip().endswith(written)]
    for found, what in (
        (doubled, "begin with two begin tokens: the text has one, and the tokenizer adds one"),
        (ended, "end with an end token, which the tokenizer adds: the model continues a text that has ended"),
    ):
        if found:
            _logger.warning(
                f"{len(found)} of {len(prompts)} prompts ({found[0]} first) {what}, as in TRL. If you do not "
                f"mean that, set "
                "add_special_tokens=False"
            )


def digest_of_prompts(prompts: Sequence[Prompt]) -> list[Any]:
    """The number of prompts, and a digest of their names, ids and pictures."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        name = prompt.prompt_id.encode()
        digest.update(b"%d %d " % (len(name), len(prompt.ids)) + name + prompt.ids.tobytes())
        digest.update("".join(prompt.pictures.digests).encode())
    return [len(prompts), digest.hexdigest()]


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
    _check_size(config)
    train = with_own_decoder(as_rows(train))
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


# Formats whose rows are tables, from which no single row is read.
_TABLES = ("arrow", "pandas", "polars")
# One generation is held in memory. The largest that anybody samples have some ten thousand completions.
_MOST_COMPLETIONS = 1 << 20
# A stream of more rows is taken for one without an end.
_MOST_EVALUATED = 100_000


def as_rows(data: Any) -> Any:
    """A dataset that gives rows as mappings, with all columns, whatever format it was given. Others stay as they are.

    A format that makes arrays of the columns (`numpy`, `torch`) stays: reward functions get what the user asked for.
    """
    if isinstance(data, IterableDataset):
        # The stream has no public name for it.
        kind = getattr(getattr(data, "_formatting", None), "format_type", None)
        return data.with_format(None) if kind in _TABLES else data
    if not isinstance(data, Dataset):
        return data
    shown = data.format["columns"]
    return data.with_format(None) if data.format["type"] in _TABLES or "prompt" not in shown else data


def _check_size(config: OnlineConfig) -> None:
    """Refuse a generation that no machine holds, before its completions are made up for a rehearsal."""
    count = config.prompts_per_generation * config.group_size
    if count > _MOST_COMPLETIONS:
        raise InputError(
            f"a generation has {count:,} completions ({config.prompts_per_generation} prompts × {config.group_size}): "
            f"more than {_MOST_COMPLETIONS:,} do not fit into memory; lower per_device_train_batch_size, "
            "generation_batch_size or the completions per prompt"
        )


def check_dispatch(train: Any, evaluation: Any, config: OnlineConfig) -> None:
    """Set `dispatch_batches` for streams, as TRL's trainers do. It changes nothing: each rank reads all rows first.

    Raises:
        InputError: a stream is given, and the config asks for `dispatch_batches=True`. TRL refuses it, in these words.
    """
    several = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    asked: Any = config.accelerator_config
    if not any(isinstance(data, IterableDataset) for data in (train, *several)):
        return
    if asked.dispatch_batches:
        raise InputError(
            "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in "
            "`accelerator_config`: leave it out"
        )
    asked.dispatch_batches = False


def read_sets(given: Any) -> Any:
    """What the user gave as `eval_dataset`, with streams read to their end: a dataset, datasets by name, or None."""
    if isinstance(given, Mapping):
        return {name: read_sets(data) for name, data in given.items()}
    own = with_own_decoder(as_rows(given))
    if not isinstance(own, IterableDataset):
        return own
    found = _rows(own, _MOST_EVALUATED + 1, "an eval dataset")
    if len(found) > _MOST_EVALUATED:
        raise InputError(
            f"an eval dataset is a stream of more than {_MOST_EVALUATED:,} rows, and every evaluation samples all: "
            "give a part of it, such as stream.take(500)"
        )
    return found


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
        raise InputError(
            f"eval_dataset has the names {list(given)!r:.80}; give each evaluation set a name, as text"
        )
    return {f"{SINGLE}/{name}": data for name, data in given.items()}


def _training_rows(stream: IterableDataset, config: OnlineConfig) -> Dataset:
    """As many rows of a stream as the run's generations have prompts, or all if the stream has fewer."""
    if config.max_steps <= 0:
        raise InputError(
            "the train dataset is an IterableDataset: set max_steps, which says how many of its rows the run needs"
        )
    generations = -(-config.max_steps // config.optimizer_steps_per_generation)
    return _rows(stream, generations * config.prompts_per_generation, "the train dataset")


def _rows(stream: IterableDataset, count: int, what: str) -> Dataset:
    with busy(f"reading up to {count:,} rows of {what}, a stream"):
        rows = [dict(row) for row in islice(_read(stream, what), count)]
    return Dataset.from_list(rows, features=stream.features)


def _read(rows: Iterable[Any], what: str) -> Iterator[Any]:
    """The rows of a dataset. A user's generator or transform makes them, which may raise anything."""
    number, source = 0, None
    while True:
        try:
            source = iter(rows) if source is None else source
            row = next(source)
        except StopIteration:
            return
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{what}: row {number} cannot be read: {type(error).__name__}: {quoted(error)}"
            ) from error
        yield row
        number += 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one micro-step: the prompts of its generation, and its part of that generation.

    Attributes:
        prompts: the prompts of the whole generation.
        part: index of this micro-step within the generation. Part 0 samples the generation.
    """

    prompts: tuple[Prompt, ...]
    part: int


@dataclass(slots=True)
class _Pass:
    """One pass over the remaining prompts, in order.

    Attributes:
        number: index of the pass, from 0.
        start: number of its first generation.
        left: dataset indices of its prompts, as many as fill whole generations.
    """

    number: int
    start: int
    left: list[int]


class PromptOrder:
    """Passes over the prompts, each in its own order.

    Prompts that do not fill a whole generation are left out of a pass.

    Args:
        names: names of the prompts in the dataset.
        size: prompts per generation.
        solved_at: mean reward of a group from which its prompt is left out of later passes ("no positive resampling"
            of ScaleRL, arXiv 2510.13786). None: every pass has all prompts.
        ahead: number of generations that are begun before the current one is noted. A prompt that is solved in one of
            them is left out correspondingly later.

    Raises:
        InputError: the dataset does not fill one generation.
    """

    def __init__(
        self,
        names: Sequence[str],
        size: int,
        *,
        shuffle: bool,
        seed: int,
        solved_at: float | None = None,
        ahead: int = 0,
    ) -> None:
        if len(names) < size:
            raise InputError(f"the train dataset has {len(names)} prompts, one generation needs {size}")
        self.size, self.per_epoch = size, len(names) // size
        self._names, self._shuffle, self._seed, self._solved_at = tuple(names), shuffle, seed, solved_at
        self._ahead = ahead
        self.forget()

    def forget(self) -> None:
        """Start again: no prompt is solved."""
        # Per solved prompt: the generation in which it was solved.
        self._solved: dict[str, int] = {}
        # Number of generations whose groups have been noted.
        self._noted = 0
        self._pass = self._passed(0, 0)

    def places(self, generation: int) -> list[int]:
        """TorchDataset indices of a generation's prompts.

        Raises:
            InputError: too few prompts are left, or an earlier generation has not been noted.
        """
        found = self._pass_of(generation)
        if not found.left:
            raise InputError(
                f"all prompts but {len(self._names) - self.solved} are solved "
                f"(no_positive_resampling={self._solved_at}) and one "
                f"generation needs {self.size}: there is nothing left to learn from"
            )
        first = (generation - found.start) * self.size
        return found.left[first : first + self.size]

    def note(self, generation: int, groups: Sequence[RolloutGroup]) -> None:
        """Record the rewards of a generation: which of its prompts are solved."""
        if self._solved_at is None:
            return
        self._noted = generation + 1
        for group in groups:
            rewards = group.given_rewards
            if rewards and sum(rewards) / len(rewards) >= self._solved_at:
                self._solved.setdefault(group.prompt.prompt_id, generation)

    def used_up(self, generation: int) -> bool:
        """Whether too few prompts are left for a generation.

        Raises:
            InputError: an earlier generation has not been noted.
        """
        return self._solved_at is not None and not self._pass_of(generation).left

    @property
    def solved(self) -> int:
        """Number of prompts that are left out of later passes."""
        return len(self._solved)

    def metrics(self) -> dict[str, float]:
        """The metric `prompts/solved`, if solved prompts are left out; otherwise nothing."""
        return {} if self._solved_at is None else {"prompts/solved": float(self.solved)}

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, in JSON types. It is empty if the seed is enough."""
        if self._solved_at is None:
            return {}
        return {"noted": self._noted, "solved": self._solved, "ahead": self._ahead}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`.

        Raises:
            InputError: the state is of a run with another number of generations ahead, whose passes were different.
        """
        if state.get("ahead", 0) != self._ahead:
            raise InputError(
                f"the checkpoint is of a run with {state.get('ahead', 0)} generations ahead, this one has "
                f"{self._ahead}: with "
                "no_positive_resampling the prompts would differ; use the same max_staleness"
            )
        self.forget()
        self._noted, self._solved = state["noted"], dict(state["solved"])

    def _pass_of(self, generation: int) -> _Pass:
        if self._solved_at is not None and generation > self._noted + self._ahead:
            raise InputError(
                f"generation {generation} is asked for before generation {self._noted} was scored"
            )
        found = self._pass if self._pass.start <= generation else self._passed(0, 0)
        while found.left and generation >= found.start + len(found.left) // self.size:
            found = self._passed(found.number + 1, found.start + len(found.left) // self.size)
        self._pass = found
        return found

    def _passed(self, number: int, start: int) -> _Pass:
        order = list(range(len(self._names)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + number)
            order = torch.randperm(len(order), generator=generator).tolist()
        # Prompts that were known to be solved when the pass's first generation was begun: the same at every call.
        known = start - self._ahead
        left = [place for place in order if self._solved.get(self._names[place], known) >= known]
        return _Pass(number, start, left[: len(left) // self.size * self.size])


class GenerationBatches:
    """Batch sampler: the same prompts for each of the `parts` micro-steps of a generation, then the next generation's.

    An epoch has as many generations as the whole dataset fills, even if prompts are left out. It ends early if too few
    prompts are left.
    """

    def __init__(self, order: PromptOrder, parts: int) -> None:
        self._order, self._parts, self._epoch = order, parts, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose generations the next iteration yields."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._order.per_epoch * self._parts

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        first = self._epoch * self._order.per_epoch
        for generation in range(first, first + self._order.per_epoch):
            if self._order.used_up(generation):
                return
            places = self._order.places(generation)
            for part in range(self._parts):
                yield [(place, part) for place in places]


class _Prompts(TorchDataset):
    """Returns a prompt together with the part that the sampler requested."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Prompt, int]:
        index, part = place
        return self._prompts[index], part


class PromptLoader(DataLoader):
    """Dataloader of micro-batches. It passes `set_epoch` on to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def order_of(prompts: Sequence[Prompt], config: OnlineConfig, *, shuffle: bool) -> PromptOrder:
    """The order of a run's training prompts.

    Raises:
        InputError: the prompts do not fill one generation.
    """
    return PromptOrder(
        [prompt.prompt_id for prompt in prompts],
        config.prompts_per_generation,
        shuffle=shuffle,
        seed=config.data_seed if config.data_seed is not None else config.seed,
        solved_at=getattr(config, "no_positive_resampling", None),
        ahead=config.generations_ahead,
    )


def generations_from(
    order: PromptOrder, prompts: Sequence[Prompt], first: int, last: int
) -> Iterator[tuple[int, list[Prompt]]]:
    """Generations from `first` to `last`, by number, with their prompts. It ends early if too few prompts are left."""
    for generation in range(first, last + 1):
        if order.used_up(generation):
            return
        yield generation, [prompts[place] for place in order.places(generation)]


def make_loader(prompts: list[Prompt], order: PromptOrder, config: OnlineConfig) -> PromptLoader:
    """The training dataloader. One item is one micro-step."""
    batches = GenerationBatches(order, config.micro_batches_per_generation)
    return PromptLoader(_Prompts(prompts), batch_sampler=batches, collate_fn=_collate)


def _collate(items: list[tuple[Prompt, int]]) -> MicroBatch:
    return MicroBatch(tuple(prompt for prompt, _ in items), items[0][1])
