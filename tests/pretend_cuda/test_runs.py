"""The trainer, its proofs and its pushes on a pretend GPU (`tests/pretend_cuda`), beside the same runs on the CPU.

A process of its own does all runs, because the device must be there before PyTorch is imported.
docs/internals/pretend-gpu.md says what such runs cannot find.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import pretend_cuda
from benchmarks.gpu_day import run as gpu_day
from pretend_cuda import counts, runs

pytestmark = pytest.mark.skipif(bool(pretend_cuda.missing()), reason=str(pretend_cuda.missing()))
FP32 = [name for name in runs.TWINS if not runs.LEARNING[name]]
BF16 = [name for name in runs.TWINS if runs.LEARNING[name]]
ALL = [*runs.RUNS]


@dataclass
class Both:
    """The folder of all runs, on either device."""

    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        found = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        assert "error" not in found, found["error"]
        return found

    def on_both(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the run gave on the CPU, and on the device."""
        return self.read(runs.twin(name)), self.read(name)

    def logs(self, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The logs of each optimizer step: those of the CPU and those of the device."""
        found = [[log for log in one["logs"] if "loss" in log] for one in self.on_both(name)]
        assert found[0]
        return list(zip(*found, strict=True))

    def weights(self, name: str) -> dict[str, np.ndarray]:
        return load_file(self.folder / name / "weights.safetensors")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("runs")
    pretend_cuda.compiled()
    with (folder / "output").open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [sys.executable, str(Path(runs.__file__)), str(folder)],
            stdout=output,
            stderr=output,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, (folder / "output").read_text(encoding="utf-8")[-4000:]
    return Both(folder)


@pytest.mark.parametrize("name", ALL)
def test_no_operation_mixes_devices(both: Both, name: str) -> None:
    """An error that somebody swallows is found too."""
    found = both.read(name)
    assert found["mixes"] == (
        [["aten::add.Tensor", "cuda:0(1-d) cpu(1-d)", "outside"]] if name == "itself" else []
    )
    assert found["operations"] > 0


@pytest.mark.parametrize("name", runs.LEARNING)
def test_policy_reference_critic_and_engine_compute_on_the_device(both: Both, name: str) -> None:
    assert both.read(name)["devices"] == ["cuda"]


@pytest.mark.parametrize("name", runs.TWINS)
def test_its_twin_computes_on_the_cpu_alone(both: Both, name: str) -> None:
    found = both.read(runs.twin(name))
    assert found["devices"] == ["cpu"]
    assert found["operations"] == 0
    assert found["mixes"] == []


def test_a_push_over_cuda_ipc_arrives_in_another_process_on_the_same_gpu(both: Both) -> None:
    """Stand-ins take the place of PyTorch's two functions of CUDA IPC. Everything else runs (`ipc.py`)."""
    found = both.read("ipc")
    assert found["chosen"] == "CudaIPCTransport"
    pushes = found["pushes"]
    assert all(push["equal"] for push in pushes)
    # Whole, changed, unchanged, and to a server that was killed and started again; then the first three in bfloat16.
    assert [push["sent"] == push["bytes"] for push in pushes] == [
        True,
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert [push["sent"] > 0 for push in pushes] == [True, True, False, True, True, True, False]
    assert [bool(push["in full"]) for push in pushes] == [False, False, False, True, False, False, False]
    assert found["same buffer"]


def test_over_cuda_ipc_each_chunk_is_complete_before_the_other_process_is_told(both: Both) -> None:
    for push in both.read("ipc")["pushes"]:
        chunks = push["worker"]["chunks"]
        assert chunks > 3
        # A push to a restarted server is sent twice: the trainer learns that its base is not held when the first has
        # ended.
        assert push["trainer"]["waits"] == chunks * (2 if push["in full"] else 1)
        assert push["worker"]["waits"] == chunks


def test_no_bytes_of_weights_cross_the_host_for_a_push_over_cuda_ipc(both: Both) -> None:
    """Counted by the device in both processes.

    What crosses: 16 bytes per digest, and the workers read 8 per tensor and push.
    """
    for push in both.read("ipc")["pushes"]:
        assert push["trainer"]["crossed"] <= 2 * 16 * push["tensors"]
        assert push["worker"]["crossed"] <= (16 + 8) * push["tensors"]


REFUSED = {
    "another gpu": "the trainer's buffer is on the GPU GPU-1",
    "no hex": "are no handles of CUDA",
    "odd hex": "are no handles of CUDA",
    "short memory": "are no handles of CUDA",
    "expandable": "are no handles of CUDA",
    "short event": "are no handles of CUDA",
    "no bytes": "are not in the GPU's",
    "negative": "are not in the GPU's",
    "beyond the memory": "are not in the GPU's",
    "before the memory": "are not in the GPU's",
    "larger than the memory": "are not in the GPU's",
    "true as a size": "is no handle of a GPU's memory",
    "a path": "is no counter of PyTorch",
    "counter too large": "is no counter of PyTorch",
    "counter below 0": "is no counter of PyTorch",
    "a number as a flag": "is no handle of a GPU's memory",
    "too few": "is no handle of a GPU's memory",
    "too many": "is no handle of a GPU's memory",
    "unknown memory": "invalid resource handle",
    "larger than the file": "invalid resource handle",
}


def test_a_handle_with_a_wrong_field_is_refused_before_it_is_mapped(both: Both) -> None:
    answers = both.read("ipc")["refused"]
    assert answers.pop("right") == "00" * 32
    assert answers.keys() == REFUSED.keys()
    assert {what: said for what, said in answers.items() if REFUSED[what] not in said} == {}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("expandable", "CUDA cannot share memory of expandable segments"),
        ("fails", "operation not supported"),
        ("elsewhere", "cannot map memory of the trainer's GPU (CUDA error: invalid resource handle"),
        ("another gpu", "does not compute on the trainer's GPU alone"),
    ],
)
def test_without_cuda_ipc_auto_goes_through_main_memory_with_one_line_and_the_named_transport_is_refused(
    both: Both, case: str, why: str
) -> None:
    chosen, said, refused = both.read("ipc")["fallback"][case]
    assert chosen == "SharedMemoryTransport"
    assert said.startswith("weights go through main memory: ")
    assert why in said
    assert refused.startswith("vllm_weight_transport=cuda_ipc, but ")
    assert why in refused


@pytest.mark.parametrize("name", FP32)
def test_losses_gradients_and_weights_are_those_of_the_cpu(both: Both, name: str) -> None:
    for cpu, device in both.logs(name):
        assert device["loss"] == pytest.approx(cpu["loss"], rel=1e-5, abs=1e-5)
        assert device["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=1e-4)
        assert device.get("reward") == cpu.get("reward")
        assert device["parity/max_abs_gap"] < 1e-4
    one, other = both.weights(runs.twin(name)), both.weights(name)
    assert one.keys() == other.keys()
    # AdamW divides by a gradient's own size: where it is nearly nothing, rounding moves a weight by up to the
    # learning rate.
    moved = np.concatenate([abs(one[key] - other[key]).ravel() for key in one])
    assert moved.mean() < 1e-3 * runs.RATE


# Not the same on both devices: seconds, the rounding that proofs measure, and the sign of a margin that is rounding
# at first.
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
            for log in both.read(name)["logs"]
            if "loss" in log
        ]
        for name in ("grpo", "resumed")
    )
    assert resumed == whole
    one, other = both.weights("grpo"), both.weights("resumed")
    assert one.keys() == other.keys()
    assert all(np.array_equal(tensor, other[key]) for key, tensor in one.items())


def test_a_run_that_began_on_a_cpu_goes_on_on_the_device_to_rounding_and_says_so(both: Both) -> None:
    found = both.read("elsewhere")
    assert found["devices"] == ["cuda"]
    (told,) = found["told"]
    assert "device was CPU (" in told
    assert told.endswith("is Pretend GPU")
    logs = [[log for log in one["logs"] if "loss" in log] for one in (both.read(runs.twin("grpo")), found)]
    assert [len(log) for log in logs] == [2, 2]
    for cpu, device in zip(*logs, strict=True):
        assert device["reward"] == cpu["reward"]
        assert device["loss"] == pytest.approx(cpu["loss"], rel=1e-5, abs=1e-5)
        assert device["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=1e-4)


def test_recomputed_activations_give_the_gradients_of_kept_ones(both: Both) -> None:
    norms = [
        [log["grad_norm"] for log in both.read(name)["logs"] if "loss" in log]
        for name in ("grpo", "checkpointing")
    ]
    assert norms[0] == norms[1]


def test_an_evaluation_gives_the_rewards_of_the_cpu(both: Both) -> None:
    cpu, device = (
        [log["eval_reward"] for log in one["logs"] if "eval_reward" in log] for one in both.on_both("grpo")
    )
    assert device == cpu
    assert len(device) == 2


def test_tools_are_called(both: Both) -> None:
    assert all(
        device["tools/call_frequency"] == cpu["tools/call_frequency"] > 0
        for cpu, device in both.logs("tools")
    )


@pytest.mark.parametrize("name", [name for name in runs.LEARNING if name != "resumed"])
def test_the_models_own_backward_is_proven_at_the_first_step(both: Both, name: str) -> None:
    """A proof that could not be made would leave its figure out of the log."""
    first = next(log for log in both.read(name)["logs"] if "loss" in log)
    assert "checked/model_gradient_error" in first


def test_every_row_of_verify_passes(both: Both) -> None:
    found = both.read("verify")
    rows = found["rows"]
    assert len(rows) > found["checks"]
    assert [row for row in rows if not row[1]] == []


def test_a_drawn_dozen_of_the_faults_of_the_self_test_is_caught(both: Both) -> None:
    (_, *control), *verdicts = both.read("verify")["verdicts"]
    assert control == ["", "", ""]
    assert [verdict for verdict in verdicts if not verdict[1] and not verdict[2]] == []
    assert len(verdicts) == 12
    assert sum(bool(caught) for _, caught, _, _ in verdicts) >= 8


def test_every_kind_of_push_arrives_with_the_digests_of_the_host(both: Both) -> None:
    pushes = both.read("push")["pushes"]
    assert len(pushes) == 10
    assert [name for name, arrived in pushes.items() if not arrived] == []


@pytest.mark.parametrize("row", counts.ROWS, ids=[row.what for row in counts.ROWS])
def test_what_keeps_a_gpu_from_working_stays_below_what_is_asked(both: Both, row: counts.Row) -> None:
    few, many = counts.read(both.read("counts"))
    number, places = row.count(few, many)
    assert number <= row.most, places.most_common(10)


def test_the_counts_are_of_whole_runs(both: Both) -> None:
    for run in counts.read(both.read("counts")):
        assert run.packs >= 4
        assert run.tokens == 16
        assert len(run.pushes) == 2
        assert {event.phase for event in run.events} >= {"generate", "sync", "verify", "forward_backward"}
        assert sum(event.count for event in run.events if event.part == counts.PROOF) > 0
    few, many = counts.read(both.read("counts"))
    assert many.tensors > 3 * few.tensors


def test_a_probe_of_a_large_vocabulary_takes_the_memory_of_a_few_rows(both: Both) -> None:
    found = both.read("slices")["probe"]
    assert found["failed"] == []
    assert found["modules"] > 10
    assert found["rows"] <= 8192 < found["of_rows"]


def test_sums_over_the_vocabulary_take_the_memory_of_a_few_rows(both: Both) -> None:
    found = both.read("slices")["sums"]
    assert found["apart"] < 1e-4
    assert found["rows"] <= 64


def test_filters_start_few_products(both: Both) -> None:
    assert both.read("slices")["filters"] == {"cpu": 32, "cuda": 2}


def test_an_element_that_is_not_zero_is_found_where_the_cpu_finds_it(both: Both) -> None:
    found = both.read("slices")["places"]
    assert found["cuda"] == found["cpu"] == [73, 32, 0, 63, 0, 0]


DIGEST = "contract/tensors.py"


@pytest.mark.parametrize(
    ("way", "limit"),
    [
        ("by reference", 2),
        ("by copies", 2),
        # Two more for the comparison with the live model: its drawn tensors, and each of its two drawn layers.
        ("merged", 2 + 1 + 2),
        # The server is a process of its own, which waits once. Here it is in this process.
        ("nccl", 2 + 1),
    ],
)
def test_the_host_waits_twice_for_the_digests_of_a_push_and_no_weight_comes_to_it(
    both: Both, way: str, limit: int
) -> None:
    found = both.read("digests")
    pushes = found["pushes"][way]["pushes"]
    assert len(pushes) == 5
    for push in pushes:
        assert sum(count for place, count in push["waits"].items() if place.startswith(DIGEST)) <= limit, push
        # 16 bytes per digest; a merged push also reads the difference that it has proven.
        assert push["bytes"] < 2500, push
        assert push["full"] == ""
    assert pushes[0]["sent"] == found["size"]
    assert [push["sent"] for push in pushes[1::3]] == [0, 0]
    assert 0 < pushes[2]["sent"] < found["size"]


def test_each_push_that_sends_something_has_a_key_of_its_own(both: Both) -> None:
    for way, found in both.read("digests")["pushes"].items():
        assert found["keys"] == found["different"] == (0 if way == "shared memory" else 3)


def test_weights_that_go_through_main_memory_are_copied_there_once(both: Both) -> None:
    found = both.read("digests")
    assert {push["bytes"] for push in found["pushes"]["shared memory"]["pushes"]} == {found["size"]}


def test_a_digest_of_the_device_is_that_of_the_cpu_for_every_dtype(both: Both) -> None:
    dtypes = both.read("digests")["dtypes"]
    assert len(dtypes) == 10
    assert [dtype for dtype, same in dtypes.items() if not same] == []


def test_a_digest_launches_two_kernels_per_eight_mib_and_a_few_more(both: Both) -> None:
    launches = both.read("digests")["launches"]
    assert launches["64"] - launches["8"] <= 8 * 2 + 2
    assert launches["1"] <= launches["8"] <= 10


def test_seconds_of_phases_are_read_from_events(both: Both) -> None:
    """That nothing waits for them, the counts show."""
    found = both.read("counts")[counts.FEW]
    assert found["timed"] >= 20
    for log in (log for log in found["logs"] if "loss" in log):
        phases = [seconds for key, seconds in log.items() if key.startswith("time/") and key != "time/step"]
        assert log["time/forward_backward"] > 0
        assert 0 < sum(phases) <= log["time/step"]


@pytest.mark.parametrize(("pack", "most"), counts.KERNELS.items())
def test_a_layer_of_a_pack_has_few_kernels_to_start(both: Both, pack: str, most: int) -> None:
    """Blocks have 279 and 509. A layer of plain rows has 140, and computes the prompt once for each completion."""
    found = both.read("launches")["layers"][pack]
    assert 100 < sum(found.values()) <= most, "\n".join(
        f"{number:4} {place}" for place, number in found.items()
    )


def test_the_device_refuses_what_cuda_refuses_and_counts_what_waits(both: Both) -> None:
    found = both.read("itself")
    assert [name for name, holds in found["holds"].items() if not holds] == []
    assert len(found["holds"]) == 10


def test_parts_of_the_gpu_day_are_rehearsed_on_the_device(both: Both) -> None:
    parts = both.read("gpu_day")["parts"]
    assert [*parts] == [name for name in gpu_day.PARTS if name in runs.GPU_DAY]
    assert all(parts.values())
    assert [row for rows in parts.values() for row in rows if gpu_day.is_failure(row)] == []
    assert {row["device"] for row in parts["runs-1"]} == {"cuda"}
    assert parts["gaps-fp32"][0]["stopped"], "the injected fault passed"
