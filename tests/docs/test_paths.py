"""The docs and docstrings name only files, headings and make targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The repository in which this test moves files is invented.
INVENTED = ROOT / "tests" / "scripts" / "test_move.py"
PROGRAMS = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path != INVENTED
)
# A path in prose is relative to one of these folders.
_PACKAGE = ROOT / "src" / "lockstep"
BASES = (ROOT, _PACKAGE, ROOT / "docs", ROOT / "benchmarks")
# A folder and a file, as in `weights/push.py`; a star stands for any name.
FILE = re.compile(r"(?<![\w./$~-])((?:\.\./)?(?:[\w-]+/)+[\w*.-]+\.(?:py|md|yaml|sh|svg))\b")


def missing(path: str, page: Path) -> bool:
    # The files of a run exist only after the run, and those of `lockstep init mine` only after that command.
    if path.startswith(("runs/", "mine/")):
        return False
    return not any(
        list(base.glob(path)) for base in (*BASES, page.parent) if ".." not in path or base == page.parent
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [path for path in FILE.findall(text) if missing(path, page)] == []
    # Tests are also named without their folder.
    known = {path.name for path in PROGRAMS}
    assert [name for name in re.findall(r"(?<![\w/])test_\w+\.py\b", text) if name not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        to = page.parent / name if name else page
        assert to.exists(), target
        assert not heading or heading in headings(to), target


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)) <= targets


# Files other than pages that may name a page of the docs: messages, help, comments, recipes, settings.
CITING = [
    *PROGRAMS,
    *sorted(
        path
        for end in ("json", "yaml", "sh", "toml")
        for path in ROOT.glob(f"[!.]*/**/*.{end}")
        if "runs" not in path.parts
    ),
    *(
        ROOT / name
        for name in ("Makefile", "pyproject.toml", "mkdocs.yml", ".ci/run", "CONTRIBUTING.md", "README.md")
    ),
]
CITED = re.compile(r"(?<![\w/])docs/([\w/-]+\.(?:md|svg))(?:#([\w-]+))?")


def test_every_page_and_heading_of_the_docs_that_is_cited_exists() -> None:
    cited = {
        (path, *found)
        for path in CITING
        if "build" not in path.parts and path != Path(__file__)
        for found in CITED.findall(path.read_text())
    }
    assert len(cited) > 40
    wrong = [
        (str(path.relative_to(ROOT)), name, heading)
        for path, name, heading in cited
        if not (ROOT / "docs" / name).exists() or (heading and heading not in headings(ROOT / "docs" / name))
    ]
    assert sorted(wrong) == []


def test_every_file_that_a_docstring_or_comment_names_exists() -> None:
    # Code may contain invented paths. A path in backticks must exist.
    claimed = re.compile(r"`([\w-]+(?:/[\w-]+)*/[\w*-]+\.py)`")
    wrong = {
        f"{program.relative_to(ROOT)}: {path}"
        for program in PROGRAMS
        for path in claimed.findall(program.read_text())
        if missing(path, program)
    }
    assert wrong == set()
