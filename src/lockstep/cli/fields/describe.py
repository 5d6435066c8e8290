"""Writes `fields.json`: the fields of every method. The command line reads it without torch.

`python -m lockstep.cli.fields.describe` writes the file again. `tests/cli/test_fields.py` fails if file and classes differ.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

from transformers import HfArgumentParser

from lockstep import extensions
from lockstep.cli.fields.description import FIELDS_FILE
from lockstep.files import replace_text

_RUN = "lockstep.cli.fields.adapter:AdaptedRunArguments"
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
# What fields of transformers mean here, where its own help says something else.
_HERE = {
    "metric_for_best_model": "Metric of an evaluation by which `load_best_model_at_end` chooses. Default: reward.",
    "save_strategy": "When checkpoints are written: no, steps, epoch, or best (after an evaluation that is the best so far).",
    "resume_from_checkpoint": "A checkpoint from which `trainer.train()` goes on. Commands go on by themselves, and refuse it.",
    "optim": "The optimizer. Those that step inside the backward (lomo, layerwise, schedule_free) are refused.",
}


def describe() -> dict[str, dict[str, Any]]:
    """The fields by command. The fields that are equal in every command are under `shared`."""
    commands = {command: _fields_of(places) for command, places in CLASSES.items()}
    first, *others = commands.values()
    shared = {name: entry for name, entry in first.items() if all(other.get(name) == entry for other in others)}
    own = {command: {n: e for n, e in found.items() if n not in shared} for command, found in commands.items()}
    return {"shared": shared, **own}


def as_text(described: dict[str, dict[str, Any]]) -> str:
    """JSON with one line per field, so that two changes rarely touch the same line."""
    parts = []
    for command, found in described.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in found.items()]
        parts.append(f"{json.dumps(command)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _fields_of(places: tuple[str, ...]) -> dict[str, Any]:
    classes = [getattr(import_module(where), name) for where, name in (place.split(":") for place in places)]
    actions = HfArgumentParser(classes)._actions
    # A switch that is on by default has a second action, which turns it off.
    return {a.dest: _entry(a) for a in actions if a.dest != "help" and not isinstance(a, argparse._StoreFalseAction)}


def _entry(action: argparse.Action) -> dict[str, Any]:
    said: dict[str, Any] = {"type": "choice" if action.choices else _type(action)}
    if action.choices:
        said["choices"] = [str(choice) for choice in action.choices]
    if action.nargs is not None:
        said["nargs"] = action.nargs
    if (default := _default(action.default)) is not None:
        said["default"] = default
    return {**said, "help": " ".join((_HERE.get(action.dest) or action.help or "").replace("%%", "%").split())}


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


if __name__ == "__main__":
    replace_text(FIELDS_FILE, as_text(describe()))
