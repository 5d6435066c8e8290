"""Count false alarms: how often a proof stops a clean sync of the real model, or a clean training step, with every proof on.

    make false-alarms       (500 syncs of the 135M model, 500 steps of a tiny one, real vLLM; a quarter of an hour on two cores)

Before each sync every weight changes by 1e-3 of its size. After the sync all modules are probed and the canary is scored. The steps
are those of a `GRPOTrainer` that learns. The program prints the alarms, and the largest figure of each proof beside its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# The tiny model is the one that the tests make.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--syncs", type=int, default=500)
    words.add_argument("--steps", type=int, default=500)
    words.add_argument("--model", default="smollm2-135m-instruct")
    words.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    words.add_argument("--json", type=Path, default=Path("runs/bench/false_alarms.json"))
    asked = words.parse_args()
    from lockstep.cli.quiet import quiet_libraries

    quiet_libraries()
    found: dict[str, Any] = {}
    if asked.syncs:
        found["syncs"] = clean_syncs(asked.model, asked.syncs, asked.dtype)
    if asked.steps:
        found["steps"] = clean_steps(asked.steps, asked.dtype)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"dtype": asked.dtype, **found}, indent=1) + "\n")


def clean_syncs(model: str, count: int, dtype: str) -> dict[str, float]:
    """Push changed weights; after each push probe every module and score the canary."""
    from lockstep.errors import ProofError
    from lockstep.parity.canary import score_canary
    from lockstep.parity.gap import over_limits
    from lockstep.parity.tolerances import probe_limit
    from lockstep.verify.stage import open_stage, stage_config

    worst = {"module_probe": 0.0, "canary_mean": 0.0, "canary_max": 0.0, "canary_k3": 0.0}
    alarms, noise = 0, torch.randn(1 << 21)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_stage(model, stage_config(folder, bf16=dtype == "bfloat16")) as stage,
    ):
        proofs, context = stage.trainer.proofs, stage.engine.settings().max_model_len
        for done in range(count):
            _nudge(stage.model, noise, done)
            try:
                probed = stage.push(every_module=True)
            except ProofError as error:
                alarms += 1
                print(error, flush=True)
                continue
            gap = score_canary(stage.model, stage.engine, context, stage.precision)
            figures = (probed.worst[1], gap.mean_abs, gap.max_abs, gap.k3)
            alarms += bool(over_limits(gap, proofs.limit))
            worst = {name: max(old, new) for (name, old), new in zip(worst.items(), figures, strict=True)}
            _progress("syncs", done + 1, count)
        limits = (probe_limit(proofs.engine_dtype), proofs.limit.mean, proofs.limit.max, proofs.limit.k3)
    print(
        f"{count} clean syncs of {model}, {dtype}: {alarms} alarms; largest figures: {_against(worst, limits)}",
        flush=True,
    )
    return {"count": count, "alarms": alarms, **worst}


def _nudge(model: torch.nn.Module, noise: torch.Tensor, turn: int) -> None:
    """Change every weight by 1e-3 of its tensor's mean size. This is cheaper than fresh noise, and no two changes are equal."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            shifted = noise.roll(7919 * turn + 104729 * i).repeat(-(-p.numel() // len(noise)))
            p += 1e-3 * p.abs().mean() * shifted[: p.numel()].view_as(p)


def clean_steps(count: int, dtype: str) -> dict[str, float]:
    """Train a tiny model on real vLLM. An alarm would end the run."""
    import datasets
    from tiny import save_model
    from transformers import PrinterCallback

    from lockstep.training.trainers.grpo import GRPOTrainer
    from lockstep.verify.stage import stage_config

    with tempfile.TemporaryDirectory() as folder:
        model = str(save_model(Path(folder) / "model", kind="llama", tied=True))
        changes = {"max_steps": count, "learning_rate": 1e-4, "logging_steps": 1, "disable_tqdm": True}
        config = stage_config(folder, bf16=dtype == "bfloat16", shuffle_dataset=True, **changes)
        data = datasets.Dataset.from_dict({"prompt": [f"what is {i} + {7 * i}" for i in range(60)]})
        trainer = GRPOTrainer(model, _alternating, config, data)
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            trainer.close()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        limit = trainer.proofs.limit
    worst = {name: max(entry[f"parity/{name}"] for entry in logs) for name in ("mean_abs_gap", "max_abs_gap", "k3")}
    tokens = sum(entry["parity/checked_tokens"] for entry in logs)
    limits = (limit.mean, limit.max, limit.k3)
    print(
        f"{len(logs)} clean steps, {tokens:.0f} tokens, {dtype}: 0 alarms; largest figures: {_against(worst, limits)}",
        flush=True,
    )
    return {"count": len(logs), "alarms": 0, "tokens": tokens, **worst}


def _alternating(completions: list, **columns: Any) -> list[float]:
    return [float(len(completion) % 2) for completion in completions]


def _against(worst: dict[str, float], limits: tuple[float, ...]) -> str:
    return ", ".join(
        f"{name} {value:.2g} of {limit:g}" for (name, value), limit in zip(worst.items(), limits, strict=True)
    )


def _progress(what: str, done: int, of: int) -> None:
    if done % 50 == 0:
        print(f"  {done} of {of} {what}", flush=True)


if __name__ == "__main__":
    main()
