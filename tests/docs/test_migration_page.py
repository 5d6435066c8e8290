"""docs/reference/migrating-from-trl.md is true of TRL's code and of ours; what has no row is as in TRL."""

from __future__ import annotations

import ast
import inspect
import os
import re
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import lockstep
from lockstep.errors import InputError

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")
from trl.experimental import online_dpo  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migrating-from-trl.md"
# The names of the classes, by the column of the tables.
METHODS = {"GRPO": "GRPO", "RLOO": "RLOO", "Online DPO": "OnlineDPO"}
STATUSES = {"same", "different", "refused"}


@dataclass(frozen=True)
class Line:
    """One row of the page about a field or argument; its cells have one value, or one per trainer with the field."""

    status: str
    trl: str
    ours: str
    reason: str


def theirs(method: str, kind: str) -> Any:
    return getattr(online_dpo if method == "Online DPO" else trl, METHODS[method] + kind)


def ours(method: str, kind: str) -> Any:
    return getattr(lockstep, METHODS[method] + kind)


@cache
def table(section: str, first: str) -> dict[str, Line]:
    """The rows of the table in a section whose first column is called `first`, by the name in this column."""
    text = PAGE.read_text().split(f"\n{section}\n", 1)[1]
    text = text.split("\n## ", 1)[0]
    head, _, *rows = re.split(rf"\n(?=\| {first} \|)", text, maxsplit=1)[1].split("\n\n", 1)[0].splitlines()
    names = cells(head)
    found: dict[str, Line] = {}
    for row in rows:
        values = dict(zip(names, cells(row), strict=True))
        name = values[first].strip("`")
        assert name not in found, f"{name} has two rows"
        assert values["status"] in STATUSES, name
        there = values.get("TRL", "")
        found[name] = Line(values["status"], there, values.get("here") or there, values[names[-1]])
    return found


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def value_of(cell: str, name: str, method: str) -> Any:
    """The value for a method of a cell with one value for all trainers that have the field, or with one for each."""
    having = [m for m in METHODS if name in added(theirs(m, "Config"))] or list(METHODS)
    values = [ast.literal_eval(part.strip().strip("`")) for part in cell.split(" · ")]
    assert len(values) in (1, len(having)), cell
    return values[0] if len(values) == 1 else values[having.index(method)]


def default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


PLAIN = {f.name: default(f) for f in fields(TrainingArguments) if f.init}


def added(config: Any) -> dict[str, Any]:
    """The fields that a config adds to TrainingArguments, or to which it gives another default, with this default."""
    found = {f.name: default(f) for f in fields(config) if f.init}
    return {name: value for name, value in found.items() if name not in PLAIN or PLAIN[name] != value}


def own(method: str) -> dict[str, Any]:
    return {f.name: default(f) for f in fields(ours(method, "Config")) if f.init}


def plain_types(hint: Any) -> set[type]:
    """The classes that a type hint names, without None. A float hint also accepts an int, and a list hint a tuple."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(plain_types(part) for part in typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return {type(value) for value in typing.get_args(hint)}
    base = typing.get_origin(hint) or hint
    also = {float: {int}, list: {tuple}}.get(base, set())
    return set() if base is type(None) else {base} | also


def other(value: Any, hint: Any) -> Any:
    """A value of the type that is not `value` and not neutral."""
    kinds = plain_types(hint)
    if bool in kinds:
        return not value
    if kinds & {dict} and str in kinds:
        return {"key": 1}
    return next(
        (
            made
            for kind, made in ((str, "another"), (dict, {"key": 1}), (float, 0.37), (int, 3))
            if kind in kinds
        ),
        1,
    )


def rows_of_fields() -> list[tuple[str, str]]:
    return [(method, name) for method in METHODS for name in added(theirs(method, "Config"))]


def config(method: str, **given: Any) -> Any:
    return ours(method, "Config")(output_dir="unused", **given)


@pytest.mark.parametrize(("method", "name"), rows_of_fields())
def test_every_field_of_trl_is_as_its_row_says_or_as_in_trl(method: str, name: str) -> None:
    default_there = added(theirs(method, "Config"))[name]
    line = table("## Config fields", "field").get(name)
    if line is None:
        check_same(method, name, default_there)
    else:
        check_field(method, name, line, default_there)


def check_same(method: str, name: str, default_there: Any) -> None:
    """The field has TRL's default and takes the types that TRL's field takes."""
    made, hints = own(method), typing.get_type_hints(ours(method, "Config"))
    assert name in made
    assert made[name] == default_there, f"{name} of TRL's {method} has no row"
    missing = plain_types(typing.get_type_hints(theirs(method, "Config"))[name]) - plain_types(hints[name])
    assert not missing, f"{name} does not take {missing}"
    assert not refused(method, name, other(made[name], hints[name]))
    config(method, **{name: default_there})


def check_field(method: str, name: str, line: Line, default_there: Any) -> None:
    status, made = line.status, own(method)
    assert value_of(line.trl, name, method) == default_there
    assert name in made or status == "refused"
    if status == "same":
        check_same(method, name, default_there)
        return
    if name in made:
        assert value_of(line.ours, name, method) == made[name]
    assert line.reason or (status == "different" and made[name] != default_there)
    hints = typing.get_type_hints(ours(method, "Config"))
    refusal = refused(method, name, other(made.get(name), hints.get(name, str)))
    assert refusal == (status == "refused")
    if (name in made and status != "refused") or made.get(name) == default_there:
        # TRL's default is accepted.
        config(method, **{name: default_there})


@pytest.mark.parametrize("name", table("## Config fields", "field"))
def test_no_row_is_of_a_field_that_trl_does_not_have(name: str) -> None:
    assert any(name in added(theirs(method, "Config")) for method in METHODS)


def refused(method: str, name: str, value: Any) -> bool:
    """Whether a value is refused because of its field, and not because the field cannot have this value."""
    try:
        config(method, **COMPANIONS.get(name, {}), **{name: value})
    except (InputError, TypeError) as error:
        return (
            re.search(rf"^{name}=.* not supported|unexpected keyword argument '{name}'", str(error))
            is not None
        )
    except (ValueError, ImportError, AttributeError):
        return False
    return False


UNCHANGED = "Fields that TRL leaves as they are in `TrainingArguments`, and that differ here in all three:"


@pytest.mark.parametrize("name", table(UNCHANGED, "field"))
def test_rows_of_training_arguments_are_true(name: str) -> None:
    line = table(UNCHANGED, "field")[name]
    for method in METHODS:
        assert name not in added(theirs(method, "Config"))
        assert value_of(line.trl, name, method) == PLAIN[name]
        made = own(method)
        assert value_of(line.ours, name, method) == made[name]
        if line.status == "refused":
            assert refused(method, name, unusual(name))
        else:
            assert made[name] != PLAIN[name]
            config(method, **{name: PLAIN[name]})


@pytest.mark.parametrize("name", PLAIN)
def test_every_field_of_training_arguments_that_is_refused_has_a_row(name: str) -> None:
    if refused("GRPO", name, unusual(name)):
        assert name in table("## Config fields", "field") or name in table(UNCHANGED, "field")


def unusual(name: str) -> Any:
    return UNUSUAL[name] if name in UNUSUAL else other(own("GRPO")[name], HINTS[name])


HINTS = typing.get_type_hints(TrainingArguments)
# Fields that transformers itself requires together with a field.
COMPANIONS = {"load_best_model_at_end": {"eval_strategy": "steps", "save_strategy": "steps"}}
UNUSUAL: dict[str, Any] = {
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "include_num_input_tokens_seen": "all",
    "torch_empty_cache_steps": 2,
    "dataloader_num_workers": 2,
    "resume_from_checkpoint": "checkpoint-1",
    "train_sampling_strategy": "sequential",
}


@pytest.mark.parametrize("method", METHODS)
def test_every_default_that_is_not_trls_has_a_row(method: str) -> None:
    known = {**table("## Config fields", "field"), **table(UNCHANGED, "field")}
    defaults = {f.name: default(f) for f in fields(theirs(method, "Config")) if f.init}
    assert {n for n, value in own(method).items() if n in defaults and defaults[n] != value} <= known.keys()


def arguments(trainer: Any) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in inspect.signature(trainer.__init__).parameters.items() if n != "self"}


@pytest.mark.parametrize(
    ("method", "name"), [(m, n) for m in METHODS for n in arguments(theirs(m, "Trainer"))]
)
def test_every_argument_of_trl_is_as_its_row_says_or_as_in_trl(method: str, name: str) -> None:
    line = table("## Constructor arguments", "argument").get(name)
    mine, trainer = arguments(ours(method, "Trainer")), ours(method, "Trainer")
    if line is not None and line.status == "refused":
        assert line.reason
        with pytest.raises((InputError, TypeError), match=name):
            trainer("model", **{"reward_funcs": len, name: object()})
        return
    assert name in mine, f"{name} of TRL's {method} has no row"
    place = list(arguments(theirs(method, "Trainer"))).index(name)
    assert list(mine).index(name) == place, "by position it would be another one"
    there = arguments(theirs(method, "Trainer"))[name].default
    assert mine[name].default == there or there is inspect.Parameter.empty
    assert line is None or line.status == "same" or line.reason


@pytest.mark.parametrize("name", table("## Constructor arguments", "argument"))
def test_no_row_is_of_an_argument_that_trl_does_not_have(name: str) -> None:
    assert any(name in arguments(theirs(method, "Trainer")) for method in METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_everything_that_is_only_here_is_named(method: str) -> None:
    text = PAGE.read_text().split("\n## Added\n", 1)[1].split("\n## ", 1)[0]
    more = own(method).keys() - {f.name for f in fields(theirs(method, "Config"))}
    # Refused fields are in all of our configs and in the tables; all others are on the page of fields.
    listed = text + (PAGE.parent / "fields.md").read_text()
    table_names = table("## Config fields", "field")
    assert {n for n in more if f"`{n}`" not in listed and n not in table_names} == set()
    mine = arguments(ours(method, "Trainer")).keys() - arguments(theirs(method, "Trainer")).keys()
    assert {n for n in mine - {"refused"} if f"`{n}`" not in text} == set()


def test_the_address_at_which_trls_server_listens_is_this_machine() -> None:
    made = config("GRPO", vllm_mode="server", vllm_server_host="0.0.0.0", vllm_server_port=8123)
    assert made.server_urls == ["http://127.0.0.1:8123"]
    assert config("GRPO", vllm_mode="server", vllm_server_host="10.0.0.7").server_urls == [
        "http://10.0.0.7:8000"
    ]
