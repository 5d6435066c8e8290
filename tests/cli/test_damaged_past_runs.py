"""Commands on past runs leave out what is damaged, in one line per file, and end with no traceback."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draws import PROFILE

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.extras.audit.dumps import read_dump
from lockstep.files import check_writable

LINE = {"step": 1, "loss": 0.5, "reward": 1.0}
PARITY = {"checked_tokens": 9, "failed": 0, "mean_abs_gap": 1e-6, "max_abs_gap": 1e-5}
DEEP = "[" * 100_000 + "]" * 100_000
VALUES = ("[]", "{}", '"x"', "true", "1e999", "NaN", "1" + "0" * 400, DEEP)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    files = {
        "run.json": {"seed": 1},
        "metrics.jsonl": LINE,
        "summary.json": {"wall_s": 1.0, "tokens_per_s": 2.0, "parity": PARITY},
        "before.json": {
            "metrics": {"eval_reward": 0.5},
            "rollouts": [{"prompt": "question", "completions": ["answer"], "rewards": [1.0]}],
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "name", "good"),
    [
        ("compare", "metrics.jsonl", '"loss": 0.5'),
        ("report", "metrics.jsonl", '"reward": 1.0'),
        ("compare", "summary.json", '"failed": 0'),
        ("report", "summary.json", '"wall_s": 1.0'),
    ],
)
def test_a_value_of_another_kind_is_left_out_in_one_line(
    run: Path, command: str, name: str, good: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (run / name).read_text()
    for value in VALUES:
        (run / name).write_text(
            whole.replace(good, f"{good.partition(':')[0]}: {value}") + (whole if "l" in name[-1] else "")
        )
        assert main([command, str(run)]) == 0, value
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lockstep: ")]
        assert len(said) == 1, value
        assert "left out, because it is damaged: " in said[0]
        assert name in said[0]
        assert len(said[0]) <= 500


def test_a_damaged_evaluation_is_left_out_of_the_rollouts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (run / "before.json").read_text()
    (run / "after.json").write_text(whole.replace("answer", "later"))
    for value in VALUES:
        (run / "before.json").write_text(whole.replace('"rewards": [1.0]', f'"rewards": {value}'))
        if value == "[]":
            continue
        assert main(["rollouts", str(run)]) == 0
        printed = capsys.readouterr()
        assert "later" in printed.out
        assert "answer" not in printed.out
        assert printed.err.count("left out, because it is damaged: ") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "before.json", "summary.json"])
def test_a_pipe_in_place_of_a_file_is_left_out(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "receipt.jsonl").write_text("")
    (run / name).unlink()
    os.mkfifo(run / name)
    for command in ("compare", "report"):
        assert main([command, str(run)]) == 0
        printed = capsys.readouterr()
        assert f"{name} (is not a file)" in printed.err


def test_a_pipe_in_place_of_kept_rollouts_is_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rollouts").mkdir()
    os.mkfifo(run / "rollouts" / "rollouts_1.parquet")
    assert main(["report", str(run)]) == 0
    assert main(["rollouts", str(run)]) == 2
    assert main(["audit", str(run), "--model", "m"]) == 2
    assert capsys.readouterr().err.count("is not a file") == 3


@pytest.mark.parametrize("command", [["report"], ["audit", "--model", "m", "--json"]])
def test_an_output_that_cannot_be_written_is_found_first(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = [] if command[-1] == "--json" else ["--output"]
    for place in ("", str(run), str(run / "run.json" / "x"), str(run / "none" / "x")):
        assert main([command[0], str(run), *command[1:], *flag, place]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written" in line or "is a directory" in line
    check_writable(run / "new")
    assert not (run / "new").exists()


def damaged(content: Any, rng: random.Random) -> Any:
    """The content with one value in it that is another one, or gone."""
    keys = list(content) if isinstance(content, dict) else []
    keys = list(range(len(content))) if isinstance(content, list) else keys
    if not keys or rng.random() < 0.3:
        return rng.choice(
            [None, True, -1, 1e308, 2**70, "", "x" * 100_000, [], {}, [[]], {"a": []}, "\ud800"]
        )
    key = rng.choice(keys)
    if rng.random() < 0.2:
        return {k: v for k, v in content.items() if k != key} if isinstance(content, dict) else content[1:]
    changed = dict(content) if isinstance(content, dict) else list(content)
    changed[key] = damaged(content[key], rng)
    return changed


@pytest.mark.parametrize("seed", range(120 if PROFILE == "thorough" else 3))
def test_no_damage_of_a_file_is_a_traceback(
    run: Path, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, page = random.Random(seed), str(tmp_path / "page.html")
    (run / "about.json").write_text(json.dumps({"method": "GRPO", "model": "m", "settings": {"seed": 1}}))
    (run / "end.json").write_text(json.dumps({"ended": "finished", "step": 1, "max_steps": 1}))
    shown = {"step": 1, "rollouts": [{"name": "a", "turns": []}]}
    (run / "shown_rollouts.jsonl").write_text(json.dumps(shown) + "\n")
    whole = {path: path.read_bytes() for path in run.iterdir()}
    for _ in range(15):
        path = rng.choice(sorted(whole))
        odd = bytearray(whole[path])
        odd[rng.randrange(len(odd))] = rng.randrange(256)
        other = json.dumps(damaged(json.loads(whole[path]), rng)).encode()
        path.write_bytes(rng.choice([bytes(odd), other, other, b"", whole[path][: len(odd) // 2]]))
        for words in (["compare"], ["report", "--output", page], ["rollouts"], ["verify", "--explain"]):
            assert main([words[0], *words[1:], str(run)]) in (0, 1, 2)
            assert all(len(line) <= 500 for line in capsys.readouterr().err.splitlines()), (path, words)
        path.write_bytes(whole[path])


def columns(**changes: str) -> str:
    row = {"prompt_ids": "[1]", "completion_ids": "[2, 3]", "logprobs": "[-1.0, -2.0]", **changes}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}\n"


@pytest.mark.parametrize(
    "text",
    [
        *(f"{value}\n" for value in VALUES),
        *(
            columns(completion_ids=value)
            for value in (*VALUES, "[8.5, 1]", "[true, 1]", '["1", "2"]', "[-1, 2]")
        ),
        *(columns(logprobs=value) for value in (*VALUES, "[[1], 2]", '["x", 1]')),
        *(columns(temperature=value) for value in (*VALUES, "0", "-1")),
    ],
    ids=lambda text: text[:40],
)
def test_rollouts_of_other_kinds_are_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    write: Callable[[str], int] = (tmp_path / "d.jsonl").write_text
    write(columns())
    assert len(read_dump(tmp_path / "d.jsonl")) == 1
    write(text)
    with pytest.raises(InputError) as found:
        read_dump(tmp_path / "d.jsonl")
    assert len(str(found.value)) <= 500


def test_merge_refuses_a_link_to_nothing_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "m"}')
    (tmp_path / "made").symlink_to("nowhere")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "made")]) == 2
    assert "made exists; give another folder" in capsys.readouterr().err


def test_merge_refuses_damaged_settings_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for value in VALUES:
        (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": {value}}}')
        code = main(["merge", str(adapter), str(tmp_path / "made")])
        *_, line = capsys.readouterr().err.splitlines()
        assert code == 2
        assert line.startswith("lockstep: ")
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
