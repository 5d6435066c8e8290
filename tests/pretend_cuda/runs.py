"""Runs of the device suite. `python tests/pretend_cuda/runs.py FOLDER` does all of them on the pretend GPU.

It does those of `TWINS` once more in the same process with the model on the CPU, so that libraries are imported once.
Each run leaves a JSON file in the folder: its logs, an error if it had one, the mixed devices, and the number of
operations on the device, which is 0 for a run on the CPU. The folder of the run gets its weights.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

Result = dict[str, Any]
# The kinds of tiny models, made on the CPU by `save_models`.
TEXT, EXPERTS, PICTURES, TOOLS, ROWS, DEEP = "text", "experts", "pictures", "tools", "rows", "deep"
_GROUPS = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
_ALONE = {**_GROUPS, "num_generations": 1}
_PAIRS = {"per_device_train_batch_size": 2, "max_new_tokens": 8, "max_length": 100}
RATE = 1e-3
_FAULTS, _SEED = 12, 43
# Fields of every run of a method.
_EVERYWHERE: dict[str, Any] = {}
GPU_DAY = ("machine", "order", "digests", "runs-1", "gaps-fp32")


def save_models(folder: Path) -> None:
    """The tiny models of all runs."""
    from caller import save_caller
    from model_families import save_family
    from seeing import save_seeing
    from tiny import save_model

    save_model(folder / TEXT, kind="llama")
    save_model(folder / DEEP, kind="llama", num_hidden_layers=8)
    save_family("qwen3_moe", folder / EXPERTS)
    save_seeing(folder / PICTURES)
    save_caller(folder / TOOLS)
    # Its sequences are longer than its window, so it learns from plain rows.
    save_model(folder / ROWS, kind="mistral", sliding_window=6)


def train(folder: Path, method: str, model: str = TEXT, resume: bool = False, **given: Any) -> Result:
    """A run of a method, by its fields; the arguments of the trainer among them."""
    from methods import PROMPTS, by_length
    from safetensors.torch import save_file

    import lockstep

    names = ("peft_config", "tools", "eval_dataset", "train_dataset", "callbacks", "ref_model")
    arguments = {name: given.pop(name) for name in names if name in given}
    sizes = {"OnlineDPO": _PAIRS, "PPO": _ALONE, "ReinforcePP": _ALONE}.get(method, _GROUPS)
    base = {
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    base |= {"learning_rate": RATE, "use_vllm": False, "bf16": False, "gradient_accumulation_steps": 2}
    base |= _EVERYWHERE
    config = getattr(lockstep, f"{method}Config")(
        output_dir=str(folder / "run"), **{**base, **sizes, **given}
    )
    trainer = getattr(lockstep, f"{method}Trainer")(
        model=str(folder.parent / model),
        args=config,
        **{"reward_funcs": by_length, "train_dataset": PROMPTS, **arguments},
    )
    trainer.train(resume_from_checkpoint=resume or None)
    beside = (trainer.critic, trainer.reference.own if trainer.reference is not None else None)
    models = [trainer.model, trainer.engine.model, *(model for model in beside if model is not None)]
    devices = {p.device.type for model in models for p in model.parameters()}
    weights = {
        name: p.detach().cpu().contiguous() for name, p in trainer.model.named_parameters() if p.requires_grad
    }
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "weights.safetensors")
    trainer.close()
    tensors = sum(1 for _ in trainer.model.parameters())
    return {"devices": sorted(devices), "logs": trainer.state.log_history, "tensors": tensors}


def _filtered_beside_a_given_reference(folder: Path) -> Result:
    """The reference is loaded by the user, on the CPU: a copy of the policy would be on the device already."""
    from transformers import AutoModelForCausalLM

    given = AutoModelForCausalLM.from_pretrained(folder.parent / TEXT, dtype="float32")
    return train(folder, "RLOO", beta=0.1, ref_model=given, top_p=0.9, top_k=20, temperature=0.8)


def _adapted(folder: Path, **given: Any) -> Result:
    from methods import lora

    return train(folder, "GRPO", peft_config=lora(), **given)


def _evaluated(folder: Path) -> Result:
    from methods import PROMPTS

    return train(folder, "GRPO", eval_strategy="steps", eval_steps=1, eval_dataset=PROMPTS.select(range(4)))


def _seen(folder: Path) -> Result:
    from datasets import Dataset
    from seeing import mixed_rows

    return train(folder, "GRPO", PICTURES, train_dataset=Dataset.from_list(mixed_rows()))


def _elsewhere(folder: Path) -> Result:
    """One step with the model on the CPU, and a second one by a run that goes on with it on the device."""
    from methods import StopAfter

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    train(folder, "GRPO", save_strategy="steps", save_steps=1, callbacks=[StopAfter(1)], use_cpu=True)
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    result = train(folder, "GRPO", save_strategy="steps", save_steps=1, resume=True)
    logger.removeHandler(handler)
    return {**result, "told": [line for line in told if "elsewhere" in line]}


def _called(folder: Path) -> Result:
    from caller import multiply
    from datasets import Dataset

    rows = [{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(8)]
    return train(
        folder,
        "GRPO",
        TOOLS,
        tools=[multiply],
        train_dataset=Dataset.from_list(rows),
        max_completion_length=60,
    )


def _resumed(folder: Path) -> Result:
    """One step, and a second one by a run that goes on. The logs must be those of `grpo`, which was not interrupted."""
    from methods import StopAfter

    train(folder, "GRPO", save_strategy="steps", save_steps=1, callbacks=[StopAfter(1)])
    return train(folder, "GRPO", save_strategy="steps", save_steps=1, resume=True)


def _verified(folder: Path) -> Result:
    """Every row of `lockstep verify`, and then a drawn dozen of the faults of its self-test."""
    from stages import stage_on

    from lockstep.extras.selftest.self_test import FAULTS, run_self_test
    from lockstep.extras.verify.run_checks import CHECKS, run_checks

    drawn = random.Random(_SEED).sample(FAULTS, _FAULTS)
    with stage_on(str(folder.parent / TEXT), folder, use_vllm=False, bf16=False) as stage:
        rows = run_checks(stage, lambda name: None)
        verdicts = list(run_self_test(stage, lambda name: None, tuple(drawn)))
    return {
        "checks": len(CHECKS),
        "rows": [[row.proof, row.passed, row.figure] for row in rows],
        "verdicts": [[v.id, v.caught_by, v.skipped, v.error] for v in verdicts],
    }


def _pushed(folder: Path) -> Result:
    """Pushes on this device over each transport without a GPU at the other end, in two dtypes, and their digests."""
    import torch
    from peft import LoraConfig, get_peft_model
    from test_changes import KeepingWorker, Receiver
    from tiny import make_model

    from lockstep.contract.tensors import tensor_specs
    from lockstep.weights.push import push_weights
    from lockstep.weights.source import LastPush, PlainSource, Update
    from lockstep.weights.wire.network import GlooTransport
    from lockstep.weights.wire.shared_memory import SharedMemoryTransport

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, bool] = {}

    def change(model: Any, version: int) -> None:
        with torch.no_grad():
            if version == 1:
                model.model.layers[1].self_attn.k_proj.weight[0, :3] += 1
            if version == 2:
                model.lm_head.weight.mul_(1.01)

    for dtype in (torch.float32, torch.bfloat16):
        for name, transport in (
            ("shared memory", SharedMemoryTransport(60.0)),
            ("gloo", GlooTransport("127.0.0.1", 0, 60.0)),
        ):
            model, sent, worker = make_model().to(device, dtype), LastPush(), KeepingWorker()
            for version in range(4):
                update = Update(PlainSource(model), None, sent)
                transport.send(update, [worker], update.base)
                sent.manifest = update.manifest(version)
                for parameter, tensor in PlainSource(model):
                    host = tensor.cpu()
                    same = torch.equal(worker.found[parameter].cpu(), host)
                    same &= tensor_specs([(parameter, tensor)]) == tensor_specs([(parameter, host)])
                    found[f"{name} {dtype}"] = found.get(f"{name} {dtype}", True) and same
                change(model, version)
            transport.close()
        for kind in ("whole", "elements", "merged adapter"):
            model, receiver = (
                make_model().to(device, dtype),
                Receiver(torch.bfloat16, keeps=kind == "elements"),
            )
            if kind == "merged adapter":
                model = get_peft_model(
                    model, LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
                )
            digests = []
            for version in range(3):
                digests.append(push_weights(model, receiver, version).digest)
                with torch.no_grad():
                    next(p for p in reversed(list(model.parameters())) if p.requires_grad).add_(0.5)
            found[f"{kind} {dtype}"] = len(set(digests)) == 3
    return {"pushes": found}


def _counted(folder: Path) -> Result:
    from pretend_cuda import counts

    return counts.both(folder)


def _sliced(folder: Path) -> Result:
    from pretend_cuda import slices

    return {
        "probe": slices.of_probe(folder),
        "sums": slices.of_sums(),
        "filters": slices.of_filters(),
        "places": slices.of_places(),
    }


def _digested(folder: Path) -> Result:
    from pretend_cuda.digests import measured

    return measured(folder)


def _launched(folder: Path) -> Result:
    """The kernels of one layer, by place, for packs of a prompt with completions."""
    from pretend_cuda.launches import of_a_layer

    packs = {"8 x 480 + 256": (256, 480, 8), "64 x 60 + 200": (200, 60, 64)}
    return {"layers": {name: of_a_layer(*sizes) for name, sizes in packs.items()}}


def _itself(folder: Path) -> Result:
    """What the device itself promises, without Lockstep."""
    import torch

    from pretend_cuda import LOG

    device = torch.device("cuda")
    one, host = torch.ones(4, device=device), torch.ones(4)

    def refuses(call: Callable[[], Any]) -> bool:
        try:
            call()
        except RuntimeError as error:
            return "Expected" in str(error)
        return False

    def waits(call: Callable[[], Any]) -> int:
        before = sum(LOG.events.values())
        call()
        return sum(LOG.events.values()) - before

    held = torch.cuda.memory_allocated()
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    return {
        "holds": {
            "tensors of two devices are refused": refuses(lambda: one + host),
            "a generator of the CPU is refused": refuses(
                lambda: torch.randn(2, device=device, generator=torch.Generator())
            ),
            "a number of the host is taken": bool((one + torch.tensor(1.0) == 2).all()),
            "indices of the host are taken": one[torch.tensor([1])].item() == 1.0,
            "fresh memory is not a number": bool(torch.empty(8, device=device).isnan().all()),
            "memory is counted": torch.cuda.memory_allocated() - held >= len(kept),
            # vLLM sizes its cache with it.
            "the peak is among the statistics": torch.cuda.memory_stats()["allocated_bytes.all.peak"]
            >= len(kept),
            "an item waits": waits(one.sum().item) == 1,
            "a copy from pageable memory waits": waits(lambda: host.to(device)) == 1,
            "a product does not wait": waits(lambda: one * one) == 0,
        }
    }


def _gpu_day(folder: Path) -> Result:
    """Parts of `make gpu-day` at a tiny size. Others need NCCL, or a profiler that counts kernels of a real GPU."""
    from benchmarks.gpu_day import run as gpu_day

    folder.mkdir()
    for name in GPU_DAY:
        gpu_day.run_part(name, folder, rehearse=True)
    return {"parts": {name: part["rows"] for name, part in gpu_day.read(folder).items()}}


def _ipc(folder: Path) -> Result:
    from pretend_cuda import ipc

    return ipc.pushed(folder)


RUNS: dict[str, Callable[[Path], Result]] = {
    # The first, because it forks, and later runs start threads.
    "ipc": _ipc,
    "grpo": _evaluated,
    "resumed": _resumed,
    "elsewhere": _elsewhere,
    "old_generation": lambda folder: train(
        folder, "GRPO", num_iterations=2, steps_per_generation=4, max_steps=4, repetition_penalty=1.1
    ),
    "rloo_filters": _filtered_beside_a_given_reference,
    "reinforce_pp": lambda folder: train(folder, "ReinforcePP", ROWS),
    "online_dpo": lambda folder: train(folder, "OnlineDPO"),
    "ppo": lambda folder: train(folder, "PPO"),
    "checkpointing": lambda folder: train(folder, "GRPO", gradient_checkpointing=True),
    "adapter": lambda folder: _adapted(folder, beta=0.1),
    "experts": lambda folder: train(folder, "GRPO", EXPERTS),
    "pictures": _seen,
    "tools": _called,
    "grpo_bf16": lambda folder: train(folder, "GRPO", bf16=True, min_p=0.02, repetition_penalty=1.1),
    "ppo_bf16": lambda folder: train(folder, "PPO", bf16=True),
    "adapter_bf16": lambda folder: _adapted(folder, bf16=True),
    "verify": _verified,
    "push": _pushed,
    "counts": _counted,
    "slices": _sliced,
    "digests": _digested,
    "launches": _launched,
    "itself": _itself,
    "gpu_day": _gpu_day,
}
# The runs with a loss. They are named with whether they compute in bf16.
ONLY_HERE = (
    "ipc",
    "elsewhere",
    "verify",
    "push",
    "counts",
    "slices",
    "digests",
    "launches",
    "itself",
    "gpu_day",
)
LEARNING = {name: name.endswith("bf16") for name in RUNS if name not in ONLY_HERE}
# What is done on the CPU too. On the device, these two must have the figures of `grpo` to the bit.
TWINS = tuple(name for name in LEARNING if name not in ("resumed", "checkpointing"))


def twin(name: str) -> str:
    """The name of the same run on the CPU."""
    return f"{name}-cpu"


def run_all(folder: Path, names: list[str], log: Any) -> None:
    """Do runs, one after the other, and those of them that have a twin on the CPU.

    An error is a part of its run's file.

    Args:
        folder: contains the models. Each run gets a folder of its own in it.
        log: what the pretend GPU counts.
    """
    for name in names:
        _run(folder / name, RUNS[name], log)
    import torch

    with patch.dict(_EVERYWHERE, use_cpu=True), patch.object(torch.cuda, "is_available", lambda: False):
        for name in (name for name in names if name in TWINS):
            _run(folder / twin(name), RUNS[name], log)


def _run(folder: Path, call: Callable[[Path], Result], log: Any) -> None:
    before, start = log.kernels(), time.process_time()
    try:
        result = call(folder)
    except Exception:  # noqa: BLE001 - a test shows it
        result = {"error": traceback.format_exc()}
    result["operations"], result["mixes"] = log.kernels() - before, [list(mix) for mix in log.mixes]
    log.clear()
    result["seconds"] = time.process_time() - start
    folder.with_name(f"{folder.name}.json").write_text(json.dumps(result, default=float), encoding="utf-8")


def begin() -> Any:
    """Switch the pretend GPU on, before PyTorch is imported. Returns its log."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [
        str(tests),
        str(tests / "run"),
        str(tests / "weights"),
        str(tests / "engines"),
        str(tests.parent),
    ]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    # Imports make a million objects that stay. Without this, each collection would look at all of them, and a run
    # ends with one.
    gc.disable()
    import pretend_cuda

    # bitsandbytes would load CUDA's own library.
    log = pretend_cuda.activate(first=["bitsandbytes"])
    import lockstep.extras.selftest.self_test  # noqa: F401

    gc.freeze()
    gc.enable()
    return log


def main() -> None:
    folder, log = Path(sys.argv[1]), begin()
    save_models(folder)
    run_all(folder, list(RUNS), log)


if __name__ == "__main__":
    main()
