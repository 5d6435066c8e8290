"""The cases of `scripts/mutations.py` find their text wherever it stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import mutations
from mutations import LEFT_OUT, MUTATIONS, Chosen, Mutation, mutated, place


@pytest.fixture(autouse=True)
def read_again() -> Iterator[None]:
    """What a test has read of its own source is forgotten after it."""
    yield
    for cached in (mutations.sources, mutations.scopes, mutations.place):
        cached.cache_clear()


def source(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutations, "SOURCE", folder)


def test_cases_fit_a_source_whose_files_stand_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both kinds: a text that is there once, and one that names the function it stands in.
    named = [case for case in MUTATIONS if case.within]
    cases = [*MUTATIONS[::40], *named[::4]]
    assert len(named) > 30
    assert len(cases) > 25
    before = {case: place(case) for case in cases}
    for name, text in mutations.sources().items():
        (tmp_path / name.replace("/", "_of_")).write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutations, "SOURCE", tmp_path)
    mutations.sources.cache_clear(), mutations.scopes.cache_clear(), place.cache_clear()
    assert {case: place(case) for case in cases} == {
        case: (file.replace("/", "_of_"), start) for case, (file, start) in before.items()
    }


TWICE = "class A:\n    def close(self):\n        end(1)\n\n\nclass B:\n    def close(self):\n        end(1)\n"


def test_a_text_that_stands_in_several_functions_names_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(tmp_path, monkeypatch, one=TWICE, two="def other():\n    end(1)\n")
    case = Mutation("ends", "end(1)", "end(2)", "tests", within="B.close")
    assert mutated(case) == TWICE[::-1].replace(")1(dne", ")2(dne", 1)[::-1]
    # White space before the text is not part of the function above.
    assert place(case._replace(old="\n        end(1)")) == ("one.py", TWICE.rindex("\n        end(1)"))
    assert place(case._replace(within="other"))[0] == "two.py"


@pytest.mark.parametrize(
    ("within", "message"),
    [
        (
            "",
            r"'end\(1\)' is 3 times in src/lockstep instead of once \(one\.py, two\.py\): lengthen the text",
        ),
        ("close", r"'end\(1\)' is 2 times in close of src/lockstep instead of once \(one\.py\): lengthen"),
        ("lose", r"'end\(1\)' is 0 times in lose of src/lockstep instead of once \(nowhere\): mend the case"),
    ],
)
def test_a_text_that_is_not_there_once_is_refused(
    within: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(tmp_path, monkeypatch, one=TWICE, two="def other():\n    end(1)\n")
    with pytest.raises(ValueError, match=message):
        place(Mutation("ends", "end(1)", "end(2)", "tests", within=within))


def test_a_word_chooses_by_the_file_that_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutations, "MUTATIONS", MUTATIONS[:20])
    monkeypatch.setattr(mutations, "misfits", lambda cases: [mutations.file_of(case) for case in cases])
    file = place(MUTATIONS[0])[0]
    monkeypatch.setattr(sys, "argv", ["mutations.py", "--fit", "--only", file])
    assert mutations.main() == 1
    assert set(capsys.readouterr().err.split()) == {file}


@pytest.mark.parametrize("mark", [*LEFT_OUT, "real_model"])
def test_a_test_that_takes_long_runs_only_where_a_case_names_it_in_full(mark: str) -> None:
    def item(name: str) -> SimpleNamespace:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda asked: asked == mark or None)

    case = Mutation("ends", "end(1)", "end(2)", "'tests/a.py::test_b[a row]' tests/c.py")
    items = [item("tests/a.py::test_b[a row]"), item("tests/a.py::test_b"), item("tests/c.py::test_d")]
    Chosen(case.named).pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    left = [found.nodeid for found in items]
    assert left[0] == "tests/a.py::test_b[a row]"
    assert len(left) == (3 if mark == "real_model" else 1)
