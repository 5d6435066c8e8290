"""What `dir(lockstep)` and `help` show: the trainers and configs, each with a docstring that says how to use it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

import lockstep
from lockstep.config.table import options_of
from lockstep.run.trainers.online import OnlineTrainer

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = [name for name in lockstep.__all__ if name.endswith("Trainer")]
CONFIGS = [name for name in lockstep.__all__ if name.endswith("Config")]


def test_dir_shows_the_public_names_and_no_others() -> None:
    methods = {"GRPO", "RLOO", "OnlineDPO", "ReinforcePP", "PPO"}
    assert {*TRAINERS, *CONFIGS} == {method + kind for method in methods for kind in ("Trainer", "Config")}
    assert [name for name in dir(lockstep) if not name.startswith("__")] == sorted(lockstep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrain'"):
        lockstep.GRPOTrain  # noqa: B018


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    thing = getattr(lockstep, name)
    # `inspect.getdoc` would also give the docstring of a base class.
    text = vars(thing)["__doc__"] if inspect.isclass(thing) else thing.__doc__
    assert len(text.split()) >= 6
    # A dataclass without a docstring gets its signature as one.
    assert not text.startswith(f"{name}(")


@pytest.mark.parametrize("name", TRAINERS)
def test_help_of_a_trainer_shows_an_example_and_leads_to_every_argument(name: str) -> None:
    trainer = getattr(lockstep, name)
    text = trainer.__doc__
    assert f"trainer = {name}(" in text
    assert f"config = {trainer.config_class.__name__}(" in text
    assert f"{OnlineTrainer.__module__}.{OnlineTrainer.__name__}" in text
    explained = {
        name
        for doc in (text, OnlineTrainer.__doc__ or "")
        for names in re.findall(r"^ {8}([a-z_]+(?:, [a-z_]+)*): ", doc, re.M)
        for name in names.split(", ")
    }
    for parameter in inspect.signature(trainer).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        assert parameter.name in explained


@pytest.mark.parametrize("name", CONFIGS)
def test_help_of_a_config_explains_every_field_of_ours_that_does_something(name: str) -> None:
    config = getattr(lockstep, name)
    aside = {field.name for field in dataclasses.fields(TrainingArguments)}
    aside |= {name for name, said in options_of(config).items() if said.keys() & {"only", "no_effect"}}
    own = [field.name for field in dataclasses.fields(config) if field.init and field.name not in aside]
    assert len(own) > 40
    assert [field for field in own if not re.search(rf"^ {{8}}{field} \(", config.__doc__, re.M)] == []
    assert re.findall(r"^ {8}\w+ \(.*\):\s*$", config.__doc__, re.M) == []


def test_every_import_that_a_page_shows_works() -> None:
    """Whoever copies a line from a page expects it to work, wherever the names stand by now."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        line
        for page in pages
        for line in re.findall(r"^from lockstep[\w.]* import [\w, ]+$", page.read_text(), re.M)
    }
    assert "from lockstep.engines import connect" in shown
    for line in sorted(shown):
        exec(line, {})
