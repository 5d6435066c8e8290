"""Every method resumes to the bit; a checkpoint without a method's file is refused by the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods
import pytest
import torch
from methods import ALONE, GROUPS, INTERRUPTED, PAIRS, StopAfter, logs, lora, parameters, reference_of
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.models.policy import load_policy
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.watch.receipt import RECEIPT, read_receipt

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO whose reference follows": (
        "GRPO",
        {**GROUPS, "beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    "GRPO with adaptive entropy": (
        "GRPO",
        {
            **GROUPS,
            "use_adaptive_entropy": True,
            "entropy_coef": 0.1,
            "entropy_target": 3.0,
            "entropy_coef_delta": 0.03,
        },
    ),
    "GRPO, adapter, KL": ("GRPO", {**GROUPS, "beta": 0.2, "num_iterations": 2}),
    "GRPO, interrupted": ("GRPO", {**GROUPS, **INTERRUPTED, "max_completion_length": 16}),
    "RLOO": ("RLOO", GROUPS),
    "Online DPO, a beta an epoch": ("OnlineDPO", {**PAIRS, "beta": [0.5, 0.1]}),
    "REINFORCE++": ("ReinforcePP", ALONE),
    "PPO": ("PPO", {**ALONE, "num_iterations": 2, "vf_coef": 1.0}),
}
EXTRA = {
    "GRPO whose reference follows": "reference.safetensors",
    "GRPO with adaptive entropy": "objective.json",
    "PPO": "value_head.safetensors",
}


Make = Callable[..., Any]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine) -> Make:
    def made(case: str, folder: Path, **changes: Any) -> Any:
        method, fields = CASES[case]
        arguments = {"peft_config": lora()} if "adapter" in case else {}
        saves = {"save_strategy": "steps", "save_steps": 2}
        return methods.make(
            method, untied_dir, folder, hf_engine, {**saves, **fields, **changes}, **arguments
        )

    return made


def weights(run: OnlineTrainer) -> dict[str, torch.Tensor]:
    parts = {"policy": run.model, "critic": run.critic, "reference": reference_of(run)}
    return {f"{part}.{name}": p for part, module in parts.items() for name, p in parameters(module).items()}


def proofs(folder: Path) -> list[dict[str, Any]]:
    """The steps of a receipt without the hashes of the chain, because a resumed run has one more line."""
    steps = [entry for entry in read_receipt(folder / RECEIPT) if entry["kind"] == "step"]
    return [{k: v for k, v in entry.items() if k not in ("hash", "previous")} for entry in steps]


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(make: Make, tmp_path: Path, case: str) -> None:
    whole = make(case, tmp_path / "whole")
    whole.train()
    expected = weights(whole)
    stopped = make(case, tmp_path / "cut")
    before = weights(stopped)
    stopped.add_callback(StopAfter(2))
    stopped.train()
    assert stopped.state.global_step == 2
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    resumed = make(case, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    found = weights(resumed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert logs(resumed) == logs(whole)
    assert proofs(tmp_path / "cut") == proofs(tmp_path / "whole")
    # Everything that is compared has changed at both times.
    halfway = weights(stopped)
    for part in {name.split(".")[0] for name in expected} - (set() if "follows" in case else {"reference"}):
        for one, other in ((before, halfway), (halfway, expected)):
            assert any(not torch.equal(one[n], other[n]) for n in one if n.startswith(part)), part
    written = {path.name for path in checkpoint.iterdir()} & set(EXTRA.values())
    assert written == ({EXTRA[case]} if case in EXTRA else set())


@pytest.mark.parametrize("case", sorted(EXTRA))
def test_a_checkpoint_without_the_methods_file_is_refused_by_name(
    make: Make, tmp_path: Path, case: str
) -> None:
    make(case, tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / EXTRA[case]).unlink()
    with pytest.raises(InputError, match=rf"checkpoint-2 has no {EXTRA[case]}"):
        make(case, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_adaptive_entropy_moves_its_coefficient_before_and_after_a_resume(make: Make, tmp_path: Path) -> None:
    case = "GRPO with adaptive entropy"
    make(case, tmp_path, max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "objective.json").read_text())
    run = make(case, tmp_path, max_steps=4)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    coefficients = [log["entropy_coef"] for log in logs(run)]
    assert state["entropy_coef"] == coefficients[1]
    assert len(set(coefficients)) > 2


def test_the_value_heads_gradient_is_one_steps_alone(make: Make, tmp_path: Path) -> None:
    seen: list[list[torch.Tensor]] = []

    class AtStepEnd(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([p.grad for p in run.critic.parameters() if p.grad is not None])  # type: ignore[union-attr]

    run = make("PPO", tmp_path, save_strategy="no")
    run.add_callback(AtStepEnd())
    run.train()
    assert len(seen) == 6
    assert not any(float(gradient.abs().max()) for gradients in seen for gradient in gradients)


def test_an_optimizer_of_the_users_own_trains_the_value_head_too(
    tmp_path: Path, untied_dir: str, hf_engine: Engine
) -> None:
    model = load_policy(untied_dir)
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    fields = {**CASES["PPO"][1], "max_steps": 2}
    run = methods.make("PPO", model, tmp_path, hf_engine, fields, optimizers=(own, None))
    run.train()
    assert float(run.critic.weight.detach().abs().max()) > 0
    assert run.optimizer.param_groups[-1]["initial_lr"] == pytest.approx(0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1e-3))
    run = methods.make("PPO", model, tmp_path, hf_engine, fields, optimizers=(scheduler.optimizer, scheduler))
    with pytest.raises(InputError, match=r"optimizers=\(optimizer, None\)"):
        run.train()
