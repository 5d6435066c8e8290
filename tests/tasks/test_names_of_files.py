"""A name that looks like a file is no hub id: the error says what there is in its place, and what may be meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import InputError
from lockstep.models.resolve import resolve_model
from lockstep.tasks.files import data_files
from lockstep.tasks.rewards import load_reward, reward_place


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rewards.txt", "notes.txt", "config.json"):
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("data.jsnl", r"does not exist; did you mean 'data\.jsonl'\?"),
        ("my/data.cvs", r"does not exist; did you mean 'data\.csv'\?"),
        ("data.xyz", "does not exist"),
        ("./data", "does not exist"),
        ("a/b/c", "does not exist"),
        ("my/data.txt", "does not exist"),
        ("notes.txt", "cannot be read; the name of a data file ends with"),
        ("link", "is a link to nothing"),
        ("link.jsonl", "is a link to nothing"),
        ("pipe.jsonl", "is neither a file nor a directory"),
        ("a" * 300 + ".jsonl", "cannot be looked at .File name too long"),
    ],
)
def test_a_data_name_that_is_no_file(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as found:
        data_files(name)
    assert len(str(found.value)) <= 500


@pytest.mark.parametrize("name", ["squad", "user/data", "user/data-v1.5", "wikitext-2.1", "user/data.en"])
def test_a_hub_id_is_none_of_them(name: str) -> None:
    assert data_files(name) is None
    assert resolve_model(name) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rewards.txt:f", "rewards.txt is a file; the name of a file with code ends with .py"),
        ("my/rewards:f", "my/rewards does not exist; the name of a file with code ends with .py"),
        ("folder.py:f", "folder.py is a directory"),
        ("no.py:f", "no.py does not exist"),
        ("link.py:f", "link.py is a link to nothing"),
    ],
)
def test_a_reward_name_that_is_no_file_of_code(name: str, said: str) -> None:
    Path("link.py").symlink_to("nowhere")
    with pytest.raises(InputError) as found:
        reward_place(name)
    assert said in str(found.value)


def test_a_file_that_changes_the_folder_when_it_is_read_does_not_move_the_command(tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text(
        f"import os\nos.chdir({str(tmp_path / 'folder.py')!r})\ndef f(**_): ...\n"
    )
    assert load_reward("moves.py:f")
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [("./nope", "does not exist"), ("link", "is a link to nothing"), ("config.json", "is a file")],
)
def test_a_model_name_that_is_no_directory(name: str, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}; give the directory of a saved model"):
        resolve_model(name)
