"""The fields of a command without torch: names, types and help, config files, recipes, the parser of light commands.

The fields come from `fields.json`, which is written from the methods' dataclasses. The dataclasses of a command line
are made after its names and types were checked here. A YAML file names each field once, with a value, a list of values
or a mapping. In a clone, the recipes stand behind a link (`src/lockstep/recipes`); the wheel contains the files.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

import lockstep
from lockstep.config.checks import check_possible, numbers_of
from lockstep.config.option import GROUPS, OTHERS, Bounds, refuse_other_value
from lockstep.config.other_names import hint_of
from lockstep.errors import InputError, did_you_mean, no_choice, one_line

RECIPES = Path(lockstep.__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of all recipes, in alphabetical order."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """The file of a recipe.

    Raises:
        InputError: there is no recipe of that name; the message names the recipes.
    """
    names = recipe_names()
    if name not in names:
        raise InputError(f"no recipe {name!r}; {no_choice(name, names, 'recipes')}")
    return RECIPES / f"{name}.yaml"


FIELDS_FILE = Path(__file__).with_name("fields.json")
# Commands that take the fields of another one.
_SAME = {"evaluate": "grpo"}
_HELP = ("-h", "--help", "--help_all")
_NAMES = {"int": "N", "float": "X", "text": "TEXT", "bool": "YES/NO", "choice": "NAME", "other": "VALUE"}
_TRUTH = {"yes": True, "true": True, "t": True, "y": True, "1": True}
_TRUTH |= {"no": False, "false": False, "f": False, "n": False, "0": False}
_LONGEST_CHOICES = 60


def fields_of(command: str) -> dict[str, dict[str, Any]]:
    """The entry of each field of a command: `type`, `help`, and what else applies to it.

    That is `default`, `choices`, `nargs`; `mapping` or `several` if it takes a mapping or a list; `group`, `common`,
    `bounds`, `only`, `no_effect` as in `config/option.py`; and `inherited` for fields of transformers.
    """
    described = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return {**described["shared"], **described[_SAME.get(command, command)]}


def underscored(word: str) -> str:
    """`--self-test=x` becomes `--self_test=x`; the parser of transformers does the same."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def check_words(words: list[str], fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Check names and types of `--field value` words.

    Returns:
        The values given, by field.

    Raises:
        InputError: a value has the wrong type, is out of its bounds, is not among the choices, or is not supported.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, field in fields.items():
        _add(parser, name, field, "")
    given = vars(parser.parse_args(words))
    for name, value in given.items():
        if "only" in fields[name]:
            refuse_other_value(name, value, fields[name]["only"])
        bounds = fields[name].get("bounds")
        for number in numbers_of(value):
            check_possible(name, number, None if bounds is None else Bounds(**bounds))
    return given


def check_text(words: list[str]) -> None:
    """Refuse words that no file name and no text can hold.

    Raises:
        InputError: there is such a word.
    """
    is_unicode = sys.getfilesystemencoding() == "utf-8"
    for word in words:
        try:
            has_zero = b"\0" in os.fsencode(word)
            # Bytes that this locale cannot read are halves of characters here.
            word.encode()
        except UnicodeEncodeError as error:
            half = "\ud800" <= word[error.start] <= "\udfff"
            if half and word.startswith("--") and "=" not in word:
                # No field has such a name, which is said later.
                continue
            if half and (is_unicode or not "\udc80" <= word[error.start] <= "\udcff"):
                raise InputError(f"{word!r:.80} holds a character that is not text") from error
            raise InputError(
                f"{word!r:.80} holds a character that file names cannot have in this locale "
                f"({sys.getfilesystemencoding()}); set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
            ) from error
        if has_zero:
            raise InputError(f"{word!r:.80} holds a character that is not text")


def check_names(names: list[str], fields: dict[str, Any], where: str) -> None:
    """Refuse names that are not fields.

    Raises:
        InputError: a name is not a field. The message suggests the field with the closest name.
    """
    for name in names:
        if name not in fields and not (name.startswith("no_") and name[3:] in fields):
            hint = hint_of(name, fields) or did_you_mean(name, fields)
            raise InputError(f"unknown field {name!r} in {where}" + (f"; {hint}" if hint else ""))


def asks_for_help(words: list[str]) -> bool:
    """Whether `--help` or `--help-all` is among the words."""
    return any(word in _HELP for word in words)


def help_text(command: str, about: str, words: list[str]) -> str:
    """The help of a command: its common fields under headings.

    `--help-all` shows all fields that allow more than one value.
    """
    whole = "--help_all" in words
    parser = _Parser(
        prog=f"lockstep {command}",
        usage=f"lockstep {command} [--config FILE | --recipe NAME] [--field value …]",
        description=about,
        add_help=False,
        formatter_class=_Formatter,
        epilog=None
        if whole
        else f"lockstep {command} --help-all lists every field. A switch takes --name, --name True or --name False.",
    )
    general = parser.add_argument_group("command")
    general.add_argument("--config", metavar="FILE", help="YAML file of fields; the command line wins.")
    general.add_argument(
        "--recipe", metavar="NAME", help=f"Read the config of a recipe ({', '.join(recipe_names())})."
    )
    general.add_argument("--dry_run", action="store_true", help="Print every field with its value, and stop.")
    fields = fields_of(command)
    for title, names in grouped(fields).items():
        shown = [name for name in names if whole or "common" in fields[name]]
        group = parser.add_argument_group(title)
        for name in shown:
            _add(group, name, fields[name], _line(fields[name], whole=whole), negation=False)
    return parser.format_help()


def is_shown(field: dict[str, Any]) -> bool:
    """Whether help and reference show a field: it has more than one value."""
    return not field.keys() & {"only", "no_effect"}


def grouped(fields: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the fields that are shown, under each heading: common fields first, fields of transformers last."""
    names = sorted(fields, key=lambda name: ("common" not in fields[name], "inherited" in fields[name]))
    shown = [name for name in names if is_shown(fields[name])]
    return {
        title: [n for n in shown if fields[n].get("group", OTHERS) == title] for title in (*GROUPS, OTHERS)
    }


def _line(field: dict[str, Any], *, whole: bool) -> str:
    text = field["help"] if whole else field["help"].partition(". ")[0].rstrip(".")
    choices = ", ".join(field.get("choices", ()))
    if choices and len(choices) <= _LONGEST_CHOICES:
        text += f" ({choices})"
    said = "efault" in field["help"]
    if (
        "default" in field
        and not (said and whole)
        and field["default"] not in ("", "false")
        and len(field["default"]) < 20
    ):
        text += f" [{field['default']}]"
    return text.replace("%", "%%")


def _add(parser: Any, name: str, field: dict[str, Any], text: str, *, negation: bool = True) -> None:
    kind = field["type"]
    options: dict[str, Any] = {"help": text, "dest": name, "metavar": _NAMES[kind]}
    if kind == "choice":
        options["type"] = functools.partial(_choice, field["choices"])
    elif kind != "other":
        options["type"] = {"int": int, "float": float, "text": str, "bool": _truth}[kind]
    if "nargs" in field:
        options["nargs"] = field["nargs"]
        if field["nargs"] == "?":
            options["const"] = True
    parser.add_argument(f"--{name}", **options)
    if negation and kind == "bool" and field.get("default") == "true":
        parser.add_argument(f"--no_{name}", dest=name, action="store_false")


def _choice(choices: list[str], text: str) -> str:
    if text in choices:
        return text
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; {no_choice(text, choices, 'choices')}")


def _truth(text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return _TRUTH[text.lower()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 120) - 2
        super().__init__(prog, max_help_position=36, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # The name alone turns a switch on. The end of the page says that a value may follow the name.
        return action.option_strings[0] if action.nargs == "?" else super()._format_action_invocation(action)


# Configs of all fields have a few KiB.
_LARGEST = 1 << 20
_NULL, _BOOL, _INT, _FLOAT, _TEXT = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")
)


def read_file(path: str) -> dict[str, Any]:
    """The fields of a config file.

    Raises:
        InputError: the file is missing, is not text, is not YAML, names a field twice, or has values of another form.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"config file {path or '(no name)'} does not exist")
    try:
        with file.open("rb") as opened:
            text = opened.read(_LARGEST + 1)
    except OSError as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    if len(text) > _LARGEST:
        raise InputError(
            f"config file {path} has more than {_LARGEST >> 20} MiB; it must hold fields with values, one per line"
        )
    try:
        content = yaml.load(text.decode("utf-8-sig"), Loader=_Fields)
    except UnicodeDecodeError as error:
        raise InputError(
            f"config file {path} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except RecursionError as error:
        raise InputError(f"config file {path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a date or a number that YAML recognises and Python cannot represent.
        raise InputError(f"config file {path} is not YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"config file {path} must hold fields with values, one per line")
    for name, value in content.items():
        _check_value(path, name, value)
    return content


def _check_value(path: str, name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise InputError(f"config file {path}: {name!r} is not the name of a field")
    is_nested = isinstance(value, list) and any(isinstance(entry, list | dict | None) for entry in value)
    if is_nested or not _is_plain(value):
        raise InputError(f"config file {path}: {name} must be a value, a list of values or a mapping")


def _is_plain(value: Any) -> bool:
    """Whether JSON can say a value. YAML has tags for bytes, sets and dates."""
    if isinstance(value, dict):
        return _is_plain(list(value)) and _is_plain(list(value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | bool | int | float | None)


class _Fields(yaml.SafeLoader):
    """YAML 1.2 without repeated keys, of which the last would win in silence, and without aliases, which can grow
    without bound.

    YAML 1.1, which the base class reads, takes yes and on for booleans, 010 for 8, 1:30 for 90, and 2026-11-28 for a
    date. The value of a field itself stays the text that was written, because the field knows its type.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not supported", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if isinstance(node, yaml.MappingNode):
            for _, value in node.value:
                for entry in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if entry.tag in (_BOOL, _INT, _FLOAT):
                        entry.tag = _TEXT
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)


for _tag, _form, _first in (
    (_NULL, r"~|null|Null|NULL|", [*"~nN", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    (_INT, r"[-+]?\d+|0o[0-7]+|0x[\da-fA-F]+", [*"-+0123456789"]),
    (_FLOAT, r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", [*"-+.0123456789"]),
    (_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
):
    _Fields.add_implicit_resolver(_tag, re.compile(rf"(?:{_form})\Z", re.ASCII), _first)
_Fields.add_constructor(_INT, _Fields.construct_int)


class WordParser(argparse.ArgumentParser):
    """argparse with whole names only. A mistake raises `InputError`, so that it gets one line and exit code 2."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        check_text(args or [])
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise InputError(message)
