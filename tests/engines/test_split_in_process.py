"""vLLM in the trainer's process with its model split over two worker processes: the same proofs, tokens, weights.

CI runs the first test. The others run before a release: faults in one of the workers, two trainer processes,
adapters, the other transport, sleep, signals, a killed worker and a killed trainer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_two_ranks
import torch
from accounts import difference, gradients, make
from conftest import VLLM, start
from servers import descendants
from test_sleep import Memory
from test_two_ranks import SCRIPT, run_ranks
from test_worker_start import is_gone
from tiny import CONTEXT, make_model, perturbed
from transformers import PreTrainedModel
from two_ranks import ALONE

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm import in_process
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.extras.lora_alone.adapter_arguments import adapter_arguments
from lockstep.extras.lora_alone.adapter_proof import AdapterPush
from lockstep.extras.lora_alone.adapter_source import adapter_shape
from lockstep.models.arithmetic import Precision
from lockstep.run.engine import transport_here
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.push import ProvenPusher
from lockstep.weights.push import let_sleep, push_weights

pytestmark = VLLM
REQUESTS = [GenerationRequest(RequestKey(f"p{i}", 0), (7, 8, 9 + i), Sampling(16), 50 + i) for i in range(6)]


def split_engine(model: str, transport: str = "auto", **more: Any) -> VLLMInProcess:
    more = {
        "tensor_parallel_size": 2,
        "transport": transport_here(transport, 120.0),
        "timeout": 120.0,
        **more,
    }
    return VLLMInProcess(model, dtype=torch.float32, max_model_len=CONTEXT, **more)


def workers_of(pid: int) -> list[int]:
    """Process ids of the worker processes that a process has started."""
    found = []
    for child in descendants(pid):
        try:
            # A worker has this name when it has imported vLLM.
            if any(
                mark in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8")
                for mark in ("VLLM::Worker", "spawn_main")
            ):
                found.append(child)
        except OSError:
            continue
    return found


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < deadline, f"of {pids}, {left} are left"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def split(untied_dir: str) -> Iterator[VLLMInProcess]:
    engine = split_engine(untied_dir)
    pids = workers_of(os.getpid())
    assert len(pids) == 2
    yield engine
    engine.close()
    await_end(pids)


def sampled(engine: VLLMInProcess) -> list[Completion]:
    return [engine.generate(REQUESTS)[request.key] for request in REQUESTS]


def worst_gap(model: PreTrainedModel, found: list[Completion]) -> float:
    """The largest difference between a sampled token's log-prob and a plain forward of the model."""
    worst = 0.0
    for c in found:
        own = completion_logps(model, c.prompt_ids, c.token_ids, Sampling(1), Precision(None))
        worst = max(worst, float((own - torch.tensor(c.logprobs)).abs().max()))
    return worst


@pytest.mark.long
def test_every_push_reaches_both_workers_and_is_proven_whole(split: VLLMInProcess) -> None:
    model = make_model()
    pusher = ProvenPusher(model, split, torch.float32, Precision(None))
    assert split.is_split
    assert split.settings().dtype == torch.float32
    # vLLM takes the threads away from a process that only schedules. This one trains.
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    first = pusher.push(0, canary=True)
    assert not first.probe.unreached
    assert pusher.module_probe.reached() == 1.0
    with torch.no_grad():
        model.load_state_dict(perturbed(model, scale=0.5).state_dict())
    second = pusher.push(1, canary=True)
    with torch.no_grad():
        model.lm_head.weight[5] += 1.0
    third = pusher.push(2, canary=True)
    for proof in (first, second, third):
        assert proof.canary is not None
        assert 0.0 < proof.canary.max_abs < 1e-3
    # Only what changed is sent.
    assert 0 < third.push.sent_bytes < second.push.sent_bytes == second.push.bytes
    assert worst_gap(model, sampled(split)) < 1e-3
    assert not push_weights(model, split, 3).sent_bytes


@pytest.mark.release
def test_the_probe_names_a_weight_that_one_worker_lacks(split: VLLMInProcess) -> None:
    model = make_model()
    pusher = ProvenPusher(model, split, torch.float32, Precision(None))
    pusher.push(0)
    split.llm.collective_rpc(damage)
    failed = pusher.module_probe.measure(9, every=True).failed
    assert failed == ["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ProofError, match=r"model\.layers\.1\.mlp\.down_proj"):
        pusher.probe(0)
    # A push of what changed would keep the damage. After a failed proof everything is sent.
    pusher.distrust()
    pusher.push(1, canary=True)


def damage(worker: Any) -> None:
    if worker.rank == 1:
        layer = worker.model_runner.model.get_submodule("model.layers.1.mlp.down_proj")
        layer.cpu_linear = lambda x, weight, bias: torch.zeros(*x.shape[:-1], layer.output_size)


@pytest.mark.release
def test_a_worker_that_lost_its_weights_gets_all_of_them(split: VLLMInProcess) -> None:
    model = make_model()
    pusher = ProvenPusher(model, split, torch.float32, Precision(None))
    pusher.push(0)
    split.llm.collective_rpc(forget)
    proof = pusher.push(1, canary=True)
    assert "does not hold the version that was pushed last" in proof.push.in_full
    assert proof.push.sent_bytes == proof.push.bytes


def forget(worker: Any) -> None:
    if worker.rank == 1:
        worker.weight_transfer_engine.held.digest = ""


@pytest.mark.release
def test_two_optimizer_steps_are_those_of_an_engine_that_is_not_split(
    split: VLLMInProcess, untied_dir: str, tmp_path: Path
) -> None:
    whole = start("vllm", untied_dir)
    check_same_run(*(steps_with(engine, untied_dir, tmp_path) for engine in (split, whole)))
    whole.close()


def steps_with(engine: VLLMInProcess, model: str, folder: Path) -> dict[str, Any]:
    run = make("grpo-grpo", model, folder, engine=engine)
    steps = gradients(run)
    return {
        "gradients": steps,
        "weights": {n: p.detach() for n, p in run.model.named_parameters()},
        "logs": run.state.log_history,
    }


def check_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both have sampled the same tokens.

    The trainer computes in float64; the engines' log-probs differ by their rounding.
    """
    assert len(one["gradients"]) == 2
    for mine, theirs in zip(one["gradients"], other["gradients"], strict=True):
        assert difference(mine, theirs) < 1e-5
    assert difference(one["weights"], other["weights"]) < 1e-6
    for log, expected in zip(one["logs"], other["logs"], strict=True):
        if "loss" in log:
            assert log.get("parity/checked_tokens") == expected.get("parity/checked_tokens")
            assert 0.0 < log["parity/max_abs_gap"] < 1e-3


@pytest.mark.release
def test_two_trainer_processes_share_one_split_engine(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fork server would fork the workers, and a fork of a trainer has the trainer's process group.
    monkeypatch.setattr(test_two_ranks, "Program", subprocess.Popen)
    command, arguments = [sys.executable, str(SCRIPT)], [untied_dir, str(tmp_path), "split"]
    run_ranks(command, arguments, tmp_path, [0], names=(ALONE,))
    run_ranks(command, arguments, tmp_path, [0, 0])
    alone, *both = (torch.load(tmp_path / f"split.{rank}.pt") for rank in (ALONE, 0, 1))
    for found in both:
        assert "raised" not in found, found
        check_same_run(found, alone)
    assert all(torch.equal(p, both[1]["weights"][name]) for name, p in both[0]["weights"].items())


@pytest.mark.release
@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_a_sharded_model_reaches_both_workers(
    kind: str, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_two_ranks, "Program", subprocess.Popen)
    monkeypatch.setenv("TEST_SPLIT_ENGINE", "1")
    script = str(SCRIPT.with_name("sharded.py"))
    run_ranks(
        [sys.executable, script], [kind, "2", untied_dir, str(tmp_path), "served"], tmp_path, codes=[0, 0]
    )
    for rank in (0, 1):
        found = torch.load(tmp_path / f"served.{rank}-2.pt")
        assert "raised" not in found, found
        for expected, got in zip(found["whole"]["gradients"], found["sharded"]["gradients"], strict=True):
            assert difference(expected, got) <= 1e-6
        assert difference(found["whole"]["weights"], found["sharded"]["weights"]) <= 1e-6
        logs = found["everything"]["logs"]
        assert all(log["parity/max_abs_gap"] < 1e-3 for log in logs if "loss" in log)


@pytest.mark.release
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_adapters_alone_reach_both_workers(transport: str, untied_dir: str) -> None:
    peft = pytest.importorskip("peft")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    model = peft.get_peft_model(
        make_model(), peft.LoraConfig(r=4, target_modules=layers, rank_pattern={"q_proj": 2})
    )
    engine = split_engine(untied_dir, transport, engine_kwargs=adapter_arguments(*adapter_shape(model)))
    pusher = ProvenPusher(model, engine, torch.float32, Precision(None), extension=AdapterPush)
    for version in range(3):
        proof = pusher.push(version, canary=True, every_module=True)
        assert (proof.push.bytes > 400_000) == (version == 0)
        assert proof.canary is not None
        assert proof.canary.max_abs < 1e-3
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter += 0.05 * torch.randn_like(parameter)
    engine.close()


@pytest.mark.release
def test_both_workers_sleep_and_wake(untied_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "sleep_arguments", lambda level: {})
    engine = split_engine(untied_dir, sleep_level=2)
    engine.llm.collective_rpc(overwrite_in_sleep)
    model = make_model()
    pusher = ProvenPusher(model, engine, torch.float32, Precision(None))
    pusher.push(0)
    let_sleep(engine)
    with pytest.raises(LockstepError, match="vLLM sleeps"):
        engine.generate(REQUESTS)
    proof = pusher.push(1, canary=True)
    assert proof.canary is not None
    assert proof.canary.max_abs < 1e-3
    assert engine.llm.collective_rpc(calls_of) == [["sleep 2", "wake weights", "wake kv_cache"]] * 2
    engine.close()


def overwrite_in_sleep(worker: Any) -> None:
    worker.worker.lockstep_memory = Memory(worker)


def calls_of(worker: Any) -> list[str]:
    return worker.lockstep_memory.calls


@pytest.mark.release
def test_gloo_reaches_both_workers(tied_dir: str) -> None:
    engine = split_engine(tied_dir, "gloo")
    model = make_model("llama", tied=True)
    pusher = ProvenPusher(model, engine, torch.float32, Precision(None))
    pusher.push(0, canary=True)
    with torch.no_grad():
        model.load_state_dict(perturbed(model, scale=0.5).state_dict())
    proof = pusher.push(1, canary=True)
    assert proof.canary is not None
    assert proof.canary.max_abs < 1e-3
    assert ModuleProbe(make_model("llama", tied=True), engine, torch.float32).measure(9, every=True).failed
    engine.close()


@pytest.mark.release
def test_workers_leave_signals_to_the_trainer_and_the_loss_of_one_ends_the_use_of_the_engine(
    untied_dir: str,
) -> None:
    before = workers_of(os.getpid())
    engine = split_engine(untied_dir)
    model, pids = make_model(), [pid for pid in workers_of(os.getpid()) if pid not in before]
    assert len(pids) == 2
    push_weights(model, engine, 0)
    for sign in (signal.SIGINT, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, sign)
    assert worst_gap(model, sampled(engine)) < 1e-3
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LockstepError, match="a worker process of vLLM failed"):
        engine.generate(REQUESTS)
    with pytest.raises(LockstepError, match="start the run again"):
        push_weights(model, engine, 1)
    with pytest.raises(ProofError):
        engine.generate(REQUESTS)
    engine.close()
    await_end(pids)


@pytest.mark.release
def test_a_model_that_cannot_be_split_is_an_error_at_the_start(untied_dir: str) -> None:
    before = workers_of(os.getpid())
    with pytest.raises(InputError, match="vLLM cannot load"):
        split_engine(untied_dir, tensor_parallel_size=3)
    assert workers_of(os.getpid()) == before


TRAINER = """
import sys, time
sys.path[:0] = {path!r}
from test_split_in_process import split_engine
print("starting", flush=True)
engine = split_engine({model!r})
print("engine is up", flush=True)
if sys.argv[1] == "waits":
    time.sleep(600)
"""


@pytest.mark.release
@pytest.mark.parametrize("end", ["starts", "waits", "ends"])
def test_the_workers_end_with_a_trainer_that_is_killed_or_forgets_to_close(
    end: str, untied_dir: str, tmp_path: Path
) -> None:
    script, log = tmp_path / "trainer.py", tmp_path / "log"
    folders = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        str(Path(__file__).parents[1] / "run"),
    ]
    script.write_text(TRAINER.format(path=folders, model=untied_dir))
    with log.open("w") as file:
        trainer = subprocess.Popen([sys.executable, str(script), end], stdout=file, stderr=file)
    try:
        deadline, pids = time.monotonic() + 300, []
        while "engine is up" not in log.read_text() and not (end == "starts" and len(pids) == 2):
            pids = workers_of(trainer.pid) or pids
            assert time.monotonic() < deadline, log.read_text()
            assert trainer.poll() is None, log.read_text()
            time.sleep(0.02)
        assert len(pids) == 2
        if end != "ends":
            trainer.kill()
        trainer.wait(60)
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text())
    finally:
        trainer.kill()
    await_end(pids)
