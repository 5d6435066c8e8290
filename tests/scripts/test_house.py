"""The counts of `make house`, on a small made-up tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import house as counts
from ways import House, way

LOOP = """
from typing import TYPE_CHECKING
from lockstep.errors import InputError
from lockstep.learn.events import Watch
from lockstep.learn.step import Step
from lockstep.watch.gap import check_gap
if TYPE_CHECKING:
    from lockstep.run.trainer import Trainer

class TrainingLoop:
    def __init__(self, watch: Watch, step: Step, trainer: "Trainer") -> None:
        self.watch, self.step = watch, step

    def rollout(self, prompt):
        return self._learn(prompt)

    def _learn(self, prompt):
        if not prompt:
            raise InputError()
        check_gap(prompt)
        self.watch.forward(prompt)
        return self.step.learn(prompt)
"""
FILES = {
    "__init__.py": "",
    "errors.py": "class InputError(ValueError): ...\nclass ProofError(ValueError): ...\n",
    "run/__init__.py": "",
    "run/loop.py": LOOP,
    "run/trainer.py": "from lockstep.run.loop import TrainingLoop\nclass Trainer: ...\n",
    "learn/events.py": "from typing import Protocol\nclass Watch(Protocol):\n    def forward(self, prompt): ...\n",
    "learn/step.py": "from lockstep.tokens import text\nclass Step:\n    def learn(self, prompt):\n        "
    "text.read(prompt)\n",
    "tokens/text.py": "def read(prompt):\n    from lockstep.learn.step import Step\n    return prompt\n",
    "watch/gap.py": "def check_gap(prompt): ...\n",
    "watch/forward.py": "from lockstep.errors import ProofError\ndef check(prompt) -> None:\n    raise "
    "ProofError(prompt)\n",
    "watch/run.py": (
        "from lockstep.watch.forward import check\n"
        "class RunWatch:\n    def forward(self, prompt):\n        check(prompt)\n"
    ),
    "engines/own.py": "def load():\n    from vllm import LLM\n",
    "weights/push.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm.config\nPLUGIN = "
    "'vllm.plugins'\n",
}
ROUTE = "TrainingLoop.rollout Step.learn"


def tree(place: Path, changed: dict[str, str] | None = None) -> House:
    for name, text in {**FILES, **(changed or {})}.items():
        path = place / "src" / "lockstep" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(place)


def test_a_way_has_the_files_of_its_names_its_proofs_and_the_watch_but_not_what_is_behind_it(
    tmp_path: Path,
) -> None:
    found = way(tree(tmp_path), ROUTE)
    assert found.files == ["run/loop.py", "learn/step.py"]
    assert sorted(found.proofs) == ["learn/events.py", "watch/gap.py", "watch/run.py"]
    assert found.behind == ["watch/forward.py"]
    assert found.opened == 5
    assert not found.faults
    # What does not prove is called, and an exception is not opened.
    assert "tokens/text.py" in found.calls
    assert "errors.py" not in found.calls


def test_a_check_counts_as_a_proof_wherever_it_stands_and_a_call_that_gives_something_back_does_not(
    tmp_path: Path,
) -> None:
    check = (
        "from lockstep.errors import ProofError\ndef read(prompt) -> None:\n    raise ProofError(prompt)\n"
    )
    assert "tokens/text.py" in way(tree(tmp_path, {"tokens/text.py": check}), ROUTE).proofs
    gives = check.replace("None", "str")
    assert "tokens/text.py" not in way(tree(tmp_path, {"tokens/text.py": gives}), ROUTE).proofs


def test_files_that_move_are_found_again(tmp_path: Path) -> None:
    step = {"learn/step.py": "", "training/pieces/one.py": FILES["learn/step.py"]}
    moved = LOOP.replace("lockstep.learn.step", "lockstep.learn.pieces.one")
    found = way(tree(tmp_path, {**step, "run/loop.py": moved}), ROUTE)
    assert found.files == ["run/loop.py", "training/pieces/one.py"]
    assert found.opened == 5
    assert not found.faults


def test_a_way_that_lost_a_name_or_got_a_turn_is_not_counted_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = {"learn/step.py": FILES["learn/step.py"].replace("Step", "Piece")}
    house = tree(tmp_path, renamed)
    assert way(house, ROUTE).faults == ["Step.learn stands in 0 places []"]
    assert not way(house, "TrainingLoop.rollout Step.learn|Piece.learn").faults
    turn = {"run/loop.py": LOOP.replace("self.step.learn(prompt)", "elsewhere(prompt)")}
    assert way(tree(tmp_path, turn), ROUTE).faults == ["nothing on the way leads to Step.learn"]
    twice = {"sync/other.py": FILES["learn/step.py"]}
    assert "stands in 2 places" in way(tree(tmp_path, twice), ROUTE).faults[0]
    monkeypatch.setattr(sys, "argv", ["house.py", "--tree", str(tmp_path)])
    (tmp_path / "tests").mkdir()
    assert counts.main() == 1
    printed = capsys.readouterr()
    assert "NOT TRUE, at least" in printed.out
    assert "THE COUNT IS NOT TRUE" in printed.err


def test_the_loop_is_found_and_the_contract_of_the_events_is_no_proof(tmp_path: Path) -> None:
    lines, proofs = counts.the_loop(tree(tmp_path))
    assert lines == f"{len(LOOP.splitlines())} (run/loop.py)"
    assert proofs == ["watch/gap.py"]
    moved = {"learn/events.py": "", "watch/events.py": FILES["learn/events.py"]}
    house = tree(tmp_path, {**moved, "run/loop.py": LOOP.replace("learn.events", "watch.events")})
    assert counts.the_loop(house)[1] == ["watch/gap.py"]


def test_rooms_that_import_vllm_do_so_in_functions_and_for_type_checkers_too(tmp_path: Path) -> None:
    assert counts.rooms_that_import(tree(tmp_path), "vllm") == {"engines": 1, "weights": 1}


def test_circles_are_counted_of_three_kinds_of_imports(tmp_path: Path) -> None:
    house = tree(tmp_path)
    between = [counts.circles(house, inside=False, kind=kind) for kind in range(3)]
    assert between == [[], [["learn", "tokens"]], [["learn", "tokens"]]]
    inside = [counts.circles(house, inside=True, kind=kind) for kind in range(3)]
    assert inside == [[], [], [["run/loop.py", "run/trainer.py"]]]


def test_a_touch_of_a_private_name_is_one_of_lockstep_in_any_form(tmp_path: Path) -> None:
    house = tree(
        tmp_path,
        {"weights/push.py": "class Push:\n    def __init__(self):\n        self._digest = self._end = 1\n"},
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import os\nimport torch\nfrom lockstep.weights.push import _digest\n"
        "def test(push, monkeypatch):\n"
        "    push._digest = push.of._end\n"  # two
        "    monkeypatch.setattr(push, '_end', 1)\n"  # one, by its text
        "    os._end(torch._C._digest)\n"  # another library's
        "    push._unknown, push.__init__\n"
        "class Own:\n    def go(self):\n        self._end\n"
    )
    assert [(line, name) for _, line, name in sorted(counts.private_touches(house))] == [
        (3, "_digest"),
        (5, "_digest"),
        (5, "_end"),
        (6, "_end"),
    ]


def test_a_case_of_the_mutation_list_with_a_path_is_counted_also_through_a_name_or_a_function(
    tmp_path: Path,
) -> None:
    house = tree(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "mutation_cases.py").write_text(
        "GAP = ('watch/gap.py', 'tests/test_gap.py')\nONE, TWO = 'weights/push.py', 'two'\n"
        "def of(old):\n    return Mutation('watch/gap.py', old)\n"
        "CASES = [Mutation('run/loop.py', 'x'), Mutation(*GAP), Mutation(ONE), Mutation(TWO), of('x'),"
        " Mutation('return x', 'tests/test_it.py')]\n"
    )
    assert counts.mutations_with_paths(house) == (4, 6)


def test_lines_of_code_leave_out_docstrings_comments_and_what_is_empty(tmp_path: Path) -> None:
    text = '"""A file.\n\nIt does it."""\n\nimport os\nfrom sys import (\n    argv,\n)\n\n# why\nx = """a\nb"""\n'
    size = counts.lines(tree(tmp_path, dict.fromkeys(FILES, "") | {"cli/one.py": text}))
    assert (size["code"], size["imports"]) == (6, 4)
    assert (size["all"], size["core"]) == (12, 0)
    assert size["files"] == 1 + sum(not name.endswith("__init__.py") for name in FILES)


def test_places_of_a_field_are_its_declaration_and_the_tables_with_its_name(tmp_path: Path) -> None:
    config = {
        "config/base.py": "class Base:\n    beta: float = 0.0\n    _hidden: int = 0\n",
        "config/grpo.py": "from lockstep.config.base import Base\nclass GRPOConfig(Base):\n    epsilon: float = 0.2\n",
        "cli/groups.py": "GROUPS = {'loss': ['beta']}\nBOUNDS = dict(epsilon=(0, 1))\n",
        "definitions/sampling.py": "class Settings:\n    beta: float\n",
        "run/use.py": "def use(config):\n    return config.beta, 'beta'\n",
        "cli/fields.json": '{"beta": 1}',  # a script writes it
    }
    assert counts.field_places(tree(tmp_path, config)) == {
        "beta": ["cli/groups.py", "config/base.py", "definitions/sampling.py"],
        "epsilon": ["cli/groups.py", "config/grpo.py"],
    }


def test_a_field_of_ours_stands_in_one_place_of_the_rooms_that_know_configs() -> None:
    """Its class says all of it. A second list of names in these rooms would rot silently."""
    # The sizes that a user changes when memory is short; what other programs call a field, which has a test.
    aside = {"run/files/identity.py", "config/other_names.py"}
    found = counts.field_places(House(Path(__file__).parents[2]))
    assert len(found) > 100
    for name, files in found.items():
        own = [
            file
            for file in files
            if file.split("/")[0] in ("cli", "config", "learn", "run") and file not in aside
        ]
        assert len(own) == 1, (name, own)
