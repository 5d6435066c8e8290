"""Makes prompts of what a user gives as data: a dataset with a `prompt` column, a stream, or several sets with names.

Rows are checked, tokenized and measured before a model is loaded. A stream (`datasets.IterableDataset`) is read before training
begins: for training the rows that the run's steps need, in the order of the stream. From there on they are treated like the rows of
any dataset. Therefore the receipt has their digest, and a run is resumed exactly.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.images.data_sets import has_pictures, with_own_decoder
from lockstep.images.prompts import IdsOf, ImagePrompts
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.group import Prompt
from lockstep.tokens.arrays import whole_numbers
from lockstep.tokens.chat import Template, is_conversational, render_prompt, template_of, with_joined_text
from lockstep.tokens.tokenizer import check_embedded
from lockstep.training.config.online_config import OnlineConfig

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
    """The datasets of a run whose environments give the prompts, as in TRL: `reset` adds to the last message, which is then empty.

    Args:
        train, evaluation: datasets, perhaps without a column `prompt`. Without a training dataset every row is empty.
        factory: the `environment_factory`; a mapping is chosen from by the column `environment`.

    Raises:
        InputError: there is no training dataset, and either `max_steps` is not set or the environments are chosen by a column.
    """
    if train is None:
        if isinstance(factory, Mapping):
            raise InputError(
                "environment_factory is a mapping, which requires a `train_dataset` with a column environment: it says which "
                "environment a row has. Give one, or a single environment_factory"
            )
        if config.max_steps <= 0:
            raise InputError("without a train_dataset the environment gives the prompts: set max_steps")
        train = Dataset.from_dict({"prompt": [_EMPTY] * config.prompts_per_generation})
    if isinstance(evaluation, Mapping):
        return with_empty_prompts(train), {name: with_empty_prompts(data) for name, data in evaluation.items()}
    return with_empty_prompts(train), with_empty_prompts(evaluation)


def with_empty_prompts(data: Any) -> Any:
    """A dataset with a column of empty prompts, if it has none. Anything but a dataset stays as it is."""
    if isinstance(data, Dataset) and len(data) and "prompt" not in data.column_names:
        return data.add_column("prompt", [_EMPTY] * len(data))
    return data


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a dataset that cannot be trained on, before a model is loaded.

    Args:
        name: of the dataset, for errors: `train`, `eval`, `eval/math`.

    Raises:
        InputError: there is no `prompt` column, a column has the name of an argument of reward functions, there are no rows, or it
            is not a map-style dataset.
    """
    if dataset is None:
        raise InputError("`train_dataset` is required, unless an environment_factory gives the prompts")
    if not isinstance(dataset, Dataset):
        raise InputError(f"the {name} dataset must be a datasets.Dataset, got {type(dataset).__name__}")
    if len(dataset) == 0:
        raise InputError(f"the {name} dataset is empty")
    if "prompt" not in dataset.column_names:
        raise InputError(f"the {name} dataset has no 'prompt' column, only {dataset.column_names}")
    if taken := _ARGUMENTS & set(dataset.column_names):
        raise InputError(
            f"the {name} dataset has a column {min(taken)!r}, which is the name of an argument of reward functions: they would not "
            "see the column; rename it"
        )


def load_prompts(
    dataset: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    ids_of: IdsOf | None = None,
    images: ImagePrompts | None = None,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Every row as a prompt, named `<name>/<row>`.

    Args:
        max_prompt_length: number of tokens that the model's context leaves for a prompt.
        ids_of: makes the ids of a row's prompt, for example with tools; None: they are the prompt's alone.
        images: reads the prompts and their pictures; None: there are no pictures.
        add_special_tokens: whether prompts that are text get the tokenizer's special tokens.

    Raises:
        InputError: a prompt cannot be tokenized, or is too long, or a picture cannot be read. The message names the row.
    """
    if images is None and (shown := {"image", "images"} & set(dataset.column_names)):
        # TRL would show the images to the model. If they were ignored, the model would answer without having seen them.
        raise InputError(
            f"the {name} dataset has a column {min(shown)!r}: images are not supported here, because the model reads none or the "
            "run began without any; drop the column"
        )
    prompts, template = [], template_of(tokenizer, chat_template_kwargs) if ids_of is None else None

    def ids_alone(row: Any) -> Any:
        return render_prompt(row["prompt"], tokenizer, template=template, add_special_tokens=add_special_tokens)

    for index, given in enumerate(dataset):
        prompt_id = f"{name}/{index}"
        source = with_joined_text(given["prompt"])
        row = {**given, "prompt": source}
        try:
            if images is not None:
                # From here on, the run needs no network.
                row = images.with_files(row)
                source = row["prompt"]
                is_text = ids_of is None and isinstance(source, str)
                ids, pictures = images.read(row, ids_alone if is_text else ids_of)
            else:
                ids, pictures = whole_numbers((ids_of or ids_alone)(row)), None
        except InputError as error:
            raise InputError(f"prompt {prompt_id}: {error}") from error
        if len(ids) > max_prompt_length:
            raise InputError(
                f"prompt {prompt_id} has {len(ids)} tokens; there is room for {max_prompt_length} beside "
                "max_completion_length: shorten or drop the row"
            )
        columns = {k: v for k, v in row.items() if k != "prompt"}
        prompts.append(Prompt(prompt_id, ids, source, columns, pictures))
    return prompts


def read_prompts(
    datasets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    config: OnlineConfig,
    ranks: Ranks,
    ids_of: IdsOf | None = None,
    images: ImagePrompts | None = None,
    *,
    vocabulary: int,
) -> dict[str, list[Prompt]]:
    """The prompts of each dataset. Every rank calls this and reads them; the ranks compare what they have read.

    Ranks must have equal prompts, because rollouts travel between ranks with the names of their prompts only.

    Args:
        datasets: by the name that their prompts get.
        longest: number of tokens that prompt and completion may have together.
        ids_of, images: as in `load_prompts`.
        vocabulary: number of ids that the model embeds.

    Raises:
        InputError: on every rank; a rank cannot use its data (see `load_prompts`), a prompt has a token without an
            embedding, or two ranks have different prompts.
    """
    room, arguments = longest - config.completion_limit, config.template_arguments
    found: dict[str, list[Prompt]] = {}

    def read() -> list[Any]:
        for name, data in datasets.items():
            found[name] = load_prompts(
                data,
                name,
                tokenizer,
                max_prompt_length=room,
                chat_template_kwargs=arguments,
                ids_of=ids_of,
                images=images,
                add_special_tokens=config.add_special_tokens,
            )
        for prompt in (p for prompts in found.values() for p in prompts):
            check_embedded(prompt.ids, vocabulary, f"prompt {prompt.prompt_id}")
        return digest_of_prompts([p for prompts in found.values() for p in prompts])

    parts = [read()] if ranks.count == 1 else ranks.share("prompts", read)
    if ranks.owner:
        every = [p for prompts in found.values() for p in prompts]
        _tell_guarded(every, template_of(tokenizer, arguments))
        tell_added(every, tokenizer)
        if (clock := config.template_clock).was_read:
            _logger.info(
                f"the chat template contains the time: every prompt and turn of this run has {clock.moment:%Y-%m-%d %H:%M:%S}, "
                "also after a resume"
            )
    odd = [rank for rank, part in enumerate(parts) if part != parts[0]]
    if odd:
        raise InputError(
            f"rank {odd[0]} has other prompts than rank 0 ({parts[odd[0]][0]} and {parts[0][0]} of them): give every rank the same "
            "dataset, in the same order"
        )
    return found


def _tell_guarded(prompts: Sequence[Prompt], template: Template | None) -> None:
    """Say how many prompts contain text that looks like a control token."""
    guarded = [
        p.prompt_id for p in prompts if template and is_conversational(p.source) and template.is_guarded(p.source)
    ]
    if guarded:
        _logger.info(
            f"in {len(guarded)} of {len(prompts)} prompts ({guarded[0]} first), a message contains text that looks like "
            "a control token of this tokenizer: it stays text. (TRL makes the control token of it. If you mean the token, give the "
            "prompt as text instead of messages)"
        )


def tell_added(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn of prompts that are text and begin with two begin tokens, or end with an end token that their text has not."""
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
                f"{len(found)} of {len(prompts)} prompts ({found[0]} first) {what}, as in TRL. If you do not mean that, set "
                "add_special_tokens=False"
            )


def digest_of_prompts(prompts: Sequence[Prompt]) -> list[Any]:
    """The number of prompts, and a digest of their names, ids and pictures."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        name = prompt.prompt_id.encode()
        digest.update(b"%d %d " % (len(name), len(prompt.ids)) + name + prompt.ids.tobytes())
        if prompt.pictures is not None:
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
