"""vLLM's sleep mode, with real vLLM in this process. Its scheduler and its executor sleep and wake as on a GPU.

On a CPU vLLM's workers keep their memory when they sleep. Therefore `Memory` takes the place of that one part: level
2 really overwrites the weights that the worker computes with, and level 1 overwrites them and restores them when they
wake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import gradients, make
from conftest import VLLM, start
from tiny import make_model

from lockstep import GRPOConfig
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm import in_process
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port import engine as sleep
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.extensions import ADAPTERS, load
from lockstep.extras.trl.proven_engine import ProvenEngine
from lockstep.images.pictures import NO_PICTURES
from lockstep.models.arithmetic import Precision
from lockstep.run import source
from lockstep.watch.push import ProvenPusher
from lockstep.weights.push import let_sleep

pytestmark = VLLM
REQUEST = GenerationRequest(RequestKey("p", 0), (7, 8, 9), Sampling(8), 5)


class Memory:
    """The memory of a worker, with the methods of vLLM's worker that take it and give it back.

    Attributes:
        calls: what was called, in order.
        is_damaged: whether level 1 gives back other bytes than it took.
    """

    def __init__(self, worker: Any) -> None:
        self.model = worker.model_runner.model
        self.calls: list[str] = []
        self.is_damaged = False
        self._kept: dict[Any, dict[str, Any]] = {}
        worker.worker.sleep, worker.worker.wake_up = self.sleep, self.wake_up

    @torch.no_grad()
    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self._kept = {}
        for layer in self.model.modules():
            own = {name: p.detach().clone() for name, p in layer.named_parameters(recurse=False)}
            if "cpu_linear" in vars(layer):
                own["cpu_linear"] = layer.cpu_linear
                layer.cpu_linear = lambda x, *rest, layer=layer: torch.full(
                    (*x.shape[:-1], _outputs(layer)), 7.0
                )
            for parameter in layer.parameters(recurse=False):
                parameter.fill_(7.0)
            if level == 1:
                self._kept[layer] = own

    @torch.no_grad()
    def wake_up(self, tags: list[str]) -> None:
        self.calls += [f"wake {tag}" for tag in tags]
        for layer, own in self._kept.items() if "weights" in tags else ():
            for name, value in own.items():
                if name == "cpu_linear":
                    layer.cpu_linear = value
                else:
                    getattr(layer, name).copy_(value + 1e-6 if self.is_damaged else value)


def _outputs(layer: Any) -> int:
    return sum(
        getattr(layer, "output_sizes", None) or [getattr(layer, "output_size", 0) or layer.org_vocab_size]
    )


def sleeping(model: str, level: int, **more: Any) -> tuple[VLLMInProcess, Memory]:
    """An engine that may sleep although it runs on a CPU, and its memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "sleep_arguments", lambda level: {})
        engine: Any = start("vllm", model, sleep_level=level, **more)
    (memory,) = engine.llm.collective_rpc(Memory)
    return engine, memory


@pytest.fixture(scope="module")
def made(untied_dir: str) -> Iterator[tuple[VLLMInProcess, Memory]]:
    engine, memory = sleeping(untied_dir, 2)
    yield engine, memory
    engine.close()


@pytest.fixture
def engine(made: tuple[VLLMInProcess, Memory], monkeypatch: pytest.MonkeyPatch) -> VLLMInProcess:
    monkeypatch.setattr(made[0].sleeping, "level", 2)
    made[1].calls.clear()
    return made[0]


@pytest.fixture
def memory(made: tuple[VLLMInProcess, Memory]) -> Memory:
    return made[1]


def pusher(engine: VLLMInProcess, model: Any) -> ProvenPusher:
    return ProvenPusher(model, engine, torch.float32, Precision(None))


def test_the_order_is_sleep_weights_push_proofs_cache_sample(
    engine: VLLMInProcess, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    pushing = pusher(engine, model)
    pushing.push(0)
    first = engine.generate([REQUEST])[REQUEST.key]
    for method in ("load", "probe", "score", "commit_version"):
        real = getattr(engine, method)
        monkeypatch.setattr(
            engine, method, lambda *a, m=method, r=real, **k: (memory.calls.append(m), r(*a, **k))[1]
        )
    let_sleep(engine)
    assert engine.version is None
    proof = pushing.push(1, canary=True)
    again = engine.generate([REQUEST])[REQUEST.key]
    assert memory.calls == [
        "sleep 2", "wake weights", "load", "commit_version", "probe", "score", "wake kv_cache",
    ]  # fmt: skip
    # Nothing changed, and everything was sent, without a detour.
    assert proof.push.sent_bytes == proof.push.bytes
    assert proof.push.in_full == ""
    assert proof.canary is not None
    assert proof.canary.max_abs < 1e-3
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert again.logprobs.tolist() == first.logprobs.tolist()
    # The next push needs no wake, and a second sleep no second call.
    pushing.push(2)
    assert memory.calls.count("wake weights") == 1
    let_sleep(engine)
    let_sleep(engine)
    assert memory.calls.count("sleep 2") == 2
    pushing.push(3)
    # The cache still sleeps, so that it wakes before vLLM falls asleep as a whole.
    let_sleep(engine)
    assert memory.calls[-2:] == ["wake kv_cache", "sleep 2"]
    pushing.push(4)


def test_an_engine_that_sleeps_is_not_asked(engine: VLLMInProcess) -> None:
    pusher(engine, make_model()).push(0)
    engine.sleep()
    for ask in (
        lambda: engine.generate([REQUEST]),
        lambda: engine.score({"a": (1, 2, 3)}),
        lambda: engine.probe(["lm_head"], 1, every=True),
    ):
        with pytest.raises(LockstepError, match="vLLM sleeps between two pushes"):
            ask()


def test_a_trainer_that_forgets_that_the_weights_are_gone_sends_them_again(engine: VLLMInProcess) -> None:
    model = make_model()
    pushing = pusher(engine, model)
    pushing.push(0)
    # Without `let_sleep` the trainer believes that the engine still holds the last version.
    engine.sleep()
    proof = pushing.push(1, canary=True)
    assert "does not hold the version that was pushed last" in proof.push.in_full
    assert proof.push.sent_bytes == proof.push.bytes
    assert proof.canary is not None
    assert proof.canary.max_abs < 1e-3


def test_weights_that_are_gone_on_both_sides_record_are_found_by_the_proofs(
    engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side knows of the loss: the digests of an empty push are right, and the engine computes with garbage."""
    model = make_model()
    pushing = pusher(engine, model)
    pushing.push(0)
    monkeypatch.setattr(sleep, "forget_weights", lambda worker: None)
    engine.sleep()
    with pytest.raises(ProofError, match="proof 'module_probe' failed"):
        pushing.push(1, canary=True)
    with pytest.raises(ProofError, match="the canary's tokens"):
        pushing.score_canary(1)


def test_level_1_keeps_the_weights_and_proves_that_they_came_back(
    engine: VLLMInProcess, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    pushing = pusher(engine, model)
    pushing.push(0)
    monkeypatch.setattr(engine.sleeping, "level", 1)
    let_sleep(engine)
    proof = pushing.push(1, canary=True)
    assert memory.calls == ["sleep 1", "wake weights", "wake kv_cache"]
    # The engine still holds the last version, so that nothing is sent.
    assert (proof.push.sent_bytes, proof.push.in_full) == (0, "")
    assert proof.canary is not None
    assert proof.canary.max_abs < 1e-3
    let_sleep(engine)
    monkeypatch.setattr(memory, "is_damaged", True)
    # Whole weights can be sent again.
    again = pushing.push(2, canary=True)
    assert "worker 0 of vLLM woke with other bytes in " in again.push.in_full
    assert again.push.sent_bytes == proof.push.bytes
    assert again.canary is not None
    assert again.canary.max_abs < 1e-3
    # The base model of an adapter alone is not sent again.
    let_sleep(engine)
    with pytest.raises(
        ProofError, match=r"proof 'sleep' failed: worker 0 .* other bytes in \d+ of \d+ parameters"
    ):
        load(ADAPTERS["in_process"])(engine).begin()
    monkeypatch.setattr(memory, "is_damaged", False)


def test_a_wake_that_vllm_does_not_confirm_is_an_error(
    engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushing = pusher(engine, make_model())
    pushing.push(0)
    let_sleep(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "wake_up", lambda tags: True)
        with pytest.raises(LockstepError, match="vLLM did not wake its weights"):
            pushing.push(1)
    pushing.push(2, canary=True)


def test_a_run_sleeps_after_every_generation_and_learns_the_same(
    engine: VLLMInProcess, memory: Memory, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for sleeps in (False, True):
        run = make(
            "grpo-grpo",
            untied_dir,
            tmp_path / str(sleeps),
            engine=engine,
            use_vllm=True,
            max_steps=4,
            vllm_enable_sleep_mode=sleeps,
        )
        runs.append((gradients(run), run.state.log_history))
    (awake, logs), (slept, their_logs) = runs
    assert len(awake) == len(slept) == 4
    for one, other in zip(awake, slept, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    tokens = [[log.get("parity/checked_tokens") for log in found] for found in (logs, their_logs)]
    assert tokens[0] == tokens[1]
    # Two steps learn from each generation.
    assert memory.calls.count("sleep 2") == 2
    # The first push comes before the first sleep.
    assert memory.calls.count("wake weights") == 1
    # If neither side knows that the weights are gone, a run whose weights did not change ends before its next
    # generation.
    monkeypatch.setattr(sleep, "forget_weights", lambda worker: None)
    monkeypatch.setattr(source, "let_sleep", lambda engine: engine.sleep())
    fields: dict[str, Any] = {
        "use_vllm": True,
        "max_steps": 4,
        "vllm_enable_sleep_mode": True,
        "learning_rate": 1e-30,
    }
    with pytest.raises(ProofError, match=r"proof .module_probe. failed: at version 2"):
        make("grpo-grpo", untied_dir, tmp_path / "fault", engine=engine, **fields).train()


def test_trls_generation_sleeps_after_a_call_and_pushes_where_the_trainer_does_not(
    engine: VLLMInProcess, memory: Memory
) -> None:
    proven = ProvenEngine(make_model(), engine, torch.float32, Precision(None), seed=3, sleeps=True)
    proven.sync()
    asked = {REQUEST.key: (REQUEST.prompt_ids, NO_PICTURES)}
    for _ in range(2):
        assert len(proven.generate(asked, Sampling(8))) == 1
        assert engine.version is None
    assert proven.version == 2
    assert memory.calls.count("sleep 2") == 2


def test_what_is_refused_by_name(
    engine: VLLMInProcess, untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        said = "vLLM has sleep mode on GPUs only, and this engine runs on cpu; leave it out"
        with pytest.raises(InputError, match=said):
            start("vllm", untied_dir, sleep_level=2)
    fields: dict[str, Any] = {"output_dir": str(tmp_path), "bf16": False, "vllm_enable_sleep_mode": True}
    with pytest.raises(InputError, match="vllm_enable_sleep_mode needs vLLM, and use_vllm is false"):
        GRPOConfig(**fields, use_vllm=False)
    assert GRPOConfig(**fields).sleep_level == 2
    assert GRPOConfig(**fields, vllm_enable_lora=True).sleep_level == 1
    capsys.readouterr()
    assert GRPOConfig(**fields, vllm_server_base_url="http://127.0.0.1:8000").sleep_level == 0
    assert "vllm_enable_sleep_mode has no effect with servers" in capsys.readouterr().err
    given = start("transformers", untied_dir)
    with pytest.raises(InputError, match="the engine that was given cannot sleep"):
        make("grpo-grpo", untied_dir, tmp_path, engine=given, use_vllm=None, vllm_enable_sleep_mode=True)
