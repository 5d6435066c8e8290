"""A number that a module computes with stays as it is while a run goes on, unless a callback changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from methods import FIELDS, StopAfter, by_length, lora, make
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.watch.receipt import read_receipt


def twice_the_adapter(run: Any) -> None:
    for module in run.model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] *= 2


def one_layer_of_the_adapter(run: Any) -> None:
    run.model.base_model.model.model.layers[1].mlp.up_proj.scaling["default"] *= 1.001


def epsilon_of_a_norm(run: Any) -> None:
    run.model.get_decoder().norm.variance_epsilon *= 1.5


def attention_scale(run: Any) -> None:
    run.model.get_decoder().layers[1].self_attn.scaling *= 1.0001


def attention_dropout(run: Any) -> None:
    run.model.get_decoder().layers[0].self_attn.attention_dropout = 0.1


ADAPTED = (twice_the_adapter, one_layer_of_the_adapter)
# Each pair of values of two columns occurs.
CASES = [
    (twice_the_adapter, False, "first"),
    (twice_the_adapter, True, "middle"),
    (twice_the_adapter, True, "resume"),
    (one_layer_of_the_adapter, True, "first"),
    (one_layer_of_the_adapter, False, "middle"),
    (one_layer_of_the_adapter, False, "resume"),
    (epsilon_of_a_norm, False, "middle"),
    (attention_scale, True, "resume"),
    (attention_dropout, True, "first"),
    (attention_dropout, False, "middle"),
]


def run_of(model: str, folder: Path, engine: Engine, fault: Any, bf16: bool, **more: Any) -> Any:
    own: dict[str, Any] = {"bf16": True, "use_vllm": False} if bf16 else {}
    saved = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    if fault in ADAPTED:
        more["peft_config"] = lora()
    given: Any = None if bf16 else engine
    return make("GRPO", model, folder, given, {**FIELDS["GRPO"], **saved, **own}, **more)


@pytest.mark.parametrize(("fault", "bf16", "when"), CASES, ids=[f"{f.__name__}-{b}-{w}" for f, b, w in CASES])
def test_a_setting_that_changes_outside_of_a_callback_stops_the_run_at_once(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, fault: Any, bf16: bool, when: str
) -> None:
    at = {"first": 1, "middle": 3, "resume": 2}[when]
    runs: list[Any] = []

    def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
        # Faults of a resumed run come with its second generation: what the first one finds is taken.
        if runs and runs[0].state.global_step == at + (when == "resume"):
            fault(runs.pop())
        return by_length(completion_ids, **more)

    how = {}
    run = run_of(untied_dir, tmp_path, hf_engine, fault, bf16, reward_funcs=reward)
    if when == "resume":
        run.add_callback(StopAfter(2))
        run.train()
        run = run_of(untied_dir, tmp_path, hf_engine, fault, bf16, reward_funcs=reward)
        how = {"resume_from_checkpoint": True}
    runs.append(run)
    with pytest.raises(ProofError, match=r"setting \w+ of .* in place of") as error:
        run.train(**how)
    assert (error.value.check, run.state.global_step) == ("hooks", at + (when == "resume"))


class AtTwo(TrainerCallback):
    def __init__(self, work: Any) -> None:
        self._work = work

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._work()


def test_a_setting_that_a_callback_changes_is_taken_and_noted(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = run_of(untied_dir, tmp_path, hf_engine, one_layer_of_the_adapter, False)
    run.add_callback(AtTwo(lambda: one_layer_of_the_adapter(run)))
    run.train()
    assert run.state.global_step == 4
    (line,) = (line for line in read_receipt(tmp_path / "receipt.jsonl") if line["kind"] == "hooks")
    assert "setting scaling of" in line["taken"][0]
