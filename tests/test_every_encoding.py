"""Every text file and every pipe is read and written in an encoding that the code names: UTF-8, whatever the locale is.

Python's default is the locale's encoding, which is ASCII in many containers. Ruff's rule PLW1514 demands the same
where it knows the type of an object; this test knows no types, so it looks at names.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
ROOT = Path(__file__).parents[1]
# Functions whose argument `mode` says whether they read text; the place of that argument, and the mode without it.
OPENS = {"open": (1, "r"), "fdopen": (1, "r"), "TemporaryFile": (0, "w+b"), "NamedTemporaryFile": (0, "w+b")}
PROGRAMS = {"text", "universal_newlines"}


def names_no_encoding(node: ast.AST) -> bool:
    """Whether a call reads or writes text in the locale's encoding."""
    if not isinstance(node, ast.Call):
        return False
    function, words = node.func, {word.arg: word.value for word in node.keywords}
    owned = isinstance(function, ast.Attribute)
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if "encoding" in words or None in words:
        return False
    if name in ("read_text", "write_text"):
        return len(node.args) <= (name == "write_text")
    if name == "TextIOWrapper":
        return len(node.args) < 2
    if PROGRAMS & set(words):
        return name in ("run", "Popen", "check_output") and any(
            isinstance(words.get(word), ast.Constant) and words[word].value
            for word in PROGRAMS  # type: ignore[attr-defined]
        )
    if name not in OPENS:
        return False
    place, usual = OPENS[name]
    if owned and name == "open":
        # `path.open(mode)`; other objects have a method of that name without a mode. `os.open` has flags.
        place, usual = 0, "b"
    mode = words.get("mode", node.args[place] if len(node.args) > place else ast.Constant(usual))
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return False
    return "b" not in mode.value and set(mode.value) <= set("rwaxt+")


def found(source: Path) -> Iterator[str]:
    """The places of a folder that name no encoding, as `path:line`."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if names_no_encoding(node):
                yield f"{path.relative_to(source)}:{node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "folder", [SOURCE, ROOT / "scripts", ROOT / "benchmarks", ROOT / "examples"], ids=lambda f: f.name
)
def test_every_encoding_is_named(folder: Path) -> None:
    assert not list(found(folder)), (
        'add encoding="utf-8" (encoding="locale" for a stream that a person reads)'
    )


@pytest.mark.parametrize(
    ("line", "names_none"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.read_text(errors='replace')", True),
        ("path.write_text(x)", True),
        ("path.write_text(x, encoding='utf-8')", False),
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('a')", True),
        ("held.open()", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("os.fdopen(handle, 'w')", True),
        ("os.fdopen(handle, 'rb')", False),
        ("TemporaryFile()", False),
        ("TemporaryFile('w+')", True),
        ("subprocess.run(command, text=True)", True),
        ("extension.read(ids, text=True)", False),
    ],
)
def test_the_rule_sees_a_missing_encoding(tmp_path: Path, line: str, names_none: bool) -> None:
    (tmp_path / "a.py").write_text(f"{line}\n", encoding="utf-8")
    assert list(found(tmp_path)) == ["a.py:1"] * names_none


PROGRAM = """
import locale, sys
assert locale.getpreferredencoding(False) in ("ANSI_X3.4-1968", "ascii", "US-ASCII"), locale.getpreferredencoding(False)
from lockstep.cli.main import main
for words in (["grpo", "--help"], ["init", "mine"], ["completion", "bash"]):
    print(words, main(words), file=sys.stderr)
main(["grpo", "--output_dir", chr(252)])
"""


def test_commands_run_in_a_locale_of_ascii(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    ascii_only = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONPATH": str(SOURCE.parent),
    }
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=kept | ascii_only,
        capture_output=True,
        timeout=120,
        check=False,
    )
    said = ended.stderr.decode()
    assert ended.returncode == 0, said
    # A name that the file system cannot take in this locale.
    assert "set PYTHONUTF8=1" in said
    assert "Error" not in said
    assert [
        said.count(f"{words} 0") for words in (["grpo", "--help"], ["init", "mine"], ["completion", "bash"])
    ] == [
        1,
        1,
        1,
    ]
