"""Run a step of GRPO with Liger's kernels and one without, from the same start. Print one JSON line.

Run with TRITON_INTERPRET=1, with which a CPU runs the same kernels as a GPU.

Triton 3.9's interpreter does not accept Python floats where a kernel expects a scalar, and it cannot call the GPU's
own `rsqrt`. This script adds both to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "run"), str(Path(__file__).parents[1])]

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from methods import GROUPS, make, parameters
from tiny import CONTEXT
from transformers import AutoModelForCausalLM
from triton.runtime import interpreter

from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.tokens.chat import load_tokenizer


def let_the_interpreter_run_them() -> None:
    plain = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(
                interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32
            )
        return plain(argument)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)


def trained(path: str, folder: Path, **fields: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The weights after a step, and the trainer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = TransformersEngine(path, load_tokenizer(path), dtype=torch.float32, max_model_len=CONTEXT)
    # SGD is used because AdamW's first steps depend on the sign of a gradient, even of one that is only rounding.
    fields |= {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "beta": 0.1}
    run = make("GRPO", model, folder, engine, {**GROUPS, **fields})
    run.train()
    return parameters(run.model), run


def main() -> None:
    path, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    let_the_interpreter_run_them()
    start = parameters(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    # The run without Liger comes first, because Liger replaces the rotary embedding of all models of a kind.
    plain, _ = trained(path, folder / "plain")
    with_kernels, run = trained(path, folder / "liger", use_liger_kernel=True)
    layer = run.model.model.layers[0]
    print(
        json.dumps(
            {
                "apart": max(
                    float((with_kernels[name] - plain[name]).norm() / (plain[name] - start[name]).norm())
                    for name in plain
                ),
                "kernels": [
                    str(part.forward.__func__.__module__)
                    for part in (run.model.model.norm, layer.input_layernorm, layer.mlp)
                ],
                "rotary": sys.modules[type(run.model).__module__].apply_rotary_pos_emb.__module__,
                "gap": max(log["parity/max_abs_gap"] for log in run.state.log_history if "loss" in log),
            }
        )
    )


if __name__ == "__main__":
    main()
