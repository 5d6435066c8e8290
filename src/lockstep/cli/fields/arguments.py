"""One parser makes dataclasses from a YAML file and from `--field value` words, so that both get the same checks.

Comes from: the command line. Goes to: the command's own file. `read` turns the file's fields into words, puts them before the
words that the user typed (the user's words win), and checks all of them without importing torch. `build` makes the dataclasses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lockstep.cli.fields.description import check_names, check_words, fields_of, underscored
from lockstep.errors import InputError


@dataclasses.dataclass
class RunArguments:
    """The model, the data and the reward of a run."""

    model_name_or_path: str | None = dataclasses.field(
        default=None, metadata={"help": "smollm2-135m-instruct, a model directory, or a hub id."}
    )
    dataset_name: str | None = dataclasses.field(
        default=None,
        metadata={"help": "arithmetic, reasoning_gym, a .jsonl/.csv/.parquet file, a datasets directory, or a hub id."},
    )
    dataset_config: str | None = dataclasses.field(
        default=None, metadata={"help": "Kind of arithmetic problems, reasoning-gym data set, or hub configuration."}
    )
    dataset_train_split: str = dataclasses.field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = dataclasses.field(
        default=None, metadata={"help": "Split to evaluate on. Default: eval_size rows held out of the training split."}
    )
    train_size: int = dataclasses.field(
        default=0, metadata={"help": "Problems to make, or a limit on rows; 0: all rows."}
    )
    eval_size: int = dataclasses.field(default=0, metadata={"help": "Held-out problems; 0: no evaluation."})
    dataset_seed: int = dataclasses.field(default=0, metadata={"help": "Seed of the problems and of what is held out."})
    reward_funcs: list[str] | None = dataclasses.field(
        default=None,
        metadata={
            "help": "accuracy, format, length, exact_match, reasoning_gym, soft_overlong(MAX,CACHE), file.py:function, "
            "package.module.function, or a reward model's directory or hub id. Default: the data's own."
        },
    )


Arguments = TypeVar("Arguments", bound=RunArguments)


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A command line whose names and types are right.

    Attributes:
        words: the fields of the file and then the words that the user typed, all as `--field value` words.
        values: the values of these words, by field name. Fields that are not named are absent.
        dry_run: whether the command only prints the fields.
    """

    words: tuple[str, ...]
    values: dict[str, Any]
    dry_run: bool


def read(words: list[str], command: str) -> Given:
    """Read and check a command line. Imports nothing heavy.

    Raises:
        InputError: a missing or malformed file, an unknown field, a value of the wrong type.
    """
    words = [underscored(word) for word in words]
    switches = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    switches.add_argument("--config")
    switches.add_argument("--dry_run", action="store_true")
    try:
        known, rest = switches.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    fields = fields_of(command)
    content = _read(known.config) if known.config else {}
    check_names([str(name) for name in content], fields, known.config)
    check_names([w[2:].split("=")[0] for w in rest if w.startswith("--")], fields, "the command line")
    together = [*_words(content), *rest]
    return Given(tuple(together), check_words(together, fields), known.dry_run)


def said_of(given: Given, arguments_class: type[Arguments]) -> Arguments:
    """Make `arguments_class` from the values of the command line. Imports nothing heavy."""
    names = {f.name for f in dataclasses.fields(arguments_class)}
    return arguments_class(**{name: value for name, value in given.values.items() if name in names})


def build(given: Given, config_class: type, arguments_class: type[Arguments]) -> tuple[Arguments, Any]:
    """Make the dataclasses of a command line. Imports torch.

    Args:
        config_class: the trainer's configuration.
        arguments_class: `RunArguments`, or a subclass with more fields of a command.

    Raises:
        InputError: fields contradict each other, or this machine does not support them.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser([arguments_class, config_class], allow_abbrev=False, exit_on_error=False)
    try:
        run, config = parser.parse_args_into_dataclasses(list(given.words), look_for_args_file=False)
    except InputError:
        raise
    except (ValueError, TypeError, ImportError, argparse.ArgumentError) as error:
        # TrainingArguments raises these for fields that contradict each other or that this machine does not support.
        raise InputError(str(error).strip().splitlines()[0]) from error
    return run, config


def resolved(run: RunArguments, config: Any) -> str:
    """Every field with its value, as YAML that can be used as a config file. Fields that end in `_token` are left out."""
    fields = {
        **dataclasses.asdict(run),
        **{f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init},
    }
    fields = {k: v for k, v in fields.items() if not k.endswith("_token")}
    plain = json.loads(json.dumps(fields, default=_plain))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else str(getattr(value, "value", value))


def _read(path: str) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise InputError(f"config file {path} does not exist")
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InputError(f"config file {path} must hold fields with values, one a line")
    return content


def _words(content: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in content.items():
        if value is None or value == []:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif isinstance(value, dict):
            words.append(json.dumps(value))
        else:
            words.append(str(value))
    return words
