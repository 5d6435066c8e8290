"""Weights that are old or off by less than outputs show stop a run: at once, in its middle, and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from tiny import CONTEXT

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.contract.tensors import LoadedWeights, tensor_specs
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import ProofError
from lockstep.tokens.chat import load_tokenizer

Weights = dict[str, torch.Tensor]
PROMPTS = Dataset.from_list([{"prompt": f"what is {i} + {i}"} for i in range(4)])
LAYER, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"


def one_element(sent: Weights, before: Weights, dtype: torch.dtype) -> Weights:
    if LAYER not in sent:
        return {}
    held = sent[LAYER].to(dtype, copy=True)
    held.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)[7] += 1
    return {LAYER: held.to(sent[LAYER].dtype)}


def late_layer(sent: Weights, before: Weights, dtype: torch.dtype) -> Weights:
    return {name: before[name] for name in sent if ".layers.1." in name and name in before}


def late_norm(sent: Weights, before: Weights, dtype: torch.dtype) -> Weights:
    return {NORM: before[NORM]} if NORM in sent and NORM in before else {}


def everything_kept(sent: Weights, before: Weights, dtype: torch.dtype) -> Weights:
    return {name: before.get(name, tensor) for name, tensor in sent.items()}


@contextmanager
def loads_from(
    engine: Any, version: int, change: Callable[..., Weights], dtype: torch.dtype
) -> Iterator[None]:
    """From the push of a version on, the engine loads something else, and acknowledges what was sent."""
    real, loads, before = engine.load, iter(range(version + 100)), Weights()

    def load(tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        sent = dict(tensors)
        specs = {spec.name: spec for spec in tensor_specs(list(sent.items()))}
        other = change(sent, dict(before), dtype) if next(loads) >= version else {}
        found = real(list((sent | other).items()), base)
        before.update({name: tensor.detach().clone() for name, tensor in sent.items()})
        return LoadedWeights(
            tuple(specs.get(spec.name, spec) for spec in found.tensors),
            found.untouched,
            unstored=found.unstored,
        )

    with patch.object(engine, "load", load):
        yield


def train(model: str, folder: Path, engine: Any, rate: float, steps: int, **more: Any) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=steps,
        learning_rate=rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=1,
        bf16=engine.model.dtype == torch.bfloat16,
        disable_tqdm=True,
        report_to="none",
    )
    run = GRPOTrainer(
        model,
        lambda completions, **_: [sum(map(ord, c)) % 97 / 97 for c in completions],
        config,
        PROMPTS,
        engine=engine,
    )
    run.train(**more)
    return run


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def engine(request: pytest.FixtureRequest, untied_dir: str) -> Any:
    return TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=request.param, max_model_len=CONTEXT
    )


# Each fault with each dtype; each time of its begin with each dtype, and with at least two faults.
CASES = [
    (one_element, {"fp32": 1, "bf16": 3}),
    (late_layer, {"fp32": 3, "bf16": "resume"}),
    (late_norm, {"fp32": "resume", "bf16": 1}),
    (everything_kept, {"fp32": 3, "bf16": 1}),
]


@pytest.mark.parametrize(
    ("change", "begins"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.release) for case in CASES[2:])],
    ids=[change.__name__ for change, _ in CASES],
)
def test_a_run_stops_on_weights_that_no_output_shows(
    change: Callable[..., Weights], begins: dict[str, Any], untied_dir: str, tmp_path: Path, engine: Any
) -> None:
    dtype = engine.model.dtype
    # Steps so small that the module probe and the gap see nothing: in bf16 some elements move by one step.
    rate, when = (1e-6, begins["fp32"]) if dtype == torch.float32 else (3e-4, begins["bf16"])
    more = {}
    if when == "resume":
        train(untied_dir, tmp_path, engine, rate, steps=2)
        more, when = {"resume_from_checkpoint": True}, 1
    # A push of the start, and one per step; and as many more as a model of two layers needs.
    with loads_from(engine, when, change, dtype), pytest.raises(ProofError) as failed:
        train(untied_dir, tmp_path, engine, rate, steps=14, **more)
    assert failed.value.check == "held_weights"
    named = {one_element: LAYER, late_layer: "model.layers.1.", late_norm: NORM, everything_kept: "model."}
    assert named[change] in failed.value.found
    if change is not one_element:
        assert "the engine computes with older weights of " in failed.value.cause
