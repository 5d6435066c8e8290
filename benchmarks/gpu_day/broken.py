"""The first call of `make gpu-day`: what is broken on a GPU. Each part is a function that yields rows of its table.

A row with `failed` is a defect of Lockstep, or of a package that it is used with; the log has the traceback. Times
have no meaning here, because the parts of this call run beside each other.
"""

from __future__ import annotations

import importlib
import itertools
import json
import linecache
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.gpu_day.measuring import Row, Sizes, device, give_memory_back, save_model

_SMALL: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": True,
}
_SMALL |= {"report_to": "none", "learning_rate": 1e-3, "use_vllm": False}
_GROUPS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "gradient_accumulation_steps": 2,
}
_GROUPS |= {"max_completion_length": 12}
_ALONE = {**_GROUPS, "num_generations": 1}
_PAIRS = {
    "per_device_train_batch_size": 2,
    "max_new_tokens": 6,
    "max_length": 100,
    "gradient_accumulation_steps": 2,
}


@contextmanager
def told(row: Row) -> Iterator[None]:
    """Put any error of the block into the row, and its traceback into the log."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever is broken is the result
        traceback.print_exc()
        own = [f for f in traceback.extract_tb(error.__traceback__) if "lockstep" in f.filename]
        where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        row["failed"] = f"{type(error).__name__}{where}: {str(error).strip()[:700]}"
        print(row, flush=True)


# ---- interfaces
# --------------------------------------------------------------------------------------------------------


def interfaces(sizes: Sizes) -> Iterator[Row]:
    """Every module of Lockstep imports here, and PyTorch has what Lockstep calls on a GPU alone."""
    import lockstep

    failed = []
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if ".examples" in module.name or module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("lockstep"):
                failed.append(f"{module.name}: {error}")
        except Exception as error:  # noqa: BLE001 - the row lists all
            failed.append(f"{module.name}: {type(error).__name__}: {str(error)[:200]}")
    yield {"what": "modules that do not import", "is": "; ".join(failed) or "none", "passed": not failed}
    from torch.distributed.fsdp import FSDPModule

    has = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    yield {"what": "FSDP2 sums gradients that some ranks lack", "is": str(has)}
    if device().type == "cuda":
        yield {"what": "cuDNN", "is": str(torch.backends.cudnn.version())}
        yield {"what": "attention by cuDNN allowed", "is": str(torch.backends.cuda.cudnn_sdp_enabled())}
        yield {"what": "order of SDPA's ways", "is": str(torch._C._get_sdp_priority_order())}
        rounded = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
        yield {"what": "float32 products, convolutions", "is": str(rounded)}
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        yield {"what": "nvidia-smi", "is": found.stdout.strip()}


# ---- small runs
# --------------------------------------------------------------------------------------------------------


def _model(folder: Path, kind: str = "llama") -> str:
    if kind in ("llama", "qwen2", "qwen3", "mistral"):
        import tiny

        return str(tiny.save_model(folder / kind, kind=kind))
    if kind == "pictures":
        import seeing

        return seeing.save_seeing(folder / kind)
    from model_families import save_family

    return save_family(kind, folder / kind)


def _train(
    folder: Path,
    method: str,
    fields: dict[str, Any],
    *,
    kind: str = "llama",
    resume: bool = False,
    **arguments: Any,
) -> Row:
    """A run of three steps with the transformers engine, on this device. Returns its largest gap and its last loss."""
    sys.path.append(str(ROOT / "tests" / "run"))
    from methods import PROMPTS, by_length

    import lockstep

    config = getattr(lockstep, f"{method}Config")(output_dir=str(folder / "run"), **{**_SMALL, **fields})
    given = {"reward_funcs": by_length, "train_dataset": PROMPTS, **arguments}
    trainer = getattr(lockstep, f"{method}Trainer")(model=_model(folder, kind), args=config, **given)
    try:
        trainer.train(resume_from_checkpoint=resume or None)
        if "eval_strategy" in fields:
            trainer.evaluate()
        places = {p.device.type for p in trainer.model.parameters()}
        logs = [log for log in trainer.state.log_history if "loss" in log]
        gaps = [value for log in logs for name, value in log.items() if "gap" in name and "max" in name]
        return {"gap": max(gaps, default=None), "loss": logs[-1]["loss"], "device": "/".join(sorted(places))}
    finally:
        trainer.close()


def _lora() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def _saved_and_resumed(folder: Path) -> Row:
    saved = {**_GROUPS, "save_strategy": "steps", "save_steps": 2}
    _train(folder, "GRPO", {**saved, "max_steps": 2})
    return _train(folder, "GRPO", {**saved, "max_steps": 4}, resume=True)


def _evaluated(folder: Path) -> Row:
    sys.path.append(str(ROOT / "tests" / "run"))
    from methods import PROMPTS

    return _train(
        folder, "GRPO", {**_GROUPS, "eval_strategy": "steps", "eval_steps": 2}, eval_dataset=PROMPTS
    )


_FP32 = {"bf16": False}
# Mamba's config names no longest sequence.
_SHORT = {"vllm_max_model_length": 256}
RUNS: dict[str, Callable[[Path], Row]] = {
    "GRPO, bf16": lambda at: _train(at, "GRPO", _GROUPS),
    "GRPO, fp32": lambda at: _train(at, "GRPO", {**_GROUPS, **_FP32}),
    "GRPO, fp32 head": lambda at: _train(at, "GRPO", {**_GROUPS, "cast_lm_head_to_fp32": True}),
    "GRPO, beta, two iterations": lambda at: _train(
        at, "GRPO", {**_GROUPS, "beta": 0.1, "num_iterations": 2}
    ),
    "GRPO, filters": lambda at: _train(
        at, "GRPO", {**_GROUPS, "top_p": 0.9, "top_k": 20, "temperature": 0.8}
    ),
    "GRPO, min-p, penalty": lambda at: _train(
        at, "GRPO", {**_GROUPS, "min_p": 0.02, "repetition_penalty": 1.1}
    ),
    "GRPO, filters, fp32": lambda at: _train(at, "GRPO", {**_GROUPS, **_FP32, "top_p": 0.9, "top_k": 20}),
    "GRPO, entropy": lambda at: _train(at, "GRPO", {**_GROUPS, "entropy_coef": 0.01}),
    "GRPO, high entropies": lambda at: _train(at, "GRPO", {**_GROUPS, "top_entropy_quantile": 0.5}),
    "GRPO, checkpointing": lambda at: _train(at, "GRPO", {**_GROUPS, "gradient_checkpointing": True}),
    "GRPO, LoRA, beta": lambda at: _train(at, "GRPO", {**_GROUPS, "beta": 0.1}, peft_config=_lora()),
    "GRPO, fp32, TF32": lambda at: _train(at, "GRPO", {**_GROUPS, **_FP32, "tf32": True}),
    "GRPO, FlexAttention": lambda at: _train(
        at, "GRPO", {**_GROUPS, "model_init_kwargs": {"attn_implementation": "flex_attention"}}
    ),
    "GRPO, fused AdamW": lambda at: _train(at, "GRPO", {**_GROUPS, "optim": "adamw_torch_fused"}),
    "GRPO, deterministic": lambda at: _train(at, "GRPO", {**_GROUPS, "full_determinism": True}),
    "RLOO, beta": lambda at: _train(at, "RLOO", {**_GROUPS, "beta": 0.1}),
    "Online DPO": lambda at: _train(at, "OnlineDPO", _PAIRS),
    "PPO": lambda at: _train(at, "PPO", _ALONE),
    "REINFORCE++": lambda at: _train(at, "ReinforcePP", _ALONE),
    "saved and resumed": _saved_and_resumed,
    "evaluation": _evaluated,
    **{
        f"GRPO, {kind}": lambda at, kind=kind: _train(
            at, "GRPO", {**_GROUPS, **_SHORT, "beta": 0.1}, kind=kind
        )
        for kind in ("qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt2", "mamba")
    },
}


def runs(sizes: Sizes, part: int) -> Iterator[Row]:
    """A share of `RUNS`: three steps each with the transformers engine and all proofs."""
    chosen = list(RUNS)[part::_PARTS]
    for name in chosen if sizes.repeats > 1 else chosen[:1]:
        row: Row = {"run": name}
        with told(row), tempfile.TemporaryDirectory() as folder:
            row |= RUNS[name](Path(folder))
        give_memory_back()
        yield row


# Processes that share the runs.
_PARTS = 3


# ---- verify
# ------------------------------------------------------------------------------------------------------------


def proofs(sizes: Sizes) -> Iterator[Row]:
    """`lockstep verify` with the transformers engine on tiny models and on the shape of a real one."""
    kinds = ["pictures", "qwen3_moe", *(["shape"] if sizes.repeats > 1 else [])]
    for kind, dtype in itertools.product(kinds, sizes.dtypes):
        with tempfile.TemporaryDirectory() as folder:
            path = (
                save_model(sizes, Path(folder) / "shape") if kind == "shape" else _model(Path(folder), kind)
            )
            yield from _verified({"model": kind, "dtype": dtype}, path, "--vllm_max_model_length", "512")
        give_memory_back()


def faults(sizes: Sizes, number: int) -> Iterator[Row]:
    """`lockstep verify --self-test` on a tiny model: every fault must be caught here too.

    A row of counts, and one per miss.
    """
    dtype = sizes.dtypes[number]
    with tempfile.TemporaryDirectory() as folder:
        path, table, row = _model(Path(folder)), Path(folder) / "table.json", Row(dtype=dtype)
        with told(row):
            code = _verify(path, dtype, table, "--self-test")
            found = json.loads(table.read_text(encoding="utf-8"))
            row |= {
                "injected": found["injected"],
                "caught": found["caught"],
                "exit code": code,
                "passed": code == 0,
            }
    yield row
    for fault in [] if "failed" in row else found["faults"]:
        missed = fault["error"] or not (fault["caught_by"] or fault["skipped"] or fault["id"] == "-")
        if missed or (fault["id"] == "-" and fault["caught_by"]):
            yield {
                "dtype": dtype,
                "what": f"{fault['id']} {fault['way']}",
                "is": fault["message"][:300],
                "passed": False,
            }


def _verified(same: Row, model: str, *words: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        table, row = Path(folder) / "table.json", dict(same)
        with told(row):
            row |= {"proof": "exit code", "figure": _verify(model, same["dtype"], table, *words)}
        if table.exists():
            for found in json.loads(table.read_text(encoding="utf-8"))["rows"]:
                yield {**same, **{name: value for name, value in found.items() if name != "failed"}}
        yield row if "failed" in row else {**row, "passed": row["figure"] == 0}


def _verify(model: str, dtype: str, table: Path, *words: str) -> int:
    """Run `lockstep verify` with the transformers engine. Returns its exit code."""
    from lockstep.extras.verify.verify_command import run

    return run(["--model", model, "--engine", "transformers", "--dtype", dtype, "--json", str(table), *words])


# ---- waits -------------------------------------------------------------------------------------------------------


def waits(sizes: Sizes) -> Iterator[Row]:
    """Where the host waits for the GPU in the last of three steps, by line of Lockstep (counted by PyTorch)."""
    sys.path.append(str(ROOT / "tests" / "run"))
    from methods import PROMPTS, by_length
    from transformers import TrainerCallback

    import lockstep

    found: Counter[tuple[str, str]] = Counter()
    phase = {"name": "-"}
    counts = hasattr(torch._C, "_cuda_set_sync_debug_mode")
    _name_phases(phase)

    def seen(message: Any, category: type, filename: str, line: int, *_: Any) -> None:
        if "synchroniz" not in str(message):
            return
        own = [
            f for f in traceback.extract_stack() if "/lockstep/" in f.filename and "gpu_day" not in f.filename
        ]
        last = own[-1] if own else None
        place = f"{Path(filename).name}:{line}" if last is None else f"{_short(last.filename)}:{last.lineno}"
        if threading.current_thread() is not threading.main_thread():
            place = f"(thread) {place}"
        text = "" if last is None else linecache.getline(last.filename, last.lineno or 0).strip()[:60]
        found[phase["name"], f"{place}  {text}"] += 1

    class Switch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and counts:
                torch.cuda.set_sync_debug_mode("warn")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if counts:
                torch.cuda.set_sync_debug_mode("default")

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen  # type: ignore[assignment]
        fields = {**_SMALL, **_GROUPS, "per_device_train_batch_size": 8, "num_generations": 8}
        fields |= {"max_completion_length": 128 if sizes.repeats > 1 else 8}
        config = lockstep.GRPOConfig(output_dir=f"{folder}/run", **fields)
        model = save_model(sizes, Path(folder) / "model")
        trainer = lockstep.GRPOTrainer(model, by_length, config, PROMPTS, callbacks=[Switch()])
        try:
            trainer.train()
        finally:
            trainer.close()
    phases: Counter[str] = Counter()
    for (name, _), count in found.items():
        phases[name] += count
    for name, count in phases.most_common():
        yield {"phase": name, "place": "all", "waits": count}
    for (name, place), count in found.most_common(60):
        yield {"phase": name, "place": place, "waits": count}


def _name_phases(phase: dict[str, str]) -> None:
    """Keep the name of the run's current phase."""
    from lockstep.report.phases import PhaseClock

    start, stop = PhaseClock.start, PhaseClock.stop

    def started(self: Any, name: str) -> None:
        phase["name"] = name
        start(self, name)

    def stopped(self: Any, name: str) -> None:
        stop(self, name)
        phase["name"] = "-"

    PhaseClock.start, PhaseClock.stop = started, stopped  # type: ignore[method-assign]


def _short(filename: str) -> str:
    return filename.split("/lockstep/")[-1]


# ---- groups of processes, streams
# --------------------------------------------------------------------------------------


def groups(sizes: Sizes) -> Iterator[Row]:
    """NCCL with one rank: a sum as FSDP asks for it, and two steps of a sharded run."""
    import torch.distributed as dist

    row: Row = {"what": "NCCL: PREMUL_SUM of one rank"}
    with told(row):
        backend = "nccl" if device().type == "cuda" else "gloo"
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
            values = {}
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                part = torch.ones(8, device=device(), dtype=dtype)
                sum_of = (
                    torch.distributed._make_nccl_premul_sum(1.0) if backend == "nccl" else dist.ReduceOp.SUM
                )
                try:
                    dist.all_reduce(part, op=sum_of)
                    values[str(dtype)] = float(part.sum())
                except Exception as error:  # noqa: BLE001 - a dtype that NCCL refuses is the result
                    values[str(dtype)] = f"{type(error).__name__}: {str(error)[:100]}"
            dist.destroy_process_group()
        row["is"] = str(values)
    yield row
    row = {"what": "torchrun, one rank, fsdp: two steps"}
    with told(row), tempfile.TemporaryDirectory() as folder:
        program = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "run")!r}]
from torch.distributed.fsdp import FSDPModule
if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    # An older PyTorch: one rank has all gradients.
    FSDPModule.set_reduce_scatter_unused_params = lambda self, wanted: None
from benchmarks.gpu_day import broken
print("FOUND", broken._train(Path({folder!r}), "GRPO", {{**broken._GROUPS, "max_steps": 2, "fsdp": True}}))
"""
        (Path(folder) / "program.py").write_text(program, encoding="utf-8")
        # The flag of a machine without a GPU is torchrun's own: gloo.
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "1",
            f"{folder}/program.py",
        ]
        ended = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=150, check=False
        )
        print(ended.stdout[-3000:], ended.stderr[-6000:], flush=True)
        kept = [line for line in ended.stdout.splitlines() if line.startswith("FOUND")]
        row |= {"is": kept[0] if kept else f"exit code {ended.returncode}", "passed": bool(kept)}
    yield row


def order(sizes: Sizes) -> Iterator[Row]:
    """Digests of tensors that another stream has just written, against digests after a wait."""
    from lockstep.contract.tensors import begin_specs, one_push, tensor_digest, tensor_specs

    if device().type != "cuda":
        yield {"what": "digests after a side stream", "is": "needs streams of a GPU"}
        return
    stream, wrong, tries = torch.cuda.Stream(), 0, 40 if sizes.repeats > 1 else 2
    side = 4096 if sizes.repeats > 1 else 64
    blank = torch.ones(side, side, device="cuda")
    for number in range(tries):
        torch.cuda.synchronize()
        with one_push(number), torch.cuda.stream(stream):
            part = torch.zeros(1 << 20, device="cuda")
            for _ in range(30):
                blank = (blank @ blank).clamp(-1, 1)
            part.add_(number + 1.0)
            begun, host = begin_specs([("part", part)]), tensor_digest(part)
        # The digest is asked for on another stream than that on which it was begun.
        found = begun()
        torch.cuda.synchronize()
        wrong += found != tensor_specs([("part", part)], {"part": found[0]}) or host != tensor_digest(part)
    yield {"what": "digests after a side stream", "is": f"{wrong} of {tries} wrong", "passed": not wrong}


# ---- the suite
# ---------------------------------------------------------------------------------------------------------

_FOLDERS = (
    "parity",
    "sync",
    "models",
    "engines",
    "training",
    "contract",
    "faults",
    "verify",
    "rollouts",
    "algorithms",
)
_FOLDERS += ("images", "shards", "tokens", "tasks", "environments")


def suite(sizes: Sizes) -> Iterator[Row]:
    """The project's own tests on this device, without vLLM, by outcome; each failure with its innermost line of ours.

    The variable `GPU_DAY_TESTS` may name a file with one test per line; then only these run.
    """
    full, chosen = sizes.repeats > 1, os.environ.get("GPU_DAY_TESTS")
    folders = [f"tests/{name}" for name in _FOLDERS] if full else ["tests/algorithms"]
    folders = [f"@{chosen}"] if chosen else folders
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "benchmarks.gpu_day.failures",
        ]
        command += ["-m", "not vllm and not long and not release", "--timeout", "90", "--dist", "loadfile"]
        command += ["-n", "11" if full else "0", "--tb", "short", "-o", "addopts=", *folders]
        environment = {**os.environ, "GPU_DAY_FAILURES": str(results), "OMP_NUM_THREADS": "1"}
        with (Path(folder) / "log").open("w", encoding="utf-8") as log:
            try:
                limit = _SUITE_SECONDS if full else 500
                code: Any = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                code = "stopped at its limit"
        print((Path(folder) / "log").read_text(encoding="utf-8")[-3000:], flush=True)
        rows = (
            [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
            if results.exists()
            else []
        )
        yield {"what": "exit", "is": str(code)}
        counted = Counter(row["outcome"] for row in rows)
        yield {"what": "tests", "is": ", ".join(f"{count} {name}" for name, count in counted.most_common())}
        yield from (row for row in rows if row["outcome"] == "failed")


_SUITE_SECONDS = 190
