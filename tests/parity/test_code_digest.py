"""The digest of a reward function changes with what the function computes in the user's own files, and with nothing else."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lockstep
from lockstep.parity.resume.code_digest import code_digest
from lockstep.whose_code import is_installed, is_users

HELPER = "def helped(x):\n    return x + 1\n"
FILE = """
import math
import helper_of_rewards

WEIGHTS = {"a": 1.0}
calls = 0

class Table:
    size = 3

    def at(self, x):
        return x * self.size

def other():
    return 1

def inner(x):
    return Table().at(x)

def score(completions, **_):
    global calls
    calls += 1
    return [inner(len(c)) * WEIGHTS["a"] + helper_of_rewards.helped(math.pi) for c in completions]
"""
NAMES = ("rewards_for_digest", "helper_of_rewards")


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    """A function that gives `score` of a file with this text, beside a helper file."""
    sys.path.insert(0, str(tmp_path))

    def loaded(text: str = FILE, helper: str = HELPER) -> Any:
        for name in NAMES:
            sys.modules.pop(name, None)
        for name, content in zip(NAMES, (text, helper), strict=True):
            path = tmp_path / f"{name}.py"
            path.unlink(missing_ok=True)
            path.write_text(content)
        importlib.invalidate_caches()
        spec = importlib.util.spec_from_file_location(NAMES[0], tmp_path / f"{NAMES[0]}.py")
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[NAMES[0]] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module.score

    yield loaded
    sys.path.remove(str(tmp_path))
    for name in NAMES:
        sys.modules.pop(name, None)


CHANGES = {
    "its own text": ("global calls", "global calls  # and more"),
    "a function that it calls": ("return Table().at(x)", "return Table().at(x) + 1"),
    "a class two calls away": ("size = 3", "size = 4"),
    "a table of constants": ('"a": 1.0', '"a": 2.0'),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_the_function_uses_changes_the_digest(load: Any, what: str) -> None:
    before = code_digest(load())
    assert code_digest(load(FILE.replace(*CHANGES[what]))) != before
    assert code_digest(load()) == before


def test_a_change_in_another_file_of_the_users_changes_the_digest(load: Any) -> None:
    before = code_digest(load())
    assert code_digest(load(helper=HELPER.replace("+ 1", "+ 2"))) != before


def test_what_the_function_does_not_use_does_not_count(load: Any) -> None:
    before = code_digest(load())
    assert code_digest(load(FILE.replace("def other():\n    return 1", "def another():\n    return 2"))) == before


def test_a_call_does_not_change_the_digest(load: Any) -> None:
    score = load()
    before = code_digest(score)
    score(["ab"])
    assert code_digest(score) == before


class Counting:
    def __init__(self, scale: float) -> None:
        self.scale, self.calls = scale, 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        return [self.scale for _ in completions]


def test_an_object_counts_with_the_values_that_it_was_made_with() -> None:
    one = Counting(1.0)
    before = code_digest(one)
    one(["a"])
    assert code_digest(one) == before == code_digest(Counting(1.0))
    assert code_digest(Counting(2.0)) != before


def scaled(completions: list[str], scale: float, **_: Any) -> list[float]:
    return [scale for _ in completions]


def test_the_arguments_of_a_partial_function_and_the_cells_of_a_closure_count() -> None:
    def closed(scale: float) -> Any:
        return lambda completions, **_: [scale for _ in completions]

    for make in (lambda scale: functools.partial(scaled, scale=scale), closed):
        assert code_digest(make(1.0)) == code_digest(make(1.0)) != code_digest(make(2.0))


def test_a_models_weights_count() -> None:
    model = torch.nn.Linear(2, 1)
    before = code_digest(model)
    with torch.no_grad():
        model.weight[0, 0] *= 1.01
    assert code_digest(model) != before


def test_a_wrapper_of_a_built_in_function_has_a_digest() -> None:
    @functools.wraps(dict.update)
    def wrapper(*given: Any) -> None:
        dict.update(*given)

    def reward(completions: list[str], **_: Any) -> None:
        wrapper({}, {})

    assert code_digest(reward) == code_digest(reward)


# ---- the user's own code, and installed code ---------------------------------------------------------------------------

PACKAGE = "class Base:\n    size = 1\n\ndef helped(x):\n    return Base.size + x\n"


def write_package(folder: Path, name: str, kind: str) -> str:
    """A package with the metadata that each way to install it leaves. Returns its file."""
    (folder / name).mkdir(parents=True)
    file = folder / name / "__init__.py"
    file.write_text(PACKAGE)
    facts = folder / f"{name}-1.0.{'dist-info' if kind in ('pip', 'editable') else 'egg-info'}"
    facts.mkdir()
    (facts / ("METADATA" if kind in ("pip", "editable") else "PKG-INFO")).write_text(f"Name: {name}\nVersion: 1.0\n")
    if kind == "pip":
        (facts / "RECORD").write_text(f"{name}/__init__.py,sha256=x,1\n{facts.name}/RECORD,,\n../../../bin/x,,\n")
    elif kind == "editable":
        (facts / "RECORD").write_text(f"__editable__.{name}.pth,,\n{name},,\n")
        (facts / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": "file:///x"}))
    elif kind == "a project's folder":
        (facts / "SOURCES.txt").write_text(f"{name}/__init__.py\n")
    (facts / "top_level.txt").write_text(f"{name}\n")
    return str(file)


KINDS = {"pip": True, "a Linux distribution": True, "editable": False, "a project's folder": False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", [False, True], ids=["in its place", "by a link"])
def test_what_is_installed_is_what_python_knows_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    """The folder stands for one of the system's packages, or one that a `.pth` file names."""
    folder = tmp_path / "packages"
    file = write_package(folder, "package_for_digest", kind)
    beside = folder / "rewards_beside_packages.py"
    beside.write_text("def score(completions, **_):\n    return [1.0 for c in completions]\n")
    if linked:
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    monkeypatch.syspath_prepend(str(folder))
    assert is_installed(file) is KINDS[kind]
    # A file that the user has put beside packages is the user's own.
    assert not is_installed(str(beside))


def test_python_and_lockstep_and_packages_are_not_the_users_and_a_file_with_such_a_name_is(tmp_path: Path) -> None:
    assert not any(map(is_users, (json.loads, Path, pytest.fixture, torch.nn.Linear, len, lockstep.GRPOTrainer)))
    assert is_users(score_of_here)
    assert is_users(Counting)
    for name in ("json.py", "torch.py"):
        assert not is_installed(str(tmp_path / name))


def score_of_here(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_a_function_or_class_that_was_typed_into_a_prompt_is_the_users() -> None:
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec("class Typed:\n    size = 3\n\ndef score(completions, **_):\n    return Typed.size", typed)
    with patch.dict(vars(sys.modules["__main__"])):
        vars(sys.modules["__main__"]).pop("__file__", None)
        assert is_users(typed["Typed"])
        assert code_digest(typed["score"]) == code_digest(typed["score"])


def test_a_package_outside_of_this_environment_is_not_read(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(write_package(tmp_path / "system", "package_for_digest", "pip"))
    monkeypatch.syspath_prepend(str(tmp_path / "system"))
    monkeypatch.delitem(sys.modules, "package_for_digest", raising=False)
    text = "import package_for_digest\n" + FILE.replace("helper_of_rewards.helped", "package_for_digest.helped")
    before = code_digest(load(text))
    file.write_text(PACKAGE.replace("size = 1", "size = 2"))
    del sys.modules["package_for_digest"]
    assert code_digest(load(text)) == before


def test_each_file_is_read_and_parsed_once(load: Any) -> None:
    many = FILE + "".join(f"class C{i}(Table):\n    def at(self, x):\n        return x\n\n" for i in range(30))
    score = load(many.replace("return Table().at(x)", "return " + " + ".join(f"C{i}().at(x)" for i in range(30))))
    read: Counter[str] = Counter()
    real, parsed = Path.read_text, ast.parse

    def read_text(self: Path, *given: Any, **named: Any) -> str:
        read[str(self)] += 1
        return real(self, *given, **named)

    def parse(*given: Any, **named: Any) -> Any:
        read["parsed"] += 1
        return parsed(*given, **named)

    with patch.object(Path, "read_text", read_text), patch("ast.parse", parse):
        code_digest(score)
    assert [count for path, count in read.items() if path.endswith("rewards_for_digest.py")] == [1]
    # The rewards and the helper file.
    assert read["parsed"] <= 2
