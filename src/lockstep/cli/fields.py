"""The arguments of a command as dataclasses: from words and files, with adapters, inputs and data.

One parser makes dataclasses from a YAML file and from `--field value` words, so that both get the same checks.

Comes from: the command line. Goes to: the command's own file. `read` turns the file's fields into words, puts them
before the words that the user typed (the user's words win), and checks all of them without importing torch. `build`
makes the dataclasses.

LoRA and QLoRA on the command line, with the field names of TRL's `ModelConfig`.

Comes from: the command line, together with `RunArguments`. Goes to: a trainer's constructor.

Checks that the inputs of a training command exist, before anything heavy is imported.

Loads the data that the arguments of a command name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml

from lockstep.cli.help import (
    check_names,
    check_text,
    check_words,
    fields_of,
    read_file,
    recipe_file,
    underscored,
)
from lockstep.config.checks import check_bounds, words_of_command
from lockstep.config.effect import NOTHING_OF, say_without_effect, set_fields, tell_no_effect
from lockstep.config.option import COUNT, SEED, Bounds, Part, option
from lockstep.config.table import with_key
from lockstep.errors import InputError, one_line
from lockstep.models.packaged import PACKAGED_MODEL
from lockstep.models.resolve import resolve_model
from lockstep.safe_text import visible, without_secrets
from lockstep.tasks.files import data_files
from lockstep.tasks.rewards import names_model, place_of, reward_place

if TYPE_CHECKING:
    from lockstep.tasks.data import TaskData


@dataclasses.dataclass
class RunArguments:
    """The model, the data and the reward of a run."""

    model_name_or_path: str | None = option(
        None, "smollm2-135m-instruct, a model directory, or a hub id.", group="model", common=True
    )
    dataset_name: str | None = option(
        None,
        "arithmetic, calculator, dots, reasoning_gym, a .jsonl/.csv/.parquet file or a directory of them, a datasets "
        "directory, or a hub id.",
        group="data",
        common=True,
    )
    dataset_config: str | None = option(
        None,
        "Kind of arithmetic problems, reasoning-gym data set, or hub configuration.",
        group="data",
        common=True,
        only_with=("data", "subsets"),
    )
    dataset_train_split: str = option(
        "train", "Split to train on.", group="data", only_with=("data", "splits")
    )
    dataset_test_split: str | None = option(
        None,
        "Split to evaluate on. Default: eval_size rows held out of the training split.",
        group="data",
        part=Part.HELD_OUT,
    )
    dataset_types: list[str] | None = option(
        None,
        "Columns of a CSV file that are not text: NAME=int, NAME=float or NAME=bool.",
        group="data",
        only_with="data",
    )
    train_size: int = option(
        0,
        "Problems to make, or a limit on rows; 0: all rows.",
        group="data",
        common=True,
        bounds=Bounds(0),
        only_with="data",
    )
    eval_size: int = option(
        0,
        "Held-out problems; 0: no evaluation.",
        group="data",
        common=True,
        bounds=Bounds(0),
        part=Part.HELD_OUT,
    )
    dataset_seed: int = option(
        0,
        "Seed of the problems and of what is held out.",
        group="data",
        bounds=SEED,
        only_with=("data", "drawn_rows"),
    )
    reward_funcs: list[str] | None = option(
        None,
        "accuracy, format, length, exact_match, reasoning_gym, soft_overlong(MAX,CACHE), file.py:function, "
        "package.module.function, or a reward model's directory or hub id. Default: the data's own.",
        group="reward",
        common=True,
        part=Part.REWARDS,
    )
    tools: list[str] | None = option(
        None,
        "Functions that the model may call: file.py:function or package.module.function.",
        group="tools",
        common=True,
        part=Part.ACTING,
    )
    environment_factory: list[str] | None = option(
        None,
        "Class or function that makes an environment: file.py:name or package.module.name. Several, as "
        "NAME=file.py:name, are chosen by the column 'environment'.",
        group="tools",
        common=True,
        part=Part.ACTING,
    )
    rollout_func: str | None = option(
        None,
        "Function that makes the rollouts itself: file.py:function.",
        group="tools",
        part=Part.ACTING,
    )
    agent: str | None = option(
        None,
        "Function that makes a rollout by calls to the gateway: file.py:function (docs/guides/agents.md).",
        group="tools",
        common=True,
        part=Part.ACTING,
    )
    agent_command: str | None = option(
        None,
        "Command line of such an agent; it runs once per rollout.",
        group="tools",
        part=Part.ACTING,
    )


Arguments = TypeVar("Arguments", bound=RunArguments)


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A command line whose names and types are right.

    Attributes:
        words: the fields of the file and then the words that the user typed, all as `--field value` words.
        values: the values of these words, by field name. Fields that are not named are absent.
        dry_run: whether the command only prints the fields.
        recipe: the recipe whose config was read; None: there is none.
        typed: the words that the user typed.
    """

    words: tuple[str, ...]
    values: dict[str, Any]
    dry_run: bool
    recipe: str | None = None
    typed: tuple[str, ...] = ()

    @property
    def typed_names(self) -> set[str]:
        """The fields that the user typed."""
        words = (word[2:].partition("=")[0] for word in self.typed if word.startswith("--"))
        return {
            word if word in self.values else word.removeprefix("no_") for word in words
        } & self.values.keys()


def read(words: list[str], command: str) -> Given:
    """Read and check a command line. Imports nothing heavy.

    Raises:
        InputError: a missing or malformed file, an unknown field, a value of the wrong type.
    """
    words = [underscored(word) for word in words]
    check_text(words)
    switches = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    switches.add_argument("--config", action="append")
    switches.add_argument("--recipe", action="append")
    switches.add_argument("--dry_run", action="store_true")
    try:
        known, rest = switches.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    fields = fields_of(command)
    files = [*(known.config or ()), *map(str, map(recipe_file, known.recipe or ()))]
    if len(files) > 1:
        raise InputError("give --config or --recipe once; the command line wins over the file")
    content = read_file(files[0]) if files else {}
    check_names(list(content), fields, files[0] if files else "")
    _check_forms(content, fields)
    check_names([w[2:].split("=")[0] for w in rest if w.startswith("--")], fields, "the command line")
    together = [*_words(content, fields), *rest]
    check_text(together)
    return Given(
        tuple(together),
        check_words(together, fields),
        known.dry_run,
        (known.recipe or [None])[0],
        tuple(words),
    )


def _check_forms(content: dict[str, Any], fields: dict[str, dict[str, Any]]) -> None:
    """Refuse a list or a mapping for a field that takes one value, and null for a field that has a default.

    Raises:
        InputError: there is such a field. Null would get the default, and the file says something else.
    """
    for name, value in content.items():
        entry = fields.get(name, {})
        # A list of one value may stand for the value where Python takes a list.
        most = math.inf if entry.get("nargs") == "+" else int("several" in entry)
        if isinstance(value, list) and ("several" not in entry or len(value) > most):
            raise InputError(f"{name}={value!r:.80} is a list, and {name} takes one value")
        if isinstance(value, dict) and "mapping" not in entry:
            takes = "a list of values" if entry.get("nargs") == "+" else "one value"
            raise InputError(f"{name}={value!r:.80} is a mapping, and {name} takes {takes}")
        default = entry.get("default")
        if value is None and default is not None:
            raise InputError(
                f"{name} is null, and a config file cannot say that; leave it out for {default!r}, or give a value"
            )


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
        raise InputError(one_line(error)[:300] or type(error).__name__) from error
    return run, config


def resolved(run: RunArguments, config: Any) -> str:
    """Every field with its value, as YAML that can be used as a config file. Secrets are left out."""
    fields = {
        **dataclasses.asdict(run),
        **{f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init},
    }
    plain = without_secrets(json.loads(json.dumps(fields, default=_plain)))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    # YAML has escapes of its own, which a reader of the file understands.
    return text if visible(text) == text else yaml.safe_dump(plain, sort_keys=False)


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else str(getattr(value, "value", value))


def _words(content: dict[str, Any], fields: dict[str, dict[str, Any]]) -> list[str]:
    words: list[str] = []
    for name, value in content.items():
        if value is None or value == []:
            continue
        kind = fields.get(name, {}).get("type")
        if isinstance(value, list):
            words += [f"--{name}", *(_word(entry, kind) for entry in value)]
        else:
            # One word: a value may begin with a minus.
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else _word(value, kind)}")
    return words


def _word(value: Any, kind: str | None) -> str:
    """A value of a file as a word. Python reads YAML's ways to write a number in another form."""
    text = str(value)
    if kind == "int" and re.fullmatch(r"0o[0-7]+|0x[\da-fA-F]+", text, re.ASCII):
        return str(int(text, 0))
    return (
        text.replace(".", "") if kind == "float" and re.fullmatch(r"[-+]?\.(inf|nan)", text, re.I) else text
    )


@dataclasses.dataclass
class AdaptedRunArguments(RunArguments):
    """A run's model, data and reward, and the adapter that is trained instead of all weights."""

    use_peft: bool = option(False, "Train a LoRA adapter on the frozen model.", group="adapter", common=True)
    lora_r: int = option(
        16, "Rank of the adapter's matrices.", group="adapter", common=True, bounds=COUNT, only_with="peft"
    )
    lora_alpha: int = option(
        32, "The adapter counts alpha / r times.", group="adapter", bounds=COUNT, only_with="peft"
    )
    lora_dropout: float = option(
        0.0,
        "Kept with the adapter, and off in training: the engine has none.",
        group="adapter",
        bounds=Bounds(0, 1),
        only_with="peft",
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Layers that get it, or all-linear. Default: PEFT's for the model.",
        group="adapter",
        only_with="peft",
    )
    lora_modules_to_save: list[str] | None = option(
        None, "Modules trained as a whole beside it.", group="adapter", only_with="peft"
    )
    use_rslora: bool = option(False, "Count it alpha / √r times (rsLoRA).", group="adapter", only_with="peft")
    use_dora: bool = option(False, "Train magnitudes beside it (DoRA).", group="adapter", only_with="peft")
    load_in_4bit: bool = option(
        False, "Hold the frozen weights in 4 bits (QLoRA).", group="adapter", only_with="peft"
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option(
        "nf4", "Kind of 4 bits.", group="adapter", only_with=("peft", "four_bits")
    )
    use_bnb_nested_quant: bool = option(
        False, "Quantise their scales too.", group="adapter", only_with=("peft", "four_bits")
    )


def without_unused(
    given: Given, command: str, parts: Collection[Part], own: Mapping[str, Any] = MappingProxyType({})
) -> Given:
    """A command line without the fields that its command does not use.

    The file may be that of a run, so that nothing is said of the fields that only the file has.

    Args:
        parts: what the command does of a run.
        own: the fields that the command sets itself. They come after the user's words.
    """
    described = fields_of(command)
    lacking = {name: Part(field["part"]) for name, field in described.items() if "part" in field}
    unused = {name for name, part in lacking.items() if part not in parts} | own.keys()
    if typed := sorted(given.typed_names & unused):
        whats = [
            NOTHING_OF[part] for part in Part if any(lacking.get(n) == part for n in typed if n not in own)
        ]
        whats += ["decides that itself"] * bool(own.keys() & set(typed))
        tell_no_effect(typed, f"in lockstep {command}, which {' and '.join(whats)}")
    words = without(given.words, {f"--{prefix}{name}" for name in unused for prefix in ("", "no_")})
    words += [w for name, value in own.items() if value is not None for w in (f"--{name}", str(value))]
    values = {name: value for name, value in given.values.items() if name not in unused}
    return dataclasses.replace(given, words=tuple(words), values=values)


def without(words: Iterable[str], names: Collection[str]) -> list[str]:
    """Words of a command line without these fields and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        if not dropping:
            kept.append(word)
    return kept


def check_effect(given: RunArguments, source: Given | None = None) -> None:
    """Say which arguments of a command have no effect.

    Args:
        source: the words, for a command that does not train. The file may be that of a run, so that of an adapter's
            fields the typed ones are looked at, if `use_peft` is typed.

    Raises:
        InputError: an adapter field is set without `use_peft`, or a field of the 4-bit format without `load_in_4bit`.
    """
    named = set(set_fields(given))
    if source is not None and "use_peft" in (typed := source.typed_names):
        named &= _GENERAL | typed
    say_without_effect(given, named)


def adapter_arguments(given: AdaptedRunArguments) -> dict[str, Any]:
    """`peft_config` and `quantization_config` for a trainer; an empty dict if `use_peft` is off."""
    if not given.use_peft:
        return {}
    from peft import LoraConfig

    names = given.lora_target_modules
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=given.lora_r,
        lora_alpha=given.lora_alpha,
        lora_dropout=given.lora_dropout,
        target_modules="all-linear" if names == ["all-linear"] else names,
        modules_to_save=given.lora_modules_to_save,
        use_rslora=given.use_rslora,
        use_dora=given.use_dora,
    )
    return {"peft_config": lora, "quantization_config": _four_bits(given) if given.load_in_4bit else None}


def settings_of(given: AdaptedRunArguments) -> dict[str, Any]:
    """The fields that identify a run. The adapter fields are included only if `use_peft` is on."""
    aside = with_key(type(given), "bookkeeping")
    return {
        name: value
        for name, value in dataclasses.asdict(given).items()
        if (given.use_peft or name in _GENERAL) and name not in aside
    }


_GENERAL = {f.name for f in dataclasses.fields(RunArguments)}


def _four_bits(given: AdaptedRunArguments) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=given.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=given.use_bnb_nested_quant,
    )


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
    if arguments.agent_command is not None:
        words_of_command(arguments.agent_command)
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
    """Refuse a directory that is missing or holds no model.

    The packaged model is not checked: its conversion can take a while.

    Raises:
        InputError: as `resolve_model`.
    """
    if name.lower() != PACKAGED_MODEL:
        resolve_model(name)


def data_of(arguments: RunArguments) -> TaskData:
    """Load the data.

    Raises:
        InputError: no data is named, or the data cannot be loaded.
    """
    if arguments.dataset_name is None:
        raise InputError("dataset_name is not set")
    from lockstep.tasks.data import load_data

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
