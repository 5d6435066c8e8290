"""Bad data: each file, split or column is refused in one line that says which row or file, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bad_input import Row, check, rows
from training_words import words

PROMPTS = "".join(f'{{"prompt": "p{i}"}}\n' for i in range(8))


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def column(**values: Any) -> str:
    """Eight good rows with further columns."""
    return lines(*({"prompt": f"p{i}", **values} for i in range(8)))


FILES = [
    Row("empty", ("d.jsonl", ""), "is empty"),
    Row("a line that is cut", ("d.jsonl", PROMPTS + '{"prompt": "a'), r"line 9.*not JSON"),
    Row("a line that is no JSON", ("d.jsonl", '{"prompt": "a"}\nhello\n'), r"line 2.*not JSON"),
    Row("single quotes", ("d.jsonl", "{'prompt': 'a'}\n"), r"line 1.*not JSON"),
    Row("a line with a list", ("d.jsonl", '["a"]\n'), r"line 1|prompt"),
    Row("a line with a number", ("d.jsonl", "3\n"), r"line 1|prompt"),
    Row("binary", ("d.jsonl", b"\x80\x04\x95\xff\xfe"), r"d.jsonl"),
    Row("latin-1", ("d.jsonl", '{"prompt": "größer"}\n'.encode("latin-1")), r"d.jsonl"),
    Row("only blank lines", ("d.jsonl", "\n\n\n"), r"d.jsonl|empty"),
    Row("types that change", ("d.jsonl", lines({"prompt": "a"}, {"prompt": 3})), r"d.jsonl|prompt"),
    Row("no prompt column", ("d.jsonl", lines({"question": "a"})), "no 'prompt' column"),
    Row("prompts that are numbers", ("d.jsonl", lines({"prompt": 1}, {"prompt": 2})), r"train/0|prompt"),
    Row("prompts that are nothing", ("d.jsonl", lines({"prompt": None}, {"prompt": None})), r"train/|prompt"),
    Row("prompts that are empty", ("d.jsonl", lines(*[{"prompt": ""}] * 8)), r"train/0"),
    Row("prompts without messages", ("d.jsonl", lines(*[{"prompt": []}] * 8)), r"train/0|prompt"),
    Row("messages without a role", ("d.jsonl", lines(*[{"prompt": [{"content": "a"}]}] * 8)), r"train/0"),
    Row("messages without content", ("d.jsonl", lines(*[{"prompt": [{"role": "user"}]}] * 8)), r"train/0"),
    Row("messages that are text", ("d.jsonl", lines(*[{"prompt": ["a"]}] * 8)), r"train/0"),
    Row("an unknown role", ("d.jsonl", lines(*[{"prompt": [{"role": 3, "content": "a"}]}] * 8)), r"train/0"),
    Row(
        "a prompt that is too long",
        ("d.jsonl", lines(*[{"prompt": "a b " * 3000}] * 8)),
        r"train/0 has \d+ tokens",
    ),
    Row("a column completions", ("d.jsonl", column(completions="x")), "column 'completions'"),
    Row("a column prompts", ("d.jsonl", column(prompts="x")), "column 'prompts'"),
    Row("a column completion_ids", ("d.jsonl", column(completion_ids=[1])), "column 'completion_ids'"),
    Row("a column trainer_state", ("d.jsonl", column(trainer_state="x")), "column 'trainer_state'"),
    Row("a column log_metric", ("d.jsonl", column(log_metric="x")), "column 'log_metric'"),
    Row("a column log_extra", ("d.jsonl", column(log_extra="x")), "column 'log_extra'"),
    Row("images", ("d.jsonl", column(image="x")), "images are not supported"),
    Row("a csv without a prompt", ("d.csv", "question\na\n"), "no 'prompt' column"),
    Row("a csv whose rows differ", ("d.csv", "prompt\na,b,c\nd\n"), "d.csv|prompt"),
    Row("a parquet that is text", ("d.parquet", "hello"), "d.parquet"),
    Row("a json that is cut", ("d.json", '[{"prompt": "a"}'), "d.json"),
    Row("a directory with nothing", ("folder/x.txt", ""), "folder"),
]
NAMES = [
    Row("no file", {"dataset_name": "nowhere.jsonl"}, "does not exist"),
    Row("no directory", {"dataset_name": "/nowhere/at/all"}, "does not exist"),
    Row("an empty name", {"dataset_name": ""}, "dataset_name|data"),
    Row("no such kind", {"dataset_name": "arithmetic", "dataset_config": "roots"}, "no problems of kind"),
    Row(
        "no such puzzle",
        {"dataset_name": "reasoning_gym", "dataset_config": "roots", "train_size": "4"},
        "roots",
    ),
    Row("a puzzle without a name", {"dataset_name": "reasoning_gym"}, "needs dataset_config"),
    Row(
        "more problems than there are",
        {"dataset_name": "arithmetic", "train_size": "100000"},
        "were asked for",
    ),
    Row("no problems at all", {"dataset_name": "arithmetic", "train_size": "0"}, "empty|train_size"),
    Row("a split of a file", {"dataset_train_split": "validation"}, "no split 'validation'"),
    Row("a test split of a file", {"dataset_test_split": "test"}, "no split 'test'"),
    Row(
        "a test split of problems",
        {"dataset_name": "arithmetic", "dataset_test_split": "test"},
        "has no splits",
    ),
    Row("more held out than there is", {"eval_size": "100"}, "cannot be held out"),
    Row(
        "fewer prompts than a generation", {"train_size": "1", "per_device_train_batch_size": "8"}, "prompts"
    ),
]


@rows(*FILES)
def test_a_bad_file_is_one_line(
    row: Row, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content = row.given
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    named = path if path.suffix != ".txt" else path.parent
    check(words(tmp_path, untied_dir, dataset_name=str(named)), row, capfd)


@rows(*NAMES)
def test_bad_data_by_name_is_one_line(
    row: Row,
    tmp_path: Path,
    untied_dir: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check(words(tmp_path, untied_dir, **row.given), row, capfd)
