"""The fields of a command, read without importing torch. Checks their names and types, and makes the text of `--help`.

Comes from: `fields.json`, which is written from the methods' dataclasses. Goes to: the dataclasses of a command line,
which are made after its check.
"""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

from lockstep.cli.fields.groups import COMMON, GROUPS, OTHERS
from lockstep.cli.fields.recipes import recipe_names
from lockstep.errors import InputError
from lockstep.training.config.fields.trl import (
    INSTEAD,
    ONE_VALUE,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    refuse_other_value,
    refuse_unsupported,
)

FIELDS_FILE = Path(__file__).with_name("fields.json")
# Commands that take the fields of another one.
_SAME = {"evaluate": "grpo"}
_HELP = ("-h", "--help", "--help_all")
_NAMES = {"int": "N", "float": "X", "text": "TEXT", "bool": "YES/NO", "choice": "NAME", "other": "VALUE"}
_TRUTH = {"yes": True, "true": True, "t": True, "y": True, "1": True}
_TRUTH |= {"no": False, "false": False, "f": False, "n": False, "0": False}
_LONGEST_CHOICES = 60


def fields_of(command: str) -> dict[str, dict[str, Any]]:
    """The entry of each field of a command: `type`, `help`, and if they apply `default`, `choices`, `nargs`."""
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
        InputError: a value has the wrong type, is not among the choices, or is not supported.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, field in fields.items():
        _add(parser, name, field, "")
    given = vars(parser.parse_args(words))
    for name in given.keys() & ONE_VALUE.keys():
        # Here a mapping is still text; the dataclass parses it later.
        if not str(given[name]).startswith("{"):
            refuse_other_value(name, given[name])
    for name in given.keys() & UNSUPPORTED.keys():
        refuse_unsupported(name, given[name])
    return given


def check_names(names: list[str], fields: dict[str, Any], where: str) -> None:
    """Refuse names that are not fields.

    Raises:
        InputError: a name is not a field. The message suggests the field with the closest name.
    """
    for name in names:
        if name not in fields and not (name.startswith("no_") and name[3:] in fields):
            close = difflib.get_close_matches(name, fields, 1)
            hint = INSTEAD.get(name) or (f"did you mean {close[0]!r}?" if close else "")
            raise InputError(f"unknown field {name!r} in {where}" + (f"; {hint}" if hint else ""))


def asks_for_help(words: list[str]) -> bool:
    """Whether `--help` or `--help-all` is among the words."""
    return any(word in _HELP for word in words)


def help_text(command: str, about: str, words: list[str]) -> str:
    """The help of a command: its common fields under headings. `--help-all` shows all fields that allow more than one value."""
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
    general.add_argument("--recipe", metavar="NAME", help=f"Read the config of a recipe ({', '.join(recipe_names())}).")
    general.add_argument("--dry_run", action="store_true", help="Print every field with its value, and stop.")
    fields, refused = fields_of(command), {*ONE_VALUE, *UNSUPPORTED, *WITHOUT_EFFECT}
    for title, names in _grouped(fields).items():
        shown = [name for name in names if name not in refused and (whole or name in COMMON)]
        group = parser.add_argument_group(title)
        for name in shown:
            _add(group, name, fields[name], _line(fields[name], whole=whole), negation=False)
    return parser.format_help()


def _grouped(fields: dict[str, Any]) -> dict[str, list[str]]:
    named = {name for names in GROUPS.values() for name in names}
    groups = {title: [name for name in names if name in fields] for title, names in GROUPS.items()}
    return {**groups, OTHERS: [name for name in fields if name not in named]}


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
        options["choices"] = field["choices"]
    elif kind != "other":
        options["type"] = {"int": int, "float": float, "text": str, "bool": _truth}[kind]
    if "nargs" in field:
        options["nargs"] = field["nargs"]
        if field["nargs"] == "?":
            options["const"] = True
    parser.add_argument(f"--{name}", **options)
    if negation and kind == "bool" and field.get("default") == "true":
        parser.add_argument(f"--no_{name}", dest=name, action="store_false")


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
