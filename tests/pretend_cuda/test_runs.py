"""The trainer, its proofs and its pushes on a pretend GPU (`tests/pretend_cuda`), beside the same runs on the CPU.

One process does all runs on the device, because the device must be there before PyTorch is imported. This process does them on the
CPU at the same time. docs/internals/pretend-gpu.md says what such runs cannot find.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pretend_cuda
from benchmarks.gpu_day import run as gpu_day
from lockstep.verify.run import CHECKS
from pretend_cuda import runs

pytestmark = pytest.mark.skipif(bool(pretend_cuda.missing()), reason=str(pretend_cuda.missing()))
FP32 = [name for name, is_half in runs.LEARNING.items() if not is_half]
BF16 = [name for name, is_half in runs.LEARNING.items() if is_half]
ALL = [*runs.RUNS]


@dataclass
class Both:
    """The folders of all runs, on either device."""

    cpu: Path
    device: Path

    def logs(self, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The logs of each optimizer step: those of the CPU and those of the device."""
        found = [[log for log in _read(folder, name)["logs"] if "loss" in log] for folder in (self.cpu, self.device)]
        assert found[0]
        return list(zip(*found, strict=True))


def _read(folder: Path, name: str) -> dict[str, Any]:
    found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert "error" not in found, found["error"]
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folders = Both(tmp_path_factory.mktemp("cpu"), tmp_path_factory.mktemp("device"))
    pretend_cuda.compiled()
    for folder in (folders.cpu, folders.device):
        runs.save_models(folder)
    command = [sys.executable, str(Path(runs.__file__)), str(folders.device), *runs.RUNS]
    with (folders.device / "output").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(os.environ))
        try:
            runs.run_all(folders.cpu, [*runs.LEARNING])
            code = process.wait(600)
        finally:
            process.kill()
            process.wait()
    assert code == 0, (folders.device / "output").read_text(encoding="utf-8")[-4000:]
    return folders


@pytest.mark.parametrize("name", ALL)
def test_no_operation_mixes_devices(both: Both, name: str) -> None:
    """An error that somebody swallows is found too."""
    found = _read(both.device, name)
    assert found["mixes"] == ([["aten::add.Tensor", "cuda:0(1-d) cpu(1-d)", "outside"]] if name == "itself" else [])
    assert found["operations"] > 0


@pytest.mark.parametrize("name", runs.LEARNING)
def test_model_and_engine_compute_on_the_device(both: Both, name: str) -> None:
    assert _read(both.device, name)["devices"] == ["cuda"]
    assert _read(both.cpu, name)["devices"] == ["cpu"]


@pytest.mark.parametrize("name", FP32)
def test_losses_gradients_and_weights_are_those_of_the_cpu(both: Both, name: str) -> None:
    for cpu, device in both.logs(name):
        assert device["loss"] == pytest.approx(cpu["loss"], rel=1e-5, abs=1e-5)
        assert device["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=1e-4)
        assert device.get("reward") == cpu.get("reward")
        assert device["parity/max_abs_gap"] < 1e-4
    one, other = (load_file(folder / name / "weights.safetensors") for folder in (both.cpu, both.device))
    assert one.keys() == other.keys()
    # AdamW divides by a gradient's own size: where it is nearly nothing, rounding moves a weight by up to the learning rate.
    moved = torch.cat([(one[key] - other[key]).abs().flatten() for key in one])
    assert float(moved.mean()) < 1e-3 * runs.RATE


# Not the same on both devices: seconds, the rounding that proofs measure, and the sign of a margin that is rounding at first.
OWN = ("time/", "push/", "parity/", "checked/", "step_time", "train_", "eval_", "rewards/accuracies")


@pytest.mark.parametrize("name", FP32)
def test_every_logged_figure_is_that_of_the_cpu(both: Both, name: str) -> None:
    for cpu, device in both.logs(name):
        due, found = ({k: v for k, v in log.items() if not k.startswith(OWN)} for log in (cpu, device))
        assert found.keys() == due.keys()
        for figure, value in due.items():
            assert found[figure] == pytest.approx(value, rel=1e-3, abs=2e-5, nan_ok=True), figure


@pytest.mark.parametrize("name", BF16)
def test_in_bf16_the_first_step_is_that_of_the_cpu_to_rounding(both: Both, name: str) -> None:
    """The lists of autocast differ between the devices, so later steps learn from other weights."""
    cpu, device = both.logs(name)[0]
    assert device["reward"] == cpu["reward"]
    assert device["loss"] == pytest.approx(cpu["loss"], abs=0.01)
    assert device["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=0.05)


def test_a_run_that_was_stopped_goes_on_to_the_logs_and_weights_of_one_that_was_not(both: Both) -> None:
    whole, resumed = (
        [
            {key: value for key, value in log.items() if key in ("loss", "grad_norm", "reward", "entropy")}
            for log in _read(both.device, name)["logs"]
            if "loss" in log
        ]
        for name in ("grpo", "resumed")
    )
    assert resumed == whole
    one, other = (load_file(both.device / name / "weights.safetensors") for name in ("grpo", "resumed"))
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_recomputed_activations_give_the_gradients_of_kept_ones(both: Both) -> None:
    norms = [
        [log["grad_norm"] for log in _read(both.device, name)["logs"] if "loss" in log]
        for name in ("grpo", "checkpointing")
    ]
    assert norms[0] == norms[1]


def test_an_evaluation_gives_the_rewards_of_the_cpu(both: Both) -> None:
    cpu, device = (
        [log["eval_reward"] for log in _read(folder, "grpo")["logs"] if "eval_reward" in log]
        for folder in (both.cpu, both.device)
    )
    assert device == cpu
    assert len(device) == 2


def test_tools_are_called(both: Both) -> None:
    assert all(device["tools/call_frequency"] == cpu["tools/call_frequency"] > 0 for cpu, device in both.logs("tools"))


@pytest.mark.parametrize("name", [name for name in runs.LEARNING if name != "resumed"])
def test_the_models_own_backward_is_proven_at_the_first_step(both: Both, name: str) -> None:
    """A proof that could not be made would leave its figure out of the log."""
    for found in both.logs(name)[0]:
        assert "checked/model_gradient_error" in found


def test_every_row_of_verify_passes(both: Both) -> None:
    rows = _read(both.device, "verify")["rows"]
    assert len(rows) > len(CHECKS)
    assert [row for row in rows if not row[1]] == []


def test_a_drawn_dozen_of_the_faults_of_the_self_test_is_caught(both: Both) -> None:
    (_, *control), *verdicts = _read(both.device, "verify")["verdicts"]
    assert control == ["", "", ""]
    assert [verdict for verdict in verdicts if not verdict[1] and not verdict[2]] == []
    assert len(verdicts) == 12
    assert sum(bool(caught) for _, caught, _, _ in verdicts) >= 8


def test_every_kind_of_push_arrives_with_the_digests_of_the_host(both: Both) -> None:
    pushes = _read(both.device, "push")["pushes"]
    assert len(pushes) == 10
    assert [name for name, arrived in pushes.items() if not arrived] == []


def test_the_host_waits_for_the_device_seven_times_a_pack_after_its_backward_is_launched(both: Both) -> None:
    found = _read(both.device, "waits")
    assert found["packs"] >= 4
    assert [wait for wait in found["waits"] if wait[0] != "after the backward"] == []
    assert sum(number for *_, number in found["waits"]) <= 7 * found["packs"], found["waits"]


@pytest.mark.parametrize(("pack", "most"), [("8 x 480 + 256", 160), ("64 x 60 + 200", 180)])
def test_a_layer_of_a_pack_has_few_kernels_to_start(both: Both, pack: str, most: int) -> None:
    """Blocks have 279 and 509. A layer of plain rows has 140, and computes the prompt once for each completion."""
    found = _read(both.device, "launches")["layers"][pack]
    assert 100 < sum(found.values()) <= most, "\n".join(f"{number:4} {place}" for place, number in found.items())


def test_the_device_refuses_what_cuda_refuses_and_counts_what_waits(both: Both) -> None:
    found = _read(both.device, "itself")
    assert [name for name, holds in found["holds"].items() if not holds] == []
    assert len(found["holds"]) == 9


def test_parts_of_the_gpu_day_are_rehearsed_on_the_device(both: Both) -> None:
    parts = _read(both.device, "gpu_day")["parts"]
    assert [*parts] == [name for name in gpu_day.PARTS if name in runs.GPU_DAY]
    assert all(parts.values())
    assert [row for rows in parts.values() for row in rows if gpu_day.is_failure(row)] == []
    assert {row["device"] for row in parts["runs-1"]} == {"cuda"}
    assert parts["gaps-fp32"][0]["stopped"], "the injected fault passed"
