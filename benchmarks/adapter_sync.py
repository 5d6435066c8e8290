"""Compare a push of a merged adapter with a push without an adapter: packaged model, LoRA of rank 16 on every linear layer.

    python benchmarks/adapter_sync.py

Prints the seconds of each part (median of five). The engine is the transformers engine, in fp32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import peft
import torch

from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.models.adapters import add_adapter
from lockstep.models.policy import load_policy
from lockstep.models.resolve import resolve_model
from lockstep.parity.module_probe import ModuleProbe
from lockstep.sync.adapters import weights_of
from lockstep.sync.changes import Update
from lockstep.sync.push import push_weights
from lockstep.tokens.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """Median of a few runs."""
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    path = resolve_model(MODEL)
    engine = TransformersEngine(path, load_tokenizer(path), dtype=torch.float32, max_model_len=256)
    config = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    for name in ("plain", "adapted"):
        model = load_policy(path, None)
        if name == "adapted":
            model = add_adapter(model, config)
        probe = ModuleProbe(model, engine, torch.float32)
        parts = {
            "reading every tensor": lambda model=model: [None for _ in weights_of(model)],
            "the manifest": lambda model=model: weights_of(model).manifest(0),
            "a whole push": lambda model=model: push_weights(model, engine, 1),
            "a sampled probe": lambda probe=probe: probe.measure(1, every=False),
            "a full probe": lambda probe=probe: probe.measure(1, every=True),
        }
        print(f"{name}: {Update(weights_of(model)).bytes / 2**20:.0f} MiB")
        for part, work in parts.items():
            print(f"  {part}: {seconds(work):.3f} s")


if __name__ == "__main__":
    main()
