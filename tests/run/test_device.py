"""A process trains on one GPU, and on the CPU only where no GPU is there or the user asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch
from conftest import needs_vllm

from lockstep import GRPOConfig
from lockstep.devices import check_driver, prepare_cuda, unused_gpus
from lockstep.errors import InputError
from lockstep.watch.receipt import RECEIPT, read_receipt

_PROGRAM = Path(__file__).parent / "on_a_pretend_gpu.py"


@pytest.fixture(scope="module")
def on_gpus() -> dict[str, Any]:
    """What one process on a machine with two GPUs does; all tests of this file share it."""
    if said := pretend_cuda.missing():
        pytest.skip(said)
    shown = subprocess.run(
        [sys.executable, str(_PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=dict(os.environ),
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    return json.loads(shown.stdout.splitlines()[-1])


def test_one_process_on_a_machine_with_several_gpus_uses_one_and_says_which(on_gpus: dict[str, Any]) -> None:
    found = on_gpus["several_gpus"]
    assert found["n_gpu"] == [1, 1, 0]
    # transformers gives each GPU that it counts a batch.
    assert found["batch"] == [8, 8]
    assert found["device"] == ["cuda:0", "cuda:0", "cpu"]
    assert "sees 2 GPUs and trains on one of them, cuda:0 (" in found["line"]
    assert "CUDA_VISIBLE_DEVICES" in found["line"]
    assert not found["line on the cpu"]


def test_vllm_decodes_more_sequences_together_on_a_gpu_and_a_users_number_stays(
    on_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_gpus["several_gpus"]["sequences"] == [256, 7]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fields = {"output_dir": "unused", "report_to": [], "use_cpu": True}
    made = [GRPOConfig(**fields, use_vllm=vllm).vllm_max_num_seqs for vllm in (True, False)]  # type: ignore[arg-type]
    assert made == [64, None]


def test_several_plain_rows_arrive_on_a_gpu(on_gpus: dict[str, Any]) -> None:
    """All rows have the same positions, which are one row of memory on the host."""
    assert on_gpus["plain_rows"] == {"device": "cuda", "positions": [[0, 1, 2]] * 2}


def test_the_engine_may_be_split_over_as_many_gpus_as_the_process_sees(on_gpus: dict[str, Any]) -> None:
    assert on_gpus["several_gpus"]["workers"] == 2
    assert "over 4 workers, and this process sees 2 GPUs" in on_gpus["several_gpus"]["refused"]


def test_another_device_is_no_other_setting_and_the_receipt_notes_it(on_gpus: dict[str, Any]) -> None:
    found = on_gpus["other_device"]
    assert found["equal"]
    gpu, cpu = found["devices"]
    assert "CPU" not in gpu
    assert cpu.startswith("CPU (")


def test_full_determinism_on_a_gpu_reaches_cuda_and_the_engine(on_gpus: dict[str, Any]) -> None:
    found = on_gpus["determinism"]
    assert found["on"] == [":4096:8", "1"]
    assert found["of the user"] == [":4096:8", "0"]
    assert found["off"] == found["on the cpu"] == [None, None]


def test_another_thread_reads_a_tensor_of_a_gpu_only_after_the_callers_stream_has_written_it(
    on_gpus: dict[str, Any],
) -> None:
    found = on_gpus["reads_in_other_threads"]
    assert set(found) == {"push", "base", "checkpoint"}
    # The digests of a push are computed in the order of the caller's own stream, and no other thread reads a GPU.
    assert found.pop("push") == [0, 0]
    assert all(read >= 4 and early == 0 for read, early in found.values()), found


@pytest.mark.parametrize("rounds", ["tf32", "ieee"])
def test_cudnn_computes_no_attention_and_convolutions_round_as_products_do(rounds: str) -> None:
    product, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = product.fp32_precision, convolution.fp32_precision, torch.backends.cuda.cudnn_sdp_enabled()
    product.fp32_precision, convolution.fp32_precision = rounds, "tf32"
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        prepare_cuda()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert convolution.fp32_precision == rounds
    finally:
        product.fp32_precision, convolution.fp32_precision = before[:2]
        torch.backends.cuda.enable_cudnn_sdp(before[2])


@pytest.mark.release
@pytest.mark.vllm
@needs_vllm
def test_a_run_with_an_engine_over_two_gpus_starts_and_learns(untied_dir: str, tmp_path: Path) -> None:
    tests = Path(__file__).parent.parent
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"what is {i} + {i}"}) + "\n" for i in range(8))
    )
    (tmp_path / "rewards.py").write_text(
        "def ids(completion_ids, **_):\n    return [ids[0] % 3 for ids in completion_ids]\n"
    )
    fields = {
        "model_name_or_path": untied_dir, "dataset_name": tmp_path / "data.jsonl",
        "reward_funcs": f"{tmp_path / 'rewards.py'}:ids",
        "output_dir": tmp_path / "run", "bf16": False, "max_steps": 2, "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6, "report_to": "none", "vllm_tensor_parallel_size": 2,
    }  # fmt: skip
    program = (
        "import torch; torch.cuda.device_count = lambda: 2; from lockstep.cli.main import main; raise "
        "SystemExit(main())"
    )
    places = [tests / "pretend_cuda" / "vllm" / "site", tests, os.environ.get("PYTHONPATH", "")]
    # Workers are processes of their own, which see two GPUs too. How the engine's model is split does not depend on
    # its runner.
    own = {
        "PRETEND_GIB": "1",
        "PRETEND_DEVICES": "2",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONPATH": ":".join(map(str, places)),
    }
    shown = subprocess.run(
        [sys.executable, "-c", program, "grpo", *(word for name, value in fields.items() for word in (f"--{name}",
        str(value)))],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, **own},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert "sees 2 GPUs and trains on one of them" in shown.stderr
    lines = [entry for entry in read_receipt(tmp_path / "run" / RECEIPT) if entry["kind"] == "step"]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs, whose driver is too old for PyTorch."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for function in (check_driver, unused_gpus):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    return tmp_path


def test_an_old_driver_is_an_error_with_the_drivers_words_and_no_run_on_the_cpu(machine: Path) -> None:
    with pytest.raises(
        InputError, match=r"nvidia0, nvidia1\).*driver on your system is too old.*CUDA 13\.0"
    ) as error:
        GRPOConfig(output_dir="unused")
    assert "set use_cpu to true" in str(error.value)
    assert GRPOConfig(output_dir="unused", use_cpu=True).device == torch.device("cpu")


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_user_who_hides_the_gpus_trains_on_the_cpu(
    machine: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert GRPOConfig(output_dir="unused").use_cpu


def test_a_number_that_no_gpu_has_does_not_hide_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES names GPUs that exist"):
        GRPOConfig(output_dir="unused")


def test_a_pytorch_without_cuda_beside_a_gpu_is_a_warning(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert GRPOConfig(output_dir="unused").use_cpu
    assert "built without CUDA, so that the CPU trains" in capsys.readouterr().err
    for path in machine.iterdir():
        path.unlink()
    assert GRPOConfig(output_dir="unused").use_cpu
    assert not capsys.readouterr().err


def test_a_server_is_not_started_beside_a_gpu_with_an_old_driver(machine: Path, untied_dir: str) -> None:
    from lockstep.cli.serve import run

    with pytest.raises(InputError, match=r"too old.*to serve on the CPU"):
        run([untied_dir, "--dry_run"])
