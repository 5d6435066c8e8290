"""`log_completions`: the table that a run with a real engine prints at its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import CONTEXT

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.contract.protocol import Engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import InputError
from lockstep.report.live import Row
from lockstep.run.files.logs import markdown_of, rows_of, table_of
from lockstep.tokens.chat import load_tokenizer

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(4)]})


def by_length(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
    log_extra("tokens", [f"{len(ids)} of them" for ids in completion_ids])
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Engine:
    return TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )


def run(model: str, folder: Path, engine: Engine, **fields: Any) -> GRPOTrainer:
    base: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
    }
    base |= {"max_steps": 2, "logging_steps": 2, "save_strategy": "no", "bf16": False, "disable_tqdm": True}
    base |= {"learning_rate": 1e-3, "report_to": "none"}
    made = GRPOTrainer(
        model, by_length, GRPOConfig(str(folder), **{**base, **fields}), PROMPTS, engine=engine
    )
    made.train()
    return made


def test_every_log_shows_the_last_generation(
    untied_dir: str,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = run(untied_dir, tmp_path, engine, log_completions=True)
    shown = capsys.readouterr().out
    assert made.loop.generation is not None
    rows = rows_of(made.loop.generation)
    assert len(rows) == 8
    assert shown.count("Step ") == 1
    assert "Step 2" in shown
    assert shown.count(" of them") == 8
    assert all(r.scores == {"by_length": r.scores["by_length"]} for r in rows)
    assert any(f"{r.advantage:.2f}" in shown for r in rows if r.advantage)
    # The advantage of each row belongs to its own completion: in a group, a higher score has a higher advantage.
    for prompt in {r.prompt for r in rows}:
        group = [r for r in rows if r.prompt == prompt]
        assert sorted(group, key=lambda r: r.scores["by_length"]) == sorted(group, key=lambda r: r.advantage)


def test_nothing_is_shown_unasked_and_one_row_a_prompt_where_asked(
    untied_dir: str,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run(untied_dir, tmp_path, engine)
    assert "Step " not in capsys.readouterr().out
    run(untied_dir, tmp_path, engine, log_completions=True, log_unique_prompts=True)
    assert capsys.readouterr().out.count(" of them") == 2


def test_tensorboard_gets_all_rows_as_a_table(
    untied_dir: str, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    made = run(
        untied_dir, tmp_path, engine, log_completions=True, num_completions_to_print=1, report_to="tensorboard",
        max_steps=1,
        logging_steps=1,
    )  # fmt: skip
    assert made.loop.generation is not None
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    (event,) = board.Tensors("completions/text_summary")
    assert event.step == 1
    head, line, *rows = event.tensor_proto.string_val[0].decode().splitlines()
    assert head == "| step | prompt | completion | by\\_length | tokens | advantage |"
    assert set(line) == set("| -")
    assert len(rows) == 8
    first = rows_of(made.loop.generation)[0]
    assert f"| {first.scores['by_length']:.4g} | {first.extra['tokens']} | {first.advantage:.4g} |" in rows[0]


def test_a_table_has_trls_columns_and_its_text_is_no_markup() -> None:
    messages = [{"role": "user", "content": "a|b"}]
    rows = [
        Row(messages, "one\ntwo <b>|</b> *x*", {"f": 0.5, "g": None}, 0.25, {"seen": [1, 2]}),
        Row("plain", "c", {"f": None, "g": 1.0}, -1.0),
    ]
    columns, data = table_of(rows, 7)
    assert columns == ["step", "prompt", "completion", "f", "g", "seen", "advantage"]
    assert data[0] == [7, json.dumps(messages), "one\ntwo <b>|</b> *x*", 0.5, None, "[1, 2]", 0.25]
    assert data[1] == [7, "plain", "c", None, 1.0, None, -1.0]
    shown = markdown_of(columns, data).splitlines()
    assert len(shown) == 4
    assert "one<br>two &lt;b&gt;\\|&lt;/b&gt; \\*x\\*" in shown[2]


def test_fewer_than_one_row_cannot_be_printed() -> None:
    with pytest.raises(InputError, match="num_completions_to_print=0"):
        GRPOConfig(output_dir="unused", num_completions_to_print=0)
