"""`scripts/move.py` on a small repository: afterwards nothing names an old place, and the program still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import move

FILES = {
    "pyproject.toml": """
[project.entry-points."vllm.general_plugins"]
lockstep = "lockstep.play.plugin:register"
[tool.importlinter]
layers = ["lockstep.play", "lockstep.toys | lockstep.loop"]
""",
    "src/lockstep/__init__.py": '"""The package."""\n',
    "src/lockstep/toys/__init__.py": '"""Steps of the optimizer."""\n',
    "src/lockstep/toys/update.py": '''"""Updates. `toys/sums.py` adds; `loop.py` does not (docs/internals/steps.md#sums)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.toys.sums import total

if TYPE_CHECKING:
    from lockstep.play.plugin import Plugin

WHOLE = total([1, 2])


# How far it goes.
def update(plugin: Plugin | None = None) -> float:
    return math.sqrt(WHOLE + 1)
''',  # noqa: E501
    "src/lockstep/toys/sums.py": '''"""Sums."""

from __future__ import annotations

from collections.abc import Iterable


def total(numbers: Iterable[int]) -> int:
    return sum(numbers)


def share(numbers: Iterable[int]) -> float:
    from lockstep.toys.update import WHOLE

    return total(numbers) / WHOLE
''',
    "src/lockstep/play/__init__.py": '"""Weights."""\n',
    "src/lockstep/play/plugin.py": '"""The plugin."""\n\n\nclass Plugin: ...\n\n\ndef register() -> str:\n    '
    'return "here"\n',
    "src/lockstep/loop.py": '''"""The loop."""

import importlib

import lockstep.toys.update
import lockstep.play.plugin as plugged
from lockstep.toys import sums, update  # noqa: F401

TABLE = {"Plugin": "play.plugin"}
assert lockstep.toys.update.update() == update.update() == 2.0
assert sums.share([6]) == 2
assert importlib.import_module("lockstep.play.plugin").register() == plugged.register() == "here"
''',
    "tests/toys/test_update.py": """from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_update(monkeypatch):
    monkeypatch.setattr("lockstep.toys.update.WHOLE", 3)
""",
    "tests/seconds.json": '{"toys/test_update.py": 0.1}\n',
    "docs/index.md": "[Steps](internals/steps.md#sums) are in `src/lockstep/toys/update.py`, and/or in `toys/`.\n",
    "docs/internals/steps.md": "## Sums\n[Back](../index.md), `tests/toys/test_update.py`, `loop.py`, [here](#sums).\n",
    "mkdocs.yml": "nav:\n  - Steps: internals/steps.md\n",
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def moved(repository: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, str]:
    """Every file after the move. Its programs must still run."""
    monkeypatch.setattr(sys, "argv", ["move.py", *words])
    assert move.main() == 0
    run = [sys.executable, "-c", "import lockstep.loop"]
    subprocess.run(run, env={"PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"}, cwd=repository, check=True)
    return {str(path): (repository / path).read_text(encoding="utf-8") for path in move.files_of(repository)}


def test_files_move_with_their_imports_paths_and_links(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = moved(
        repository, monkeypatch,
        "toys/update.py", "learn/toys/updates.py", "toys/sums.py", "learn/toys/sums.py", "play/plugin.py",
        "play/vllm.py",
        "tests/toys/test_update.py", "tests/learn/toys/test_update.py", "docs/internals/steps.md", "docs/steps.md",
    )  # fmt: skip
    assert not {name for name in files if "/toys/" in name and "learn" not in name}
    # The folder that is left empty takes the docstring of its package along.
    assert files["src/lockstep/learn/toys/__init__.py"] == FILES["src/lockstep/toys/__init__.py"]
    assert files["src/lockstep/learn/__init__.py"] == ""
    told = files["src/lockstep/learn/toys/updates.py"]
    assert "`learn/toys/sums.py` adds; `loop.py` does not (docs/steps.md#sums)" in told
    assert "from lockstep.learn.toys.sums import total\n" in told
    assert "    from lockstep.play.vllm import Plugin\n" in told
    loop = files["src/lockstep/loop.py"]
    assert "from lockstep.learn.toys import sums" in loop
    assert "from lockstep.learn.toys import updates as update" in loop
    assert "import lockstep.play.vllm as plugged" in loop
    test = files["tests/learn/toys/test_update.py"]
    assert 'setattr("lockstep.learn.toys.updates.WHOLE", 3)' in test
    assert "parents[3]" in test
    assert files["tests/seconds.json"] == '{"learn/toys/test_update.py": 0.1}\n'
    assert '"lockstep.play.vllm:register"' in files["pyproject.toml"]
    assert '"lockstep.learn.toys | lockstep.loop"' in files["pyproject.toml"]
    assert files["docs/index.md"] == (
        "[Steps](steps.md#sums) are in `src/lockstep/learn/toys/updates.py`, and/or in `learn/toys/`.\n"
    )
    assert files["docs/steps.md"] == (
        "## Sums\n[Back](index.md), `tests/learn/toys/test_update.py`, `loop.py`, [here](#sums).\n"
    )
    assert files["mkdocs.yml"] == "nav:\n  - Steps: steps.md\n"
    # What is put together at run time is shown, and nothing else of these files.
    notes = capsys.readouterr().out
    assert 'src/lockstep/loop.py:10: TABLE = {"Plugin": "play.plugin"}' in notes
    assert "src/lockstep/learn/__init__.py: is new and empty" in notes
    assert notes.count("\n") == 2


def test_a_folder_moves(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = moved(repository, monkeypatch, "toys", "learn")
    assert {"src/lockstep/learn/__init__.py", "src/lockstep/learn/update.py"} <= set(files)
    assert "from lockstep.learn import sums, update" in files["src/lockstep/loop.py"]
    assert "in `learn/`" in files["docs/index.md"]


def test_files_are_merged_into_one(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = moved(repository, monkeypatch, "--into", "toys/update.py", "toys/sums.py")
    assert "src/lockstep/toys/sums.py" not in files
    text = files["src/lockstep/toys/update.py"]
    # The sum stands before the constant that needs it; neither file imports from the other any more.
    assert text.index("def total") < text.index("WHOLE = total([1, 2])") < text.index("def update")
    assert "import total" not in text
    assert "import WHOLE" not in text
    assert text.count("from __future__ import annotations") == text.count("if TYPE_CHECKING:") == 1
    assert text.startswith('"""Updates. `toys/update.py` adds; `loop.py` does not')
    assert "# How far it goes.\ndef update" in text
    assert "from lockstep.toys import update as sums" in files["src/lockstep/loop.py"]


@pytest.mark.parametrize("other", ["def total() -> None: ...\n", "most, total = 3, 4\n"])
def test_two_things_of_one_name_are_not_merged(
    repository: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    (repository / "src/lockstep/play/plugin.py").write_text(other, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["move.py", "--into", "toys/both.py", "toys/sums.py", "play/plugin.py"])
    with pytest.raises(SystemExit, match=r"several of the files have a total; rename all but one first"):
        move.main()
    assert (repository / "src/lockstep/toys/sums.py").read_text(encoding="utf-8") == FILES[
        "src/lockstep/toys/sums.py"
    ]


def test_nothing_is_written_over(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["move.py", "toys/sums.py", "toys/update.py"])
    with pytest.raises(SystemExit, match=r"toys/update\.py exists: give --into"):
        move.main()
