"""vLLM's own GPU worker and both of its model runners, on the pretend GPU:

GRPO with every proof on, kept ids, sleep, stand-ins.

One process does all runs (`runs.py`), because the device must be there before PyTorch is imported. A limit of a gap
is about ten times what was measured; in bf16 it is the limit of the run itself. docs/internals/engines.md says what
this does not show.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import VLLM

import pretend_cuda
from pretend_cuda.vllm.environment import environment

MISSING = pretend_cuda.missing() or (
    "" if find_spec("triton") else "vLLM's kernels need Triton's interpreter: install triton"
)
pytestmark = [*VLLM, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
# Largest gap of a token in float32, in nats.
FP32 = 2e-4
SECOND, FIRST = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"
# Largest figure of each stand-in; one without an entry must be 0. Rounding is 2⁻²⁴ a step in float32, and 2⁻⁹ of a
# result in bfloat16, or twice that where the sum of two is rounded again; a layer of experts rounds four times.
LIMITS = {
    "attention": {"whole": 1e-6, "window": 1e-6, "capped": 1e-6, "bfloat16": 4e-3, "packed": 1e-6},
    "triton_attention": {"whole": 1e-6, "window": 1e-6, "capped": 1e-6},
    "noise": {"noise": 4e-7},
    "rotation": {"halves": 1e-6, "pairs": 1e-6},
    "rotation_on_axes": {"queries": 1e-6, "keys": 1e-6},
    "adapters": {"down": 1e-6, "up": 8e-3},
    "quantiser": {"codes_rows": 0.01, "codes_whole": 0.01},
    "products": {"codes": 4e-3, "wide": 1e-6},
    "norms": {"view": 1e-6, "sum": 1e-6},
    "experts": {"weights": 1e-6, "outputs": 1e-5, "bfloat16": 16e-3},
}
# What shows that a check has looked at something.
COUNTS = {"cache": "written", "filters": "kept", "noise": "drawn"}
STAND_INS = (
    *(
        "attention",
        "triton_attention",
        "cache",
        "rotation",
        "rotation_on_axes",
        "filters",
        "noise",
        "adapters",
        "quantiser",
        "products",
        "norms",
    ),
    *("embedding", "experts"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run has found."""
    folder = tmp_path_factory.mktemp("runs")
    pretend_cuda.compiled()
    with (folder / "output").open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "pretend_cuda.vllm.runs", str(folder / "found.json")]
        code = subprocess.run(
            command, stdout=output, stderr=output, env=environment(), timeout=600
        ).returncode
    text = (folder / "output").read_text(encoding="utf-8", errors="replace")
    assert code == 0, text[-4000:]
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def run_alone(name: str, folder: Path) -> dict[str, Any]:
    """What a run in a process of its own has found."""
    command = [sys.executable, "-m", "pretend_cuda.vllm.runs", str(folder / "found.json"), name]
    assert subprocess.run(command, env=environment(), timeout=600).returncode == 0
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def of(runs: dict[str, Any], name: str, part: str = "") -> dict[str, Any]:
    """What a run, or a part of it, has found. Fails with its traceback if it has failed."""
    found = runs[name]
    assert "failed" not in found, found["failed"]
    found = found[part] if part else found
    assert "failed" not in found, found["failed"]
    return found


def learned_on(found: dict[str, Any], runner: str, attention: str) -> None:
    assert (found["steps"], found["moved"], found["device"]) == (2, True, "cuda:0")
    assert (found["worker"], found["runner"]) == ("vllm.v1.worker.gpu_worker", runner)
    assert found["attention"] == attention
    # A GPU's defaults: steps begin before the one before has ended, and prompts are computed in parts. No step is
    # under way when weights come.
    assert found["asynchronous"]
    assert min(found["ahead"], found["in_parts"], found["pushes"]) > 0
    assert found["under_way"] == 0
    # Both runners give every batch to the same function.
    assert found["searches_top_p"]


@pytest.mark.parametrize("part", ["plain", "filters", "merged"])
def test_grpo_in_float32_passes_every_proof_on_the_second_runner(runs: dict[str, Any], part: str) -> None:
    found = of(runs, "in_fp32", part)
    learned_on(found, SECOND, "TritonAttentionImpl")
    assert 0 < found["gap"] < FP32


@pytest.mark.parametrize("name", ["in_bf16", "in_8_bits"])
def test_grpo_in_fewer_bits_passes_every_proof_on_the_second_runner(runs: dict[str, Any], name: str) -> None:
    found = of(runs, name)
    learned_on(found, SECOND, "FlashAttentionImpl")
    assert 0 < found["mean_gap"] < {"in_bf16": 0.15, "in_8_bits": 1.5}[name]


def test_an_adapter_that_is_sent_alone_is_what_the_second_runner_samples_with(runs: dict[str, Any]) -> None:
    found = of(runs, "adapters_alone", "run")
    learned_on(found, SECOND, "FlashAttentionImpl")
    assert 0 < found["mean_gap"] < 0.15


def test_experts_are_pushed_and_sampled_with(runs: dict[str, Any]) -> None:
    found = of(runs, "experts")
    learned_on(found, SECOND, "TritonAttentionImpl")
    assert 0 < found["gap"] < FP32


def test_pictures_reach_the_second_runner(runs: dict[str, Any]) -> None:
    found = of(runs, "pictures")
    assert (found["steps"], found["pictures"], found["runner"]) == (2, [0, 1, 2], SECOND)
    assert 0 < found["gap"] < 1e-3


def test_grpo_with_filters_passes_every_proof_on_the_first_runner(runs: dict[str, Any]) -> None:
    found = of(runs, "first_runner", "run")
    learned_on(found, FIRST, "TritonAttentionImpl")
    assert 0 < found["gap"] < FP32


@pytest.mark.parametrize("name", ["in_fp32", "first_runner"])
def test_kept_ids_are_the_exact_sets_and_a_larger_set_is_refused(runs: dict[str, Any], name: str) -> None:
    found = of(runs, name, "kept")
    assert found["sets"] > 30
    assert (found["differ"], found["sampled_outside"]) == (0, 0)
    # Requests of the same batch without filters.
    assert found["without"] == 3
    assert "kept more than max_kept_ids=4 ids" in found["over_the_limit"]
    assert found["afterwards"] == 1


@pytest.mark.parametrize("name", ["adapters_alone", "in_fp32"], ids=["level 1", "level 2"])
def test_weights_are_gone_while_the_engine_sleeps_and_come_back_to_the_bit(
    runs: dict[str, Any], name: str
) -> None:
    found = of(runs, name, "sleep")
    assert found["parameters"] > 10
    assert (found["finite_asleep"], found["finite_awake"]) == (0, found["parameters"])
    assert found["changed"] == []


@pytest.mark.release
def test_steps_ahead_and_prompts_in_parts_change_no_id_and_no_set(tmp_path: Path) -> None:
    found = of(run_alone("steps_apart", tmp_path), "steps_apart")
    assert min(found["defaults"][name] for name in ("ahead", "in_parts")) > 0
    assert found["apart"] == {"ahead": 0, "in_parts": 0}
    assert found["tokens"] > 50
    assert (found["other_ids"], found["other_sets"], found["not_repeated"]) == ([], [], [])
    assert found["gap"] < FP32


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_is_within_rounding_of_its_reference(runs: dict[str, Any], name: str) -> None:
    found = dict(of(runs, "stand_ins", name))
    if name in COUNTS:
        assert found.pop(COUNTS[name]) > 0
    limits = LIMITS.get(name, {})
    assert {key: value for key, value in found.items() if not value <= limits.get(key, 0.0)} == {}
    assert limits.keys() <= found.keys()


@pytest.mark.release
def test_a_server_on_the_second_runner_gets_proven_pushes(tmp_path: Path) -> None:
    found = of(run_alone("server", tmp_path), "server")
    assert (found["steps"], found["device"], found["transport"]) == (2, "cuda:0", "CudaIPCTransport")
    assert 0 < found["gap"] < FP32
    # A token that was sampled ahead, with the weights before a push, must have their stamp.
    crossed = found["in_flight"]
    assert crossed["asynchronous"]
    assert crossed["across"] > 0
    assert crossed["gap"] < 1e-3 < 0.1 < crossed["exchanged"]


@pytest.mark.release
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_passes_on_the_second_runner(untied_dir: str, dtype: str) -> None:
    command = [sys.executable, "-m", "lockstep.cli.main", "verify", "--model", untied_dir, "--engine", "vllm"]
    run = subprocess.run(
        [*command, "--dtype", dtype],
        env=environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def test_every_stand_in_has_a_test(runs: dict[str, Any]) -> None:
    assert set(runs["stand_ins"]) == set(STAND_INS)
