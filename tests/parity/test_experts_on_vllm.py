"""A mixture of experts on real vLLM: pushed, probed expert by expert, trained, and refused where experts were not packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import needs_vllm
from model_families import save_family
from stages import stage_on

from lockstep.errors import ProofError
from lockstep.verify.faults.weights import FAULTS
from lockstep.verify.stage import Stage

pytestmark = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("experts")
    model = save_family("qwen3_moe", folder / "model")
    with stage_on(model, folder / "run", use_vllm=True, bf16=False, router_aux_loss_coef=0.0) as opened:
        yield opened


def test_after_a_push_experts_compute_what_was_sent(stage: Stage) -> None:
    with stage.moved(0.05, seed=1):
        record = stage.push(every_module=True)
        gap = stage.gap(stage.sample(stage.sampling()), stage.sampling())
    assert record.unreached == ()
    assert sum(".experts." in name for name in record.errors) == 2 * 4 * 3
    assert gap.max_abs < 1e-4


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_one_wrong_expert_is_named(stage: Stage, part: str) -> None:
    experts = stage.model.get_submodule("model.layers.1.mlp.experts")
    stage.push(every_module=True)
    with torch.no_grad():
        getattr(experts, part)[2] *= 1.01
    try:
        failed = stage.trainer.proofs.probe.measure(3, every=True).failed
    finally:
        with torch.no_grad():
            getattr(experts, part)[2] /= 1.01
    assert {name.rsplit(".", 2)[0] for name in failed} == {"model.layers.1.mlp.experts.2"}


def test_experts_learn_with_every_proof(stage: Stage) -> None:
    before = {name: p.detach().clone() for name, p in stage.model.named_parameters()}
    stage.learn(2)
    moved = {name for name, p in stage.model.named_parameters() if not torch.equal(p, before[name])}
    with torch.no_grad():
        for name, p in stage.model.named_parameters():
            p.copy_(before[name])
    assert {name for name in before if ".experts." in name} <= moved


def test_experts_that_an_update_leaves_unpacked_are_found(stage: Stage) -> None:
    (fault,) = [f for f in FAULTS if f.id == "W10"]
    assert fault.needs(stage) == ""
    with (
        stage.moved(0.05, seed=2),
        fault.inject(stage),
        pytest.raises(ProofError, match=r"module_probe.*experts\.\d\.gate_proj"),
    ):
        stage.push(every_module=True)
