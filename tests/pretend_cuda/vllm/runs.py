"""Small runs of vLLM's GPU worker on the pretend GPU, for `test_vllm_runs.py`:

`python -m pretend_cuda.vllm.runs FILE NAME …`

It runs in a process of its own, in the environment of `environment.py`. It writes to FILE, as JSON, what each run has
found: an object of figures, or {"failed": traceback}.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import torch
from by_the_book import kept_set, shaped
from methods import GROUPS, lora, make
from tiny import make_model, save

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.engine import weight_digests
from lockstep.errors import InputError
from lockstep.weights.push import push_weights

FOLDER = Path(tempfile.mkdtemp())
# Rounding moves a token over the edge of a set only if its probability is this close to the edge.
EDGE = 1e-4
FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "temperature": 0.8}
# Longest prompt and completion.
LENGTH = 128
# Tokens of one step, so few that prompts are computed in parts. vLLM measures its memory with as many, in kernels
# that are interpreted.
STEP = 32
# Bytes of the cache, so that a small device holds many engines. By itself vLLM would take a third of the device.
SMALL = {"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": STEP}


def start(model: str, dtype: torch.dtype = torch.float32, **more: Any) -> VLLMInProcess:
    arguments = {**SMALL, **more.pop("engine_kwargs", {})}
    return VLLMInProcess(
        model, dtype=dtype, max_model_len=LENGTH, max_num_seqs=16, engine_kwargs=arguments, **more
    )


@contextlib.contextmanager
def engine(*args: Any, **kwargs: Any) -> Iterator[VLLMInProcess]:
    started = start(*args, **kwargs)
    try:
        yield started
    finally:
        started.close()


def model_folder() -> str:
    folder = FOLDER / "model"
    return str(folder if folder.exists() else save(make_model(), folder))


def learned(
    name: str, engine: VLLMInProcess | None, model: str | None = None, **fields: Any
) -> dict[str, Any]:
    """Two proven steps of GRPO. Returns the largest gap, and whether every gradient moved something."""
    arguments = {key: fields.pop(key) for key in ("peft_config",) if key in fields}
    fields = {**GROUPS, "max_steps": 2, **fields}
    trainer = make("GRPO", model or model_folder(), FOLDER / name, engine, fields, **arguments)
    before = {key: p.detach().clone() for key, p in trainer.model.named_parameters() if p.requires_grad}
    with parts_counted() as found_in_steps:
        trainer.train()
    after = dict(trainer.model.named_parameters())
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = {
        "steps": len(logs),
        "gap": max(log["parity/max_abs_gap"] for log in logs),
        "mean_gap": max(log["parity/mean_abs_gap"] for log in logs),
        "moved": any(not torch.equal(p, after[key]) for key, p in before.items()),
        "device": str(trainer.model.device),
        "asynchronous": trainer.engine.settings().async_scheduling,
        **found_in_steps,
        **inside(trainer.engine),
    }
    trainer.close()
    return found


@contextlib.contextmanager
def parts_counted() -> Iterator[Counter[str]]:
    """Counts steps of vLLM's scheduler that overlap, prompts computed in parts, and steps while weights are loaded."""
    from vllm.v1.core.sched.scheduler import Scheduler

    found: Counter[str] = Counter()
    schedule, update, load = Scheduler.schedule, Scheduler.update_from_output, VLLMInProcess.load
    open_steps = [0]

    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = schedule(self, *args, **kwargs)
        found["ahead"] += open_steps[0] > 0
        open_steps[0] += 1
        for name in step.num_scheduled_tokens:
            found["in_parts"] += (
                self.requests[name].num_computed_tokens < self.requests[name].num_prompt_tokens
            )
        return step

    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that has begun before the count may end within it.
        open_steps[0] = max(open_steps[0] - 1, 0)
        return update(self, *args, **kwargs)

    def loaded(self: VLLMInProcess, *args: Any, **kwargs: Any) -> Any:
        found["pushes"] += 1
        found["under_way"] += len(self.llm.llm_engine.engine_core.engine_core.batch_queue or ())
        return load(self, *args, **kwargs)

    changes = {"schedule": scheduled, "update_from_output": updated}
    with patch.multiple(Scheduler, **changes), patch.object(VLLMInProcess, "load", loaded):
        yield found


def inside(engine: Any) -> dict[str, Any]:
    """Where vLLM's worker, its runner and its attention come from, and whether it searches the edge of top-p."""
    (worker,) = engine.llm.collective_rpc(lambda worker: worker)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return {
        "worker": type(getattr(worker, "worker", worker)).__module__,
        "runner": type(worker.model_runner).__module__,
        "attention": next(type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")),
        "searches_top_p": engine.settings().searches_top_p,
    }


def drawn_requests(*more: Sampling) -> list[GenerationRequest]:
    """Three requests with each of these distributions, and with those of `more`."""
    settings = [
        Sampling(6, top_k=5),
        Sampling(6, top_p=0.8),
        Sampling(6),
        Sampling(6, temperature=1.5, min_p=0.02, top_k=40, top_p=0.9),
        *more,
    ]
    rng = random.Random(0)
    return [
        GenerationRequest(
            RequestKey(f"p{i}", 0), [rng.randrange(4, 300) for _ in range(8 + i % 3)], sampling, 50 + i
        )
        for i, sampling in enumerate(settings * 3)
    ]


def kept_sets(engine: VLLMInProcess) -> dict[str, Any]:
    """Requests with several filters and requests without any, in one batch, beside the exact sets."""
    model = make_model()
    push_weights(model, engine, 7)
    asked = drawn_requests(Sampling(6, temperature=2.0, top_p=0.99, max_kept_ids=4))
    too_many = [request for request in asked if request.sampling.max_kept_ids == 4]
    answers = engine.generate([request for request in asked if request not in too_many])
    found: dict[str, Any] = {"sets": 0, "differ": 0, "without": 0, "sampled_outside": 0}
    for request in asked:
        if request.key not in answers:
            continue
        answer, prompt = answers[request.key], request.prompt_ids.tolist()
        output = answer.token_ids.tolist()
        if answer.kept_ids is None:
            found["without"] += not request.sampling.is_filtered
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        for i, token in enumerate(output):
            scores = shaped(logits[i], request.sampling, prompt, output[:i], [0], None)
            ids = set(answer.kept_ids.part(i, i + 1).ids.tolist())
            inner, outer = (kept_set(scores, request.sampling, sign * EDGE) for sign in (-1, 1))
            found["sets"] += 1
            found["differ"] += not inner <= ids <= outer
            found["sampled_outside"] += token not in ids
    try:
        engine.generate(too_many)
    except InputError as error:
        found["over_the_limit"] = str(error)
    # The engine goes on.
    found["afterwards"] = len(engine.generate(asked[:1]))
    return found


def in_fp32() -> dict[str, Any]:
    """GRPO without and with filters, a merged adapter, kept sets, and sleep level 2, on one engine."""
    with engine(model_folder(), sleep_level=2) as started:
        runs = {
            "plain": learned("plain", started, vllm_enable_sleep_mode=True),
            "filters": learned("filters", started, **FILTERS),
            "merged": learned("merged", started, peft_config=lora()),
        }
        return {**runs, "kept": kept_sets(started), "sleep": slept(started, 8)}


def steps_apart() -> dict[str, Any]:
    """The same requests on an engine with a GPU's defaults, and on one with whole prompts, one step after the other."""
    answers = []
    for more in (
        {},
        {"async_scheduling": False, "enable_chunked_prefill": False, "max_num_batched_tokens": LENGTH},
    ):
        with engine(model_folder(), engine_kwargs=more) as started:
            push_weights(make_model(), started, 7)
            with parts_counted() as found:
                answers.append([started.generate(drawn_requests()) for _ in range(2)])
            answers[-1].append(found)
    (one, again, defaults), (other, _, apart) = answers
    gaps = [np.abs(one[key].logprobs - other[key].logprobs).max() for key in one]
    return {
        "defaults": defaults,
        "apart": apart,
        "tokens": sum(len(answer.token_ids) for answer in one.values()),
        "other_ids": [
            str(key) for key in one if not np.array_equal(one[key].token_ids, other[key].token_ids)
        ],
        "other_sets": [str(key) for key in one if sets_of(one[key]) != sets_of(other[key])],
        "not_repeated": [
            str(key)
            for key in one
            if not np.array_equal(one[key].token_ids, again[key].token_ids)
            or not np.array_equal(one[key].logprobs, again[key].logprobs)
        ],
        "gap": float(max(gaps)),
    }


def sets_of(answer: Completion) -> list[list[int]] | None:
    if answer.kept_ids is None:
        return None
    return [answer.kept_ids.part(i, i + 1).ids.tolist() for i in range(len(answer.token_ids))]


def in_bf16() -> dict[str, Any]:
    with engine(model_folder(), torch.bfloat16) as started:
        return learned("bf16", started, bf16=True)


def in_8_bits() -> dict[str, Any]:
    with engine(model_folder(), torch.bfloat16, quantization="fp8_per_channel") as started:
        fields = {"vllm_quantization": "fp8_per_channel", "bf16": True, "learning_rate": 1e-3}
        return learned("fp8", started, **fields)


def adapters_alone() -> dict[str, Any]:
    """An adapter that is sent alone, with sleep level 1: the weights go to main memory between two pushes."""
    from lockstep.extras.lora_alone.adapter_arguments import adapter_arguments

    arguments = adapter_arguments(8, ["q_proj", "up_proj"])
    with engine(model_folder(), torch.bfloat16, sleep_level=1, engine_kwargs=arguments) as started:
        fields = {"vllm_enable_lora": True, "vllm_enable_sleep_mode": True, "bf16": True}
        run = learned("alone", started, peft_config=lora(), **fields)
        return {"run": run, "sleep": slept(started, 8)}


def slept(engine: VLLMInProcess, version: int) -> dict[str, Any]:
    """What the weights are before, during and after a sleep.

    Level 1 keeps them; after level 2 they are pushed again.
    """
    engine.sleeping.wake_weights()
    engine.sleeping.wake_cache()
    (before,) = engine.call(weight_digests, "7")
    engine.sleep()
    (asleep,) = engine.call(_finite)
    if engine.sleeping.level == 1:
        engine.sleeping.wake_weights()
    else:
        push_weights(make_model(), engine, version)
    (after,) = engine.call(weight_digests, "7")
    (awake,) = engine.call(_finite)
    changed = sorted(name for name in before if before[name] != after[name])
    return {"parameters": len(before), "changed": changed, "finite_asleep": asleep, "finite_awake": awake}


def _finite(worker: Any) -> int:
    return sum(bool(p.float().isfinite().any()) for p in worker.model_runner.model.parameters())


def pictures() -> dict[str, Any]:
    from looking import gaps, look
    from seeing import let_vllm_see, save_seeing

    let_vllm_see()
    folder = save_seeing(FOLDER / "seeing")
    with engine(folder) as started:
        trainer = look(folder, FOLDER / "pictures", engine=started)
        trainer.train()
        seen = {
            len(group.prompt.pictures.pictures) if group.prompt.pictures else 0
            for group in trainer.rollouts()
        }
        found = {
            "steps": len(gaps(trainer)),
            "gap": max(gaps(trainer)),
            "pictures": sorted(seen),
            **inside(started),
        }
        trainer.close()
        return found


def experts() -> dict[str, Any]:
    from model_families import save_family

    folder = save_family("qwen3_moe", FOLDER / "experts")
    with engine(folder) as started:
        return learned("experts_run", started, folder)


def first_runner() -> dict[str, Any]:
    """vLLM's first model runner on the GPU, which Lockstep's own recorder takes the kept ids from."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    try:
        with engine(model_folder()) as started:
            return {"run": learned("first", started, **FILTERS), "kept": kept_sets(started)}
    finally:
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]


def server() -> dict[str, Any]:
    """A server whose processes have own devices, and two proven steps of a trainer that pushes to it over CUDA IPC."""
    from servers import KEY, free_port

    from lockstep.server.keys import KEY_VARIABLE
    from pretend_cuda import ipc

    os.environ[KEY_VARIABLE] = KEY
    (FOLDER / "ipc").mkdir(parents=True)
    os.environ["PRETEND_IPC"] = str(FOLDER / "ipc")
    ipc.stand_in(FOLDER / "ipc")
    url, port = "http://127.0.0.1:", free_port()
    command = [sys.executable, "-m", "lockstep.cli.main", "serve", model_folder(), "--port", str(port)]
    sizes = ["--max_model_len", str(LENGTH), "--max_num_batched_tokens", str(STEP), "--max_num_seqs", "16"]
    process = subprocess.Popen([*command, "--dtype", "float32", *sizes])
    try:
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}{port}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            assert process.poll() is None, "the server has ended"
            time.sleep(1)
        fields = {**GROUPS, "max_steps": 2, "use_vllm": True, "vllm_server_base_url": f"{url}{port}"}
        trainer = make("GRPO", model_folder(), FOLDER / "server", None, fields)  # type: ignore[arg-type]
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        device, transport = str(trainer.model.device), type(trainer.engine.transport.used).__name__
        trainer.close()
        gap = max(log["parity/max_abs_gap"] for log in logs)
        crossed = in_flight(f"{url}{port}")
        return {
            "steps": len(logs),
            "gap": gap,
            "device": device,
            "transport": transport,
            "in_flight": crossed,
        }
    finally:
        process.terminate()
        process.wait(60)


def in_flight(url: str) -> dict[str, Any]:
    """Requests that go on over a push: the gap of their tokens to the version of each stamp, and to the other one."""
    from servers import Server, connect
    from test_in_flight import crossing, gap_by_version, long_requests, pushed_into

    engine = connect(url)
    models, found = pushed_into(Server(url, None, None), engine, long_requests(4, LENGTH - 80))  # type: ignore[arg-type]
    across, last = crossing(found), max(models)
    exchanged = {last - 1: models[last], last: models[last - 1]}
    try:
        return {
            "asynchronous": engine.settings().async_scheduling,
            "across": len(across),
            "gap": gap_by_version(models, found),
            "exchanged": gap_by_version(exchanged, across),
        }
    finally:
        engine.close()


def stand_ins() -> dict[str, Any]:
    from pretend_cuda.vllm.stand_ins import STAND_INS

    return {name: noted(check) for name, check in STAND_INS.items()}


def noted(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a run has found, or its traceback."""
    begin = time.process_time()
    try:
        found = run()
    except Exception:  # noqa: BLE001 - the test that asks for this run shows it
        found = {"failed": traceback.format_exc()}
    print(f"{run.__name__}: {time.process_time() - begin:.1f} CPU s", flush=True)
    return found


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    run.__name__: run
    for run in (in_fp32, in_bf16, in_8_bits, adapters_alone, pictures, experts, first_runner, stand_ins)
}
# Runs of a test of their own.
ALONE: dict[str, Callable[[], dict[str, Any]]] = {run.__name__: run for run in (server, steps_apart)}


def main(file: str, *names: str) -> None:
    found = {}
    for name in names or RUNS:
        found[name] = noted((RUNS | ALONE)[name])
        Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
