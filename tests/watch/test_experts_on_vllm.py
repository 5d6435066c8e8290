"""Experts on real vLLM: pushed, probed one by one, trained and routed alike, and refused if unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from conftest import needs_vllm
from model_families import save_family
from stages import stage_on

from benchmarks.proofs.expert_routing import measured_on
from lockstep.contract.distribution import Distribution
from lockstep.errors import ProofError
from lockstep.extras.selftest.weight_faults import WEIGHT_FAULTS
from lockstep.extras.verify.stage import Stage
from lockstep.watch.gap_explained import Decomposition, decompose
from lockstep.watch.tolerances import tolerance

pytestmark = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("experts")
    model = save_family("qwen3_moe", folder / "model")
    with stage_on(model, folder / "run", use_vllm=True, bf16=False, router_aux_loss_coef=0.1) as opened:
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
    assert {name for name in before if ".experts." in name or name.endswith("mlp.gate.weight")} <= moved
    noted = stage.trainer.step_log.noted["aux_loss"]
    assert len(noted) == 2
    assert min(noted) > 1


def test_experts_that_an_update_leaves_unpacked_are_found(stage: Stage) -> None:
    (fault,) = [f for f in WEIGHT_FAULTS if f.id == "W10"]
    assert fault.needs(stage) == ""
    with (
        stage.moved(0.05, seed=2),
        fault.inject(stage),
        pytest.raises(ProofError, match=r"module_probe.*experts\.\d\.gate_proj"),
    ):
        stage.push(every_module=True)


def test_in_fp32_vllm_chooses_the_trainers_experts_for_every_token(stage: Stage) -> None:
    stage.push(every_module=True)
    found = measured_on(stage, samples=1)
    assert found.differing == 0
    assert found.tokens == len(found.gaps) > 10
    assert float((found.gaps - found.replayed).abs().max()) < 1e-5


def explained(stage: Stage) -> Decomposition:
    """The explanation of a completion with a wrong log-prob."""
    first = stage.sample(stage.sampling())[0]
    wrong = replace(first, logprobs=(*first.logprobs[:-1], first.logprobs[-1] - 3))
    single = tolerance(torch.float32, torch.float32)
    distribution, probes = Distribution(stage.sampling()), stage.trainer.proofs.push.probes
    return decompose(
        stage.model, stage.engine, [wrong], distribution, stage.precision, probes, stage.version, single
    )


def test_in_bf16_a_gap_names_routing_and_in_fp32_it_does_not(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stage.push(every_module=True)
    assert "routing" not in explained(stage).cause
    folder = tmp_path_factory.mktemp("experts-bf16")
    # With many experts, some are always close to the border.
    model = save_family("qwen3_moe", folder / "model", num_experts=32, num_experts_per_tok=8)
    with stage_on(model, folder / "run", use_vllm=True, bf16=True) as half:
        half.push(every_module=True)
        found = explained(half)
    assert found.layers == ()
    assert "or routing: rounding to half precision alone sends" in found.cause
    assert "set bf16=false" in found.fix
