"""Makes the text of `fields.json`: the fields of every method. The command line reads it without torch.

`scripts/reference_pages.py` writes the file again. `tests/cli/test_fields.py` fails if file and classes differ.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

from transformers import HfArgumentParser

from lockstep import extensions
from lockstep.config.checks import kinds_of
from lockstep.config.option import Bounds
from lockstep.config.table import options_of

_RUN = "lockstep.cli.fields:AdaptedRunArguments"
# The dataclasses whose fields are the fields of each command.
CLASSES = {
    "grpo": (_RUN, "lockstep:GRPOConfig"),
    "rloo": (_RUN, "lockstep:RLOOConfig"),
    "online-dpo": (_RUN, "lockstep:OnlineDPOConfig"),
    "reinforce-pp": (_RUN, "lockstep:ReinforcePPConfig"),
    "ppo": (_RUN, "lockstep:PPOConfig"),
    **extensions.FIELDS,
}
_TYPES = {int: "int", float: "float", str: "text"}
# What is said of a field that the command line needs.
_SAID = ("group", "common", "only", "no_effect", "only_with", "part", "inherited")


def describe() -> dict[str, dict[str, Any]]:
    """The fields by command. The fields that are equal in every command are under `shared`."""
    commands = {command: _fields_of(places) for command, places in CLASSES.items()}
    first, *others = commands.values()
    shared = {
        name: entry for name, entry in first.items() if all(other.get(name) == entry for other in others)
    }
    own = {
        command: {n: e for n, e in found.items() if n not in shared} for command, found in commands.items()
    }
    return {"shared": shared, **own}


def as_text(described: dict[str, dict[str, Any]]) -> str:
    """JSON with one line per field, so that two changes rarely touch the same line."""
    parts = []
    for command, found in described.items():
        lines = [
            f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in found.items()
        ]
        parts.append(f"{json.dumps(command)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _fields_of(places: tuple[str, ...]) -> dict[str, Any]:
    classes = [getattr(import_module(where), name) for where, name in (place.split(":") for place in places)]
    said: dict[str, dict[str, Any]] = {}
    kinds: dict[str, frozenset[str]] = {}
    for own in classes:
        said |= options_of(own)
        kinds |= kinds_of(own)
    # A switch that is on by default has a second action, which turns it off.
    actions = {
        a.dest: a for a in HfArgumentParser(classes)._actions if not isinstance(a, argparse._StoreFalseAction)
    }
    found = {name: _entry(actions[name], said[name]) for name in said if name in actions}
    for name, entry in found.items():
        takes = kinds.get(name, frozenset())
        entry |= {key: True for key, kind in (("mapping", "dict"), ("several", "list")) if kind in takes}
    return found


def _entry(action: argparse.Action, said: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "choice" if action.choices else _type(action)}
    if action.choices:
        entry["choices"] = [str(choice) for choice in action.choices]
    if action.nargs is not None:
        entry["nargs"] = action.nargs
    if (default := _default(action.default)) is not None:
        entry["default"] = default
    entry |= {key: said[key] for key in _SAID if key in said}
    if "bounds" in said:
        bounds = said["bounds"]._asdict().items()
        entry["bounds"] = {n: v for n, v in bounds if n != "usual" and v != Bounds._field_defaults[n]}
    return {**entry, "help": " ".join((said.get("help") or action.help or "").replace("%%", "%").split())}


def _type(action: argparse.Action) -> str:
    if getattr(action.type, "__name__", "") == "string_to_bool":
        return "bool"
    return next((name for kind, name in _TYPES.items() if action.type is kind), "other")


def _default(value: Any) -> str | None:
    if value is None or value == []:
        return None
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))
