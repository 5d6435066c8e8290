"""LoRA and QLoRA with every method: only the adapter changes, every token is proven, a resumed run is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods import FIELDS, logs, lora, make, parameters
from transformers import BitsAndBytesConfig

from lockstep.contract.protocol import Engine
from lockstep.models.quantised import is_quantised
from lockstep.weights.push import weights_of

# Methods that can have a reference have one: the model without the adapter.
METHODS = {
    method: fields if method == "OnlineDPO" else {**fields, "beta": 0.1} for method, fields in FIELDS.items()
}
BASES: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "QLoRA": {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_adapter_alone_moves_and_a_stopped_run_goes_on_to_the_bit(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, base: str
) -> None:
    def run(folder: str, **fields: Any) -> Any:
        given = {**METHODS[method], "max_steps": 4, **fields}
        return make(
            method, untied_dir, tmp_path / folder, hf_engine, given, peft_config=lora(), **BASES[base]
        )

    whole = run("whole", save_strategy="steps", save_steps=2)
    assert any(is_quantised(p) for p in whole.model.parameters()) == (base == "QLoRA")
    before, pushed_before = parameters(whole.model), dict(weights_of(whole.model))
    whole.train()
    after, pushed = parameters(whole.model), dict(weights_of(whole.model))
    moved = {name for name, old in before.items() if not torch.equal(after[name], old)}
    assert moved == {name for name, p in whole.model.named_parameters() if p.requires_grad} != set()
    assert any(not torch.equal(pushed_before[name], tensor) for name, tensor in pushed.items())
    assert len(logs(whole)) == 4
    assert all(log["parity/max_abs_gap"] < 1e-3 and log["parity/checked_tokens"] > 0 for log in logs(whole))

    again = run("whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    resumed = {**parameters(again.model), **parameters(again.critic)}
    expected = {**after, **parameters(whole.critic)}
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
