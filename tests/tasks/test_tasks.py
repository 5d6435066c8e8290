"""Data sources and reward functions by name; held-out rows are never trained on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from lockstep.cli.fields import factory_names
from lockstep.errors import InputError
from lockstep.rollouts.programs.environments import end_process, in_process
from lockstep.tasks import MADE
from lockstep.tasks.builtin import (
    KINDS,
    SeveralTries,
    SpokenTries,
    arithmetic,
    calculator,
    multiply,
    reasoning_gym_problems,
    right_call,
)
from lockstep.tasks.data import TaskData, load_data
from lockstep.tasks.rewards import exact_match, load_reward


def load(name: str, **fields: Any) -> TaskData:
    base = {
        "subset": None,
        "train_split": "train",
        "test_split": None,
        "train_size": 0,
        "eval_size": 0,
        "seed": 0,
    }
    return load_data(name, **{**base, **fields})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_held_out_problems_are_never_trained_on_and_answers_are_right(kind: str) -> None:
    train, held_out = arithmetic(kind, 1000, 200, seed=3)
    questions = [row["prompt"][-1]["content"] for data in (train, held_out) for row in data]
    assert len(train) == 1000
    assert len(held_out) == 200
    assert len(set(questions)) == 1200
    shown = {message["content"] for message in train[0]["prompt"][:-1]}
    assert shown.isdisjoint(questions)
    for row in held_out:
        a, b = [
            int(word.strip("?")) for word in row["prompt"][-1]["content"].split() if word.strip("?").isdigit()
        ]
        assert row["answer"] == str(KINDS[kind].answer(a, b))


def test_problems_depend_on_the_seed_alone() -> None:
    assert arithmetic("larger", 50, 10, 1)[0]["answer"] == arithmetic("larger", 50, 10, 1)[0]["answer"]
    assert arithmetic("larger", 50, 10, 1)[0]["answer"] != arithmetic("larger", 50, 10, 2)[0]["answer"]


@pytest.mark.parametrize(
    ("kind", "size", "message"), [("smaller", 10, "no problems of kind"), ("larger", 10**6, "were asked for")]
)
def test_arithmetic_that_does_not_exist_is_refused(kind: str, size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        arithmetic(kind, size, 10, 0)


def test_reasoning_gym_scores_its_own_answers() -> None:
    train, held_out, score = reasoning_gym_problems("letter_counting", 30, 10, seed=0)
    assert {row["prompt"][-1]["content"] for row in train}.isdisjoint(
        row["prompt"][-1]["content"] for row in held_out
    )
    rows = [held_out[i] for i in range(10)]
    right = score(completions=[row["answer"] for row in rows], entry=[row["entry"] for row in rows])
    wrong = score(completions=["banana"] * 10, entry=[row["entry"] for row in rows])
    assert right == [1.0] * 10
    assert max(wrong) < 0.5
    with pytest.raises(InputError, match="no data set 'nope'"):
        reasoning_gym_problems("nope", 3, 1, 0)


def test_a_reasoning_gym_problem_may_be_tried_again_also_in_a_process_of_its_own() -> None:
    train, _, _ = reasoning_gym_problems("letter_counting", 5, 1, seed=0)
    in_a_process = in_process("lockstep.tasks.builtin:SeveralTries")()
    try:
        for environment in (SeveralTries(), in_a_process):
            for row in train:
                assert environment.reset(**row) is None
                assert environment.get_reward() < 1.0
                assert environment.answer(text="banana") == "wrong, try again"
                assert environment.answer(text=f" {row['answer']}\n") == "right"
                assert environment.answer(text="banana") == "wrong, try again"
                assert environment.get_reward() == 1.0
    finally:
        end_process(in_a_process)


def test_a_wrong_answer_to_a_reasoning_gym_problem_is_followed_by_the_users_next_message() -> None:
    train, _, _ = reasoning_gym_problems("letter_counting", 2, 1, seed=0)
    spoken = SpokenTries()
    for row in train:
        assert spoken.reset(**row) is None
        assert "Try again" in (spoken.next_user_message("banana") or "")
        assert spoken.get_reward() < 1.0
        assert spoken.next_user_message(f"{row['answer']}\n") is None
        assert spoken.get_reward() == 1.0


def test_the_calculator_task_shows_a_call_and_rewards_the_right_one() -> None:
    train, held_out = calculator(50, 20, seed=1)
    questions = [row["prompt"][-1]["content"] for data in (train, held_out) for row in data]
    assert len(set(questions)) == 70
    row = train[0]
    assert row["prompt"][-1]["content"] == f"What is {row['a']} * {row['b']}?"
    assert row["answer"] == str(multiply(row["a"], row["b"]))

    def said(*calls: tuple[str, dict[str, int]]) -> list[dict[str, Any]]:
        functions = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        return [{"role": "assistant", "content": "", "tool_calls": functions}]

    right, wrong = ("multiply", {"a": 3, "b": 4}), ("multiply", {"a": 3, "b": 5})
    completions = [
        said(right),
        said(wrong),
        said(right, right),
        said(),
        [{"role": "assistant", "content": "12"}],
    ]
    assert right_call(completions, a=[3] * 5, b=[4] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(InputError, match="were asked for"):
        calculator(9000, 1, 0)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "dir", "dict"])
def test_own_data_is_read_from_every_format(tmp_path: Path, suffix: str) -> None:
    data = Dataset.from_dict(
        {"prompt": [f"say {i}" for i in range(12)], "answer": [str(i) for i in range(12)]}
    )
    path = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
    elif suffix in ("csv", "parquet"):
        getattr(data, f"to_{suffix}")(path)
    else:
        (data if suffix == "dir" else DatasetDict(train=data)).save_to_disk(path)
    found = load(str(path), eval_size=4)
    assert found.evaluation is not None
    assert len(found.train) == 8
    assert set(found.train["prompt"]).isdisjoint(found.evaluation["prompt"])
    assert set(found.train["prompt"]) | set(found.evaluation["prompt"]) == set(data["prompt"])
    assert not found.rewards


AS_WRITTEN = ["007", "2.50", "1e3", "true", "NA", "", "2024-01-02", "a, b"]


def test_a_column_of_csv_is_text_and_exact_match_finds_every_answer(tmp_path: Path) -> None:
    rows = "".join(f'say it,"{text}"\n' for text in AS_WRITTEN)
    (tmp_path / "data.csv").write_text(f"prompt,answer\n{rows}")
    data = load(str(tmp_path / "data.csv")).train
    assert data["answer"][:] == AS_WRITTEN
    assert exact_match(AS_WRITTEN, data["answer"][:]) == [1.0] * len(AS_WRITTEN)
    assert exact_match(["7", "2.5"], ["007", "2.50"]) == [0.0, 0.0]


def test_texts_of_json_stay_texts(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": text}], "answer": text}
        for text in ("2024-01-02", "2024-01-02T10:00:00Z")
    ]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "two.json").write_text(json.dumps(rows))
    for name in ("one.jsonl", "two.json"):
        data = load(str(tmp_path / name)).train
        assert data["answer"][:] == ["2024-01-02", "2024-01-02T10:00:00Z"]
        assert data["prompt"][1][0]["content"] == "2024-01-02T10:00:00Z"


MIXED: list[list[Any]] = [
    ["007", 7, None],
    ["2024-05-01", 7],
    ['{"a": 1}', 5, "[1]", "true", "null"],
    [["1"], "1"],
    [{"a": "1"}, {"b": 2}],
    [True, 1, "1"],
    ["a\u2028b", 1],
]


@pytest.mark.parametrize("answers", MIXED)
def test_a_column_of_several_kinds_keeps_its_texts(tmp_path: Path, answers: list[Any]) -> None:
    rows = [{"prompt": [{"role": "user", "content": "7"}], "answer": answer} for answer in answers]
    rows += [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "7"}]}], "answer": "7"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "one.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "two.json").write_text(json.dumps(rows), encoding="utf-8")
    for name in ("one.jsonl", "two.json"):
        data = load(str(tmp_path / name)).train
        assert [row["answer"] for row in data] == [*answers, "7"]
        assert [row["prompt"][0]["content"] for row in data] == [row["prompt"][0]["content"] for row in rows]


def test_files_of_json_that_have_no_rows_or_are_not_utf_8_say_so(tmp_path: Path) -> None:
    for text in ("[]", "\n\n"):
        (tmp_path / "no.json").write_text(text)
        with pytest.raises(InputError, match=r"no\.json': it has no rows"):
            load(str(tmp_path / "no.json"))
    (tmp_path / "old.jsonl").write_bytes('{"prompt": "a"}\n{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(InputError, match=r"old\.jsonl': line 2 is not UTF-8 text"):
        load(str(tmp_path / "old.jsonl"))


def test_a_file_name_that_datasets_reads_as_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "elsewhere")
    for name in ("a::b.jsonl", "$PLACE.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
        with pytest.raises(InputError, match="rename that file"):
            load(str(tmp_path / name))


def test_a_number_is_also_compared_by_value_and_a_missing_answer_is_not_scored() -> None:
    said = ["7", "7.0", "7e0", "8", "seven", "nan", "1_0", "True"]
    assert exact_match(said, [7, 7, 7.0, 7, 7, float("nan"), 10, 1]) == [
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
        1.0,
        0.0,
        0.0,
    ]
    assert exact_match(["9007199254740993", "9007199254740992"], [2**53 + 1] * 2) == [1.0, 0.0]
    assert exact_match(["None", "x"], [None, "x"]) == [None, 1.0]


def test_columns_of_csv_get_the_types_that_the_user_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "data.csv").write_text("prompt,n,x,b\na,007,2.50,true\nb,,,\n")
    assert load(str(path)).train["n"][:] == ["007", ""]
    assert "set dataset_types: n=float x=float" in caplog.text
    caplog.clear()
    data = load(str(path), types=["n=int", "x=float", "b=bool"]).train
    assert (data["n"][:], data["x"][:], data["b"][:]) == ([7, None], [2.5, None], [True, None])
    assert not caplog.text
    for types, message in (
        (["b=int"], "b is 'true'"),
        (["z=int"], "no column 'z'"),
        (["n=whole"], "NAME=TYPE"),
    ):
        with pytest.raises(InputError, match=message):
            load(str(path), types=types)
    with pytest.raises(InputError, match="types of its own"):
        load("arithmetic", types=["n=int"], train_size=3)
    path.write_text("prompt,answer\na,b,c\n")
    with pytest.raises(InputError, match="line 2: 3 cells for 2 columns"):
        load(str(path))


def test_shards_and_endings_are_read_and_other_endings_are_refused_with_the_list(tmp_path: Path) -> None:
    for number, name in enumerate(("a.ndjson", "b.JSONL", "c.jsonl.gz", "d.json.gz")):
        line = json.dumps({"prompt": name}).encode() + b"\n"
        (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
        assert load(str(tmp_path / name)).train["prompt"][:] == [name], number
    assert load(str(tmp_path)).train["prompt"][:] == ["a.ndjson", "b.JSONL", "c.jsonl.gz", "d.json.gz"]
    (tmp_path / "notes.txt").write_text("x")
    for name in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(InputError, match=r"\.jsonl, \.ndjson, \.json, \.csv, \.parquet"):
            load(str(name))
    (split := tmp_path / "split").mkdir()
    for name in ("train-0-of-2", "train-1-of-2", "test-0-of-1"):
        (split / f"{name}.csv.gz").write_bytes(gzip.compress(f"prompt\n{name}\n".encode()))
    (split / "README.md").write_text("about")
    data = load(str(split), test_split="test")
    assert data.train["prompt"][:] == ["train-0-of-2", "train-1-of-2"]
    assert data.evaluation is not None
    assert data.evaluation["prompt"][:] == ["test-0-of-1"]
    with pytest.raises(InputError, match="no split 'validation': test, train"):
        load(str(split), test_split="validation")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "dir"])
def test_a_name_of_data_is_no_pattern(tmp_path: Path, suffix: str) -> None:
    # As a pattern, every first name here is the second one's too.
    for name, other in (("a[1]", "a1"), ("b*", "bb"), ("c?", "cc"), ("d]e{f}~", "d")):
        for text in (other, name):
            (folder := tmp_path / suffix / text).mkdir(parents=True)
            data, path = Dataset.from_dict({"prompt": [text]}), folder / f"rows[{suffix}].{suffix}"
            if suffix == "dir":
                data.save_to_disk(path)
            else:
                getattr(data, f"to_{suffix.removesuffix('l')}")(path)
        assert load(str(path)).train["prompt"][:] == [name]


def test_a_working_directory_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "runs[1]").mkdir()
    (folder / "rows[1].jsonl").write_text('{"prompt": "here"}\n', encoding="utf-8")
    monkeypatch.chdir(folder)
    assert load("rows[1].jsonl").train["prompt"][:] == ["here"]


def test_data_behind_two_colons_is_refused_and_not_read_from_another_place(tmp_path: Path) -> None:
    for name in ("e", "d"):
        Dataset.from_dict({"prompt": [name]}).save_to_disk(tmp_path / name)
    (tmp_path / "e").rename(tmp_path / "d::e")
    with pytest.raises(InputError, match="rename that file or folder"):
        load(str(tmp_path / "d::e"))


def test_a_function_is_found_in_the_home_directory_and_behind_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "mine.py").write_text(
        "def half(completions, **_):\n    return [0.5] * len(completions)\n"
    )
    assert load_reward("~/lr=1/mine.py:half")(completions=["a"]) == [0.5]
    place = f"{tmp_path}/lr=1/mine.py:half"
    assert factory_names([place]) == {None: place}
    assert factory_names([f"x={place}", "y=b.c"]) == {"x": place, "y": "b.c"}


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (None, {}, "does not exist"),
        ("", {}, "is empty"),
        ('{"prompt": ', {}, "cannot read data"),
        ('{"prompt": "a"}\n', {"eval_size": 1}, "cannot be held out"),
    ],
)
def test_unreadable_data_is_one_clear_error(
    tmp_path: Path, content: str | None, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        load(str(path), **fields)


def test_a_split_of_data_that_has_none_is_refused_and_not_the_training_rows_again(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' * 5)
    with pytest.raises(InputError, match="has no split 'test'"):
        load(str(tmp_path / "data.jsonl"), test_split="test")
    with pytest.raises(InputError, match="arithmetic has no splits"):
        load("arithmetic", test_split="test", train_size=5)


def test_reasoning_gym_needs_a_name() -> None:
    with pytest.raises(InputError, match="needs dataset_config"):
        load("reasoning_gym", train_size=5)


def test_rewards_are_found_by_name_file_and_package(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def half(completions, **_):\n    return [0.5] * len(completions)\n")
    assert load_reward("exact_match") is exact_match
    assert load_reward(f"{file}:half")(completions=["a", "b"]) == [0.5, 0.5]
    assert load_reward("lockstep.tasks.rewards.exact_match") is exact_match


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "not one of exact_match"),
        ("missing.py:f", "does not exist"),
        ("lockstep.tasks.rewards.nope", "has no function 'nope'"),
        ("no_such_package.f", "cannot be imported"),
    ],
)
def test_a_reward_that_cannot_be_found_says_where_it_looked(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_reward(name)


def test_a_reward_file_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_like_this\n")
    with pytest.raises(InputError, match=r"bad\.py cannot be run: ModuleNotFoundError"):
        load_reward(f"{tmp_path / 'bad.py'}:f")


_WITH_A_DATACLASS = """\
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Scale:
    factor: float = {factor}

calls = []

def scaled(completions, **_):
    calls.append(1)
    return [Scale().factor * len(calls)] * len(completions)
"""


def test_a_reward_file_may_hold_a_dataclass_whose_annotations_are_strings(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(_WITH_A_DATACLASS.format(factor=2.0))
    assert load_reward(f"{file}:scaled")(completions=["a"]) == [2.0]


def test_every_run_gets_a_reward_file_anew_and_as_it_is_by_then(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for factor in (2.0, 2.0, 3.0):
        file.write_text(_WITH_A_DATACLASS.format(factor=factor))
        assert load_reward(f"{file}:scaled")(completions=["a"]) == [factor]


def test_a_reward_file_imports_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_this_reward.py").write_text("scale = 3.0\n", encoding="utf-8")
    file = tmp_path / "mine.py"
    text = "import beside_this_reward as b\ndef f(completions, **_): return [b.scale for _ in completions]\n"
    file.write_text(text, encoding="utf-8")
    assert load_reward(f"{file}:f")(completions=["a"]) == [3.0]


@pytest.mark.parametrize("name", MADE)
def test_problems_that_are_made_have_a_number(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} makes its problems: set train_size"):
        load(name, subset="gcd" if name == "reasoning_gym" else None, train_size=0)


def test_a_reward_file_hides_no_installed_module_and_no_other_reward_file(tmp_path: Path) -> None:
    text = "def own(completions, **_):\n    return [{}] * len(completions)\n"
    files = [tmp_path / folder / "json.py" for folder in ("one", "two")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(text.format(float(number)))
    functions = [load_reward(f"{file}:own") for file in files]
    assert [function(completions=["a"]) for function in functions] == [[0.0], [1.0]]
    assert sys.modules["json"] is json
    assert [sys.modules[function.__module__].__file__ for function in functions] == [
        str(file) for file in files
    ]


@pytest.mark.parametrize(
    "ending",
    ["raise SystemExit(0)", "raise BaseException(1)", "raise ValueError(1)", "import nothing_like_this"],
)
def test_a_reward_module_that_ends_the_program_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (tmp_path / "module_that_ends.py").write_text(ending + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path / 'module_that_ends.py'}:f", "module_that_ends.f"):
        with pytest.raises(InputError, match=r"module_that_ends.*cannot be"):
            load_reward(name)
    assert not [name for name in sys.modules if "module_that_ends" in name]


def test_exact_match_reads_text_and_messages() -> None:
    chat = [{"role": "assistant", "content": " 7\n"}]
    assert exact_match(["7", chat, "77"], ["7", 7, "7"]) == [1.0, 1.0, 0.0]


def test_problems_that_are_made_here_need_no_reasoning_gym() -> None:
    # Its import takes two thirds of a second.
    code = """
import subprocess
import sys
from lockstep.tasks.data import load_data
size = {"train_split": "train", "test_split": None, "train_size": 2, "eval_size": 1, "seed": 0}
assert len(load_data("arithmetic", subset=None, **size).train) == 2
assert "reasoning_gym" not in sys.modules
assert len(load_data("reasoning_gym", subset="gcd", **size).train) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
