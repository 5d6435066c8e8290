"""What an engine of several workers needs from this process, and who may have one. No worker is started here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_vllm
from forked import Program

from lockstep import GRPOConfig
from lockstep.engines.vllm import start
from lockstep.engines.vllm.environment import process_start, socket_folder
from lockstep.engines.vllm.port.patches import keep_process_group
from lockstep.engines.vllm.start import number_of_workers
from lockstep.errors import InputError
from lockstep.extras.trl.trl_inputs import check_parameters
from lockstep.run import engine as engine_choice
from lockstep.run.engine import check_beside_ranks, start_here

# A script without a guard: it would train again in each process that imports it.
SCRIPT = """
import multiprocessing, sys
from contextlib import nullcontext
from pathlib import Path
from lockstep.engines.vllm.environment import process_start
print("trains", flush=True)
with process_start(2, Path("/tmp")) if sys.argv[1] == "ours" else nullcontext():
    child = multiprocessing.get_context("spawn").Process(target=print, args=("child", ))
    child.start()
child.join()
"""


@pytest.mark.vllm
@needs_vllm
def test_workers_get_settings_of_their_own_and_the_trainer_keeps_its_environment_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import envs

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    before, threads = dict(os.environ), torch.get_num_threads()
    with socket_folder() as folder, process_start(4, folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert str(folder) == envs.VLLM_RPC_BASE_PATH == os.environ["TMPDIR"]
        assert tempfile.gettempdir() != str(folder)
        assert envs.VLLM_HOST_IP == os.environ["VLLM_LOOPBACK_IP"] == "127.0.0.1"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert os.environ["OMP_NUM_THREADS"] == "2"
        assert "GOMP_SPINCOUNT" not in os.environ
        # A user's own value stays.
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == before["VLLM_CPU_OMP_THREADS_BIND"]
        torch.set_num_threads(3)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(
    ("context", "times"), [("ours", 1), pytest.param("none", 2, marks=pytest.mark.release)]
)
@pytest.mark.release
def test_a_script_without_a_guard_is_not_run_again_by_the_processes_of_the_engine(
    context: str, times: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), context],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.count("trains") == times
    assert ("child" in done.stdout) is (context == "ours"), done.stderr


# What a worker does at its start, when vLLM loads our plug-in. The worker then loads its model, which may take minutes.
WORKER = """
import time
from lockstep.engines.vllm.environment import end_with_trainer
end_with_trainer()
print("loads", flush=True)
time.sleep(600)
"""
TRAINER = """
import multiprocessing, time
from pathlib import Path
from lockstep.engines.vllm.environment import process_start
with process_start(2, Path("/tmp")):
    worker = multiprocessing.get_context("spawn").Process(target=exec, args=({worker!r},), daemon=True)
    worker.start()
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.vllm
@needs_vllm
def test_vllm_destroys_only_a_process_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    destroyed: list[str] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda *group: destroyed.append("trainer's")
    )
    monkeypatch.setattr(parallel_state, "_WORLD", None)
    # Restored after the test.
    monkeypatch.setattr(
        parallel_state, "destroy_distributed_environment", parallel_state.destroy_distributed_environment
    )
    keep_process_group()
    keep_process_group()
    parallel_state.destroy_distributed_environment()
    assert destroyed == []
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(destroy=lambda: destroyed.append("vLLM's")))
    parallel_state.destroy_distributed_environment()
    assert destroyed == ["vLLM's", "trainer's"]


@pytest.mark.vllm
@needs_vllm
def test_a_worker_that_still_loads_ends_with_its_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER.format(worker=WORKER))
    output = tmp_path / "output"
    # The fork server starts the trainer, and gives it a fork in the place of the spawned process.
    with output.open("w", encoding="utf-8") as file:
        trainer = Program([sys.executable, str(tmp_path / "trainer.py")], stdout=file, stderr=file)
    wait_until(lambda: output.read_text(encoding="utf-8").count("\n") == 2, output)
    (pid,) = {*output.read_text(encoding="utf-8").split()} - {"loads"}
    assert not is_gone(int(pid))
    trainer.kill()
    wait_until(lambda: is_gone(int(pid)), output)


def wait_until(happens: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline, output.read_text(encoding="utf-8")
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_number_of_workers_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert number_of_workers({}) == 1
    assert number_of_workers({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}) == 4
    assert number_of_workers({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}) == 2
    with pytest.raises(
        InputError, match=r"'external_launcher'.*leave it out\. One trainer process owns the engine"
    ):
        number_of_workers({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert number_of_workers({"tensor_parallel_size": 2}) == 2
    with pytest.raises(InputError, match="over 4 workers, and this process sees 2 GPUs"):
        number_of_workers({"tensor_parallel_size": 4})


def test_several_trainer_processes_need_an_engine_in_processes_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_choice._logger, "warning", said.append)
    with pytest.raises(
        InputError, match=r"4 trainer processes: .* Set size: 4, .*'lockstep serve MODEL'.*mode: server"
    ):
        check_beside_ranks(4, 1, "size", "mode")
    check_beside_ranks(4, 4, "size", "mode")
    assert not said
    check_beside_ranks(4, 2, "size", "mode")
    assert "4 trainer processes share one engine, which is split over 2 devices (size)" in said[0]


def test_a_split_engine_is_vllm_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = {"output_dir": str(tmp_path), "bf16": False, "vllm_tensor_parallel_size": 2}
    assert GRPOConfig(**fields).vllm_tensor_parallel_size == 2
    with pytest.raises(InputError, match="needs vLLM, and use_vllm is false"):
        GRPOConfig(**fields, use_vllm=False)
    with pytest.raises(InputError, match="vllm_tensor_parallel_size=0"):
        GRPOConfig(**{**fields, "vllm_tensor_parallel_size": 0})
    capsys.readouterr()
    GRPOConfig(**fields, vllm_server_base_url="http://127.0.0.1:8000")
    said = capsys.readouterr().err
    assert "no effect with servers: start them with 'lockstep serve MODEL --tensor_parallel_size 2'" in said
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match="only vLLM can be split over devices"):
        start_here("model", None, use_vllm=None, vllm_arguments={"tensor_parallel_size": 2})  # type: ignore[arg-type]


def test_trls_parameter_of_the_same_meaning() -> None:
    given = {"mode": "colocate", "tensor_parallel_size": 2, "enable_sleep_mode": False, "model_impl": "auto"}
    given |= {
        "trust_remote_code": False,
        "logprobs": 0,
        "engine_dtype": "auto",
        "engine_kwargs": None,
        "engine": None,
    }
    check_parameters(given)
    with pytest.raises(InputError, match="tensor_parallel_size=0"):
        check_parameters({**given, "tensor_parallel_size": 0})
    with pytest.raises(InputError, match="a running engine is given"):
        check_parameters({**given, "engine": object()})
    with pytest.warns(UserWarning, match="no effect with servers"):
        check_parameters({**given, "mode": "server"})


@pytest.mark.parametrize(
    ("arguments", "exact"),
    [
        ({"dtype": "float32"}, True),
        ({"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}, True),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_triton_rounds_no_float32_of_an_engine_in_this_process(
    arguments: dict[str, Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is not started: the setting is made before it is imported."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(start, "use_private_caches", lambda: None)
    monkeypatch.setattr(start, "vllm_installed", lambda: False)
    with pytest.raises(InputError, match="not installed"):
        start.start_vllm(arguments, ExitStack())
    assert os.environ.get("TRITON_F32_DEFAULT") == ("ieee" if exact else None)


def test_an_environment_in_which_vllm_would_not_find_the_plugin_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]["lockstep"]
    found: list[EntryPoint] = []
    monkeypatch.setattr(start, "entry_points", lambda **_: found)
    for other in (
        "lockstep.nowhere:register",
        "lockstep.engines.vllm.plugin:other",
        "lockstep.threads:CallLoop",
    ):
        with pytest.raises(InputError, match=r"install Lockstep again \(pip install"):
            start.check_plugin()
        found[:] = [EntryPoint("lockstep", other, "vllm.general_plugins")]
    with pytest.raises(InputError):
        start.check_plugin()
    found.append(EntryPoint("lockstep", declared, "vllm.general_plugins"))
    start.check_plugin()
