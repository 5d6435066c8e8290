"""`lockstep audit` agrees with clean rollouts of every program, and names each fault that is put into them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extras.audit.dumped import (
    Row,
    as_openrlhf,
    as_prime_rl,
    as_trl,
    as_verl,
    cut,
    sampled_rows,
    tempered,
    with_logprobs,
    write,
)
from tiny import make_model, make_tokenizer, perturbed, save
from transformers import PreTrainedModel

from lockstep.cli.main import main
from lockstep.contract.distribution import Distribution
from lockstep.contract.sampling import Sampling
from lockstep.extras.audit import rollout_logprobs as evidence
from lockstep.extras.audit.dumps import AuditedRollout


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # Weights of a size at which distributions are neither flat nor certain.
    return make_model(scale=0.15, seed=3).eval()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def clean(model: PreTrainedModel) -> list[Row]:
    return sampled_rows(model)


def audited(folder: Path, path: Path, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the findings by their subject."""
    report = path.with_suffix(".findings")
    code = main(
        ["audit", str(path), "--model", str(folder), "--dtype", "float32", "--json", str(report), *words]
    )
    return code, {f["about"]: f for f in json.loads(report.read_text())}


@pytest.mark.parametrize("program", [as_trl, as_prime_rl, as_verl, as_openrlhf])
def test_clean_rollouts_of_every_program_agree(
    program: Callable[[list[Row]], list[dict[str, Any]]], folder: Path, clean: list[Row], tmp_path: Path
) -> None:
    code, found = audited(folder, write(program(clean), tmp_path / "dump.jsonl"))
    assert code == 0
    assert {f["verdict"] for f in found.values()} == {"agree"}
    assert f"{16 * 24} ids" in found["log-probs"]["says"]


def test_columns_of_lists_and_parquet_are_read_too(folder: Path, clean: list[Row], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = as_trl(clean)
    (tmp_path / "columns.json").write_text(json.dumps({key: [row[key] for row in rows] for key in rows[0]}))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dump.parquet")
    assert audited(folder, tmp_path / "columns.json")[0] == 0
    assert audited(folder, tmp_path / "dump.parquet")[0] == 0


def test_a_stated_temperature_and_filter_are_scored(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    rows = sampled_rows(model, draw=lambda logits: cut(0.9)(logits / 0.8))
    path = write(as_trl(rows), tmp_path / "dump.jsonl")
    assert audited(folder, path, "--temperature", "0.8", "--top_p", "0.9")[0] == 0


@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_a_server_is_compared_at_temperature_one_and_every_rollout_is_scored_once(
    apart: float, model: PreTrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[int] = []
    real = evidence.logit_chunks

    def server(url: str, rollouts: list[AuditedRollout]) -> list[Any]:
        found = [evidence.score(model, r, Distribution(Sampling(1))).own + apart for r in rollouts]
        forwards.clear()
        return found

    monkeypatch.setattr(evidence, "logit_chunks", lambda *args: forwards.append(1) or real(*args))
    monkeypatch.setattr("lockstep.extras.audit.rollout_logprobs.server_logprobs", server)
    path = write(as_trl(sampled_rows(model, draw=tempered(0.8))), tmp_path / "dump.jsonl")
    code, found = audited(folder, path, "--temperature", "0.8", "--url", "http://localhost:1")
    assert (code, found["weights"]["verdict"]) == ((1, "DIFFER") if apart else (0, "agree"))
    assert ("differ from the model's by 0.3 nats" in found["weights"]["says"]) == bool(apart)
    assert len(forwards) == 16


def test_no_sums_are_made_while_a_cause_is_sought(
    model: PreTrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[int] = []
    real = evidence.draw_sums
    monkeypatch.setattr(evidence, "draw_sums", lambda logps, own: sums.append(len(own)) or real(logps, own))
    path = write(as_trl(sampled_rows(model, draw=tempered(0.8))), tmp_path / "dump.jsonl")
    assert audited(folder, path)[0] == 1
    assert sum(sums) == 16 * 24


def changed(name: str, model: PreTrainedModel, clean: list[Row]) -> list[Row]:
    """Rollouts with the fault of one name."""
    match name:
        case "raw log-probs":
            return sampled_rows(model, draw=tempered(0.7), report=tempered(1.0))
        case "another temperature":
            return sampled_rows(model, draw=tempered(1.3))
        case "a filter that nobody stated":
            return sampled_rows(model, draw=cut(0.9))
        case "shifted by one id":
            return with_logprobs(clean, lambda i, own: [own[0], *own[:-1]])
        case "rows of others":
            return with_logprobs(clean, lambda i, own: clean[(i + 2) % len(clean)].logprobs)
        case "a prompt encoded again":
            tokenizer = make_tokenizer()
            return sampled_rows(
                model, seen=lambda p: tokenizer.encode(tokenizer.decode(p), add_special_tokens=False)
            )
        case "bfloat16":
            half = make_model(scale=0.15, seed=3).to(torch.bfloat16).eval()
            return sampled_rows(half)
        case "biased draws":
            return sampled_rows(model, rows=48, length=32, draw=tempered(0.6), report=tempered(1.0))
        case "one seed for all":
            return [clean[0], *clean[1:3], clean[0]]
        case "a missing log-prob":
            return with_logprobs(clean, lambda i, own: [math.nan, *own[1:]] if i == 3 else own)
        case "another vocabulary":
            return [Row(clean[0].prompt, [9999, *clean[0].completion[1:]], clean[0].logprobs)]
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("fault", "about", "says", "words"),
    [
        ("raw log-probs", "log-probs", "those of the raw distribution", ["--temperature", "0.7"]),
        ("another temperature", "log-probs", "those of temperature 1.3; 1 was stated", []),
        ("a filter that nobody stated", "log-probs", "a filter like top_p 0.9 that was not stated", []),
        ("shifted by one id", "log-probs", "stand one id too late", []),
        ("rows of others", "log-probs", "rows are shifted against each other", []),
        ("a prompt encoded again", "tokens", "the engine saw the prompt encoded again", []),
        ("bfloat16", "log-probs", "numerics: the gap is as small as that of an engine in bfloat16", []),
        ("biased draws", "draws", "the engine prefers likely tokens", []),
        ("one seed for all", "draws", "the same prompt and the same ids", []),
        ("a missing log-prob", "log-probs", "1 rollouts have sampled ids without a finite log-prob", []),
        ("another vocabulary", "tokens", "has the id 9999; the model has 384 ids", []),
    ],
)
def test_each_fault_is_named(
    fault: str,
    about: str,
    says: str,
    words: list[str],
    model: PreTrainedModel,
    folder: Path,
    clean: list[Row],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = audited(
        folder, write(as_trl(changed(fault, model, clean)), tmp_path / "dump.jsonl"), *words
    )
    assert code == 1
    assert found[about]["verdict"] == "DIFFER"
    assert says in found[about]["says"]
    assert found[about]["remedy"] in capsys.readouterr().out


def test_older_weights_are_named(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    older = perturbed(model).eval()
    save(older, tmp_path / "older")
    path = write(as_trl(sampled_rows(older)), tmp_path / "dump.jsonl")
    assert "name older checkpoints" in audited(folder, path)[1]["weights"]["remedy"]
    code, found = audited(folder, path, "--earlier", str(tmp_path / "older"))
    assert code == 1
    assert (
        found["weights"]["says"]
        == f"staleness: the rollouts were sampled by the weights of {tmp_path / 'older'}"
    )


def test_one_old_tensor_is_named(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    older = perturbed(model).eval()
    save(older, tmp_path / "older")
    mixed, part = make_model(scale=0.15, seed=3).eval(), "model.layers.1.mlp.down_proj"
    mixed.get_submodule(part).load_state_dict(older.get_submodule(part).state_dict())
    path = write(as_trl(sampled_rows(mixed)), tmp_path / "dump.jsonl")
    found = audited(folder, path, "--earlier", str(tmp_path / "older"))[1]
    assert f"an old tensor: the engine seems to hold {part} of" in found["weights"]["says"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no rollouts"),
        ("{", "cannot be read"),
        ('{"input": "a", "output": "b"}', "of no known program"),
        (
            '{"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0]}',
            "2 completion ids, 2 mask values and 1 log-probs",
        ),
        ('{"prompt_ids": [1], "completion_ids": [2]}', "it has no log-probs"),
        ('{"prompt_ids": [], "completion_ids": [2], "logprobs": [-1.0]}', "its prompt has no ids"),
        ('{"prompts": [1], "responses": [2], "rollout_log_probs": [-1.0]}', "attention_mask must cover"),
    ],
)
def test_a_file_that_cannot_be_judged_gets_one_line(
    content: str, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump.jsonl").write_text(content)
    assert main(["audit", str(tmp_path / "dump.jsonl"), "--model", str(folder)]) == 2
    written = capsys.readouterr().err
    assert says in written
    assert len([line for line in written.splitlines() if not line.endswith(" …")]) == 1


def test_inserted_ids_are_context_only(folder: Path, clean: list[Row], tmp_path: Path) -> None:
    rows = as_trl(clean)
    for row in rows:
        # The log-prob of a tool's result is nobody's.
        row["env_mask"] = [1] * 10 + [0] * 4 + [1] * 10
        row["logprobs"] = [0.0 if 10 <= i < 14 else value for i, value in enumerate(row["logprobs"])]
    code, found = audited(folder, write(rows, tmp_path / "dump.jsonl"))
    assert code == 0
    assert f"{16 * 20} ids" in found["log-probs"]["says"]


def test_a_text_may_have_ends_of_lines_that_are_none_of_the_files(
    folder: Path, clean: list[Row], tmp_path: Path
) -> None:
    rows = [{**row, "text": "a\u2028b\u0085c"} for row in as_trl(clean)]
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert audited(folder, path)[0] == 0


def test_a_dump_without_a_sampled_id_is_not_judged(folder: Path, clean: list[Row], tmp_path: Path) -> None:
    rows = [{**row, "env_mask": [0] * len(row["completion_ids"])} for row in as_trl(clean)]
    _, found = audited(folder, write(rows, tmp_path / "dump.jsonl"))
    assert {finding["says"] for finding in found.values()} == {"no id of the dump was sampled"}
