"""Docstrings say what a thing does.

They do not name who calls it: callers change, and a docstring does not change with them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.resolve().is_relative_to(SOURCE.resolve())]
NAMED = re.compile(r"`([\w-]+(?:/[\w-]+)*\.py)`")
# A sentence about callers, whatever names them.
CALLERS = re.compile(
    r"\b(?:[Uu]sed|[Cc]alled) by (?:the |a )?`"
    r"|`\S+`(?:,? and `\S+`)* (?:calls?|uses?) (?:it|them|this|these|both)\b"
    r"|\b[Tt]he constructors? of [^.]* calls? (?:it|them|this|these)\b"
)
IMPORT = re.compile(r"^\s*(?:from (lockstep[\w.]*) import ([^(\n]*|\([^)]*\))|import (lockstep[\w.]+))", re.M)


def imported(text: str) -> set[str]:
    """The modules and names of Lockstep that a program imports."""
    found: set[str] = set()
    for package, names, alone in IMPORT.findall(text):
        found |= {alone or package, *(f"{package}.{word}" for word in re.findall(r"\w+", names))}
    return found


def module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


def docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"\s+", " ", ast.get_docstring(node) or "")


def callers_named(texts: dict[Path, str]) -> list[str]:
    """One line per docstring that names a file which imports its module, or says what calls it.

    The docstring of a package is left out: it says what the files of the package are for.
    """
    imports = {path: imported(text) for path, text in texts.items()}

    def callers(path: Path, said: str) -> list[str]:
        named = {base / name for name in NAMED.findall(said) for base in (SOURCE, path.parent)}
        callers = [other.name for other in named if other != path and module(path) in imports.get(other, ())]
        return sorted(callers) + CALLERS.findall(said)

    wrong = []
    for path, text in texts.items():
        # Only a file that seems to have such a sentence is parsed, because that takes long.
        if path.name != "__init__.py" and callers(path, re.sub(r"\s+", " ", text)):
            wrong += [
                f"{path.relative_to(SOURCE)}: {one}"
                for said in docstrings(text)
                for one in callers(path, said)
            ]
    return wrong


def test_no_docstring_names_its_callers() -> None:
    assert len(FILES) > 200
    assert callers_named({path: path.read_text(encoding="utf-8") for path in FILES}) == []


def test_a_caller_is_found_by_what_it_imports_and_by_what_is_said() -> None:
    below, above = SOURCE / "errors.py", SOURCE / "files.py"
    importing = "from lockstep.errors import (\n    InputError,\n)\n"
    assert callers_named({below: '"""X. `files.py` gives the name."""\n', above: importing}) == [
        "errors.py: files.py"
    ]
    # What this file itself imports may be named: it is what the docstring is about.
    assert callers_named({below: '"""X."""\n', above: f'"""X of `errors.py`."""\n{importing}'}) == []
    for said in (
        "`A` calls it.",
        "Used by `B`.",
        "`a`, and `b` use these.",
        "The constructor of the trainers calls these.",
    ):
        assert len(callers_named({below: f'"""X. {said}"""\n'})) == 1, said
