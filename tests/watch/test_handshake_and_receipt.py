"""The handshake names every difference; the receipt's chain shows every change."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from hypothesis import given
from hypothesis import strategies as st

from lockstep.contract.protocol import EngineSettings
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.errors import InputError, ProofError
from lockstep.watch.receipt import Receipt, check_chain
from lockstep.watch.settings import ExpectedSettings, check_settings

ACTUAL = EngineSettings(
    "vllm", "m", "Llama", torch.float32, torch.float32, 100, 64, "processed_logprobs", True, False, None, {}
)
EXPECTED = ExpectedSettings("m", "Llama", torch.float32, torch.float32, 100, 64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, "model"),
        ({"architecture": "Qwen"}, "architecture"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"head_dtype": torch.bfloat16}, "head_dtype"),
        ({"vocab_size": 101}, "vocab_size"),
        ({"max_model_len": 63}, "max_model_len"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
        ({"quantization": "fp8"}, "quantization"),
        ({"sampling_defaults": {"top_p": 0.8}}, "top_p"),
    ],
)
def test_each_setting_that_matters_is_compared(change: dict[str, object], named: str) -> None:
    check_settings(EXPECTED, ACTUAL)
    with pytest.raises(ProofError, match=named):
        check_settings(EXPECTED, replace(ACTUAL, **change))  # type: ignore[arg-type]


def test_an_engine_that_gets_pictures_must_not_normalise_pixels_again() -> None:
    twice = replace(ACTUAL, normalises_pixels=True)
    check_settings(EXPECTED, twice)
    with pytest.raises(ProofError, match="mm_device_do_normalize is True"):
        check_settings(replace(EXPECTED, pictures=True), twice)


def test_an_engine_must_be_able_to_sample_what_the_run_asks_for() -> None:
    able = replace(ACTUAL, kept_ids=True, structured_outputs="xgrammar")
    for sampling, lacking, named in (
        (Sampling(9, min_p=0.1), {"kept_ids": False}, "kept_ids .* is False in the engine"),
        (
            Sampling(9, grammar=Grammar("regex", "a")),
            {"structured_outputs": "auto"},
            "structured_outputs is 'auto'",
        ),
    ):
        asked = replace(EXPECTED, sampling=sampling)
        check_settings(asked, able)
        check_settings(replace(asked, sampling=Sampling(9, repetition_penalty=1.2)), replace(able, **lacking))  # type: ignore[arg-type]
        with pytest.raises(ProofError, match=named):
            check_settings(asked, replace(able, **lacking))  # type: ignore[arg-type]


def test_a_run_that_names_more_ids_than_the_engine_takes_is_refused_at_its_start() -> None:
    asked, limits = (
        replace(EXPECTED, sampling=Sampling(9, allowed_token_ids=(4, 5))),
        {"allowed_token_ids": 1},
    )
    check_settings(asked, replace(ACTUAL, request_limits={"allowed_token_ids": 2}))
    with pytest.raises(InputError, match="allowed_token_ids names 2 ids; the engine takes at most 1"):
        check_settings(asked, replace(ACTUAL, request_limits=limits))


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("ours", "engines"),
    [
        ({"sliding_window": 0}, {"sliding_window": None}),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}, {"rope_parameters": ROPE}),
        ({"rope_parameters": {"full": ROPE | {"factor": None}}}, {"rope_parameters": {"full": ROPE}}),
        ({"partial_rotary_factor": None}, {"partial_rotary_factor": 1.0}),
        ({"vision_config.sliding_window": None}, {"vision_config.sliding_window": 0}),
        ({"mlp_only_layers": [0]}, {"mlp_only_layers": [0]}),
    ],
)
def test_two_spellings_of_one_setting_are_one(ours: dict[str, object], engines: dict[str, object]) -> None:
    check_settings(replace(EXPECTED, model_config=ours), replace(ACTUAL, model_config=engines))
    check_settings(replace(EXPECTED, model_config=engines), replace(ACTUAL, model_config=ours))


@pytest.mark.parametrize(
    ("ours", "engines"),
    [
        ({"sliding_window": 0}, {"sliding_window": 8}),
        ({"sliding_window": None}, {"sliding_window": 8}),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, {"rope_parameters": ROPE}),
        ({"num_experts": 0}, {"num_experts": None}),
        ({"mlp_only_layers": [0]}, {"mlp_only_layers": []}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    ],
)
def test_another_meaning_is_a_difference(ours: dict[str, object], engines: dict[str, object]) -> None:
    for one, other in ((ours, engines), (engines, ours)):
        with pytest.raises(ProofError, match="of the model's config is "):
            check_settings(replace(EXPECTED, model_config=one), replace(ACTUAL, model_config=other))


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(ProofError, match=r"model is .*vocab_size is .*logprobs_mode is "):
        check_settings(EXPECTED, replace(ACTUAL, model="x", vocab_size=1, logprobs_mode="raw_logprobs"))


def written(folder: Path, entries: int) -> list[str]:
    path = folder / "receipt.jsonl"
    path.unlink(missing_ok=True)
    for i in range(entries):
        # Each line is written by a new object: the chain continues after a restart.
        Receipt(path, i).append({"step": i + 1, "max_abs_gap": 1e-6 * i})
    return path.read_text().splitlines()


@given(data=st.data())
def test_a_changed_removed_or_swapped_line_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = written(tmp_path_factory.mktemp("receipt"), 6)
    check_chain(lines)
    i = data.draw(st.integers(0, 4))
    kind = data.draw(st.sampled_from(["change", "remove", "swap"]))
    if kind == "change":
        body = json.loads(lines[i])
        body["max_abs_gap"] = 0.5
        lines[i] = json.dumps(body)
    elif kind == "remove":
        del lines[i]
    else:
        lines[i], lines[i + 1] = lines[i + 1], lines[i]
    with pytest.raises(InputError, match="receipt line"):
        check_chain(lines)


def test_a_receipt_that_was_changed_is_not_continued(tmp_path: Path) -> None:
    lines = written(tmp_path, 2)
    (tmp_path / "receipt.jsonl").write_text(lines[1] + "\n")
    with pytest.raises(InputError, match="receipt line 1"):
        Receipt(tmp_path / "receipt.jsonl", 2)


def test_lines_after_the_step_that_a_run_goes_on_from_are_written_again(tmp_path: Path) -> None:
    lines = written(tmp_path, 4)
    Receipt(tmp_path / "receipt.jsonl", 2).append({"step": 3, "max_abs_gap": 2e-6})
    assert (tmp_path / "receipt.jsonl").read_text().splitlines() == lines[:3]


def test_a_line_that_a_kill_cut_short_is_dropped_and_written_again(tmp_path: Path) -> None:
    lines = written(tmp_path, 3)
    (tmp_path / "receipt.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])
    Receipt(tmp_path / "receipt.jsonl", 2).append({"step": 3, "max_abs_gap": 2e-6})
    assert (tmp_path / "receipt.jsonl").read_text().splitlines() == lines


def test_a_new_run_keeps_the_earlier_ones_receipt_beside_its_own(tmp_path: Path) -> None:
    lines = written(tmp_path, 4)
    Receipt(tmp_path / "receipt.jsonl", 0).append({"step": 1, "max_abs_gap": 0.0})
    assert (tmp_path / "receipt.previous.jsonl").read_text().splitlines() == lines
    assert len((tmp_path / "receipt.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_is_full_when_a_run_goes_on_leaves_the_receipt_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    lines = written(tmp_path, 4)
    before = (tmp_path / "receipt.jsonl").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, full_disk(20) if call == "write" else nullcontext():
        if call == "fsync":
            patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left|File too large"):
            Receipt(tmp_path / "receipt.jsonl", 2)
    assert (tmp_path / "receipt.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["receipt.jsonl"]
    Receipt(tmp_path / "receipt.jsonl", 2).append({"step": 3, "max_abs_gap": 2e-6})
    assert (tmp_path / "receipt.jsonl").read_text().splitlines() == lines[:3]
