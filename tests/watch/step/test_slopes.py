"""The derivatives of a loss by its log-probs: those of many completions at once are those of each completion alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import ProofError
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.learn.methods.objective import Tally, TokenBatch
from lockstep.learn.methods.online_dpo import OnlineDPOConfig, OnlineDPOObjective
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.watch.loss_gradient import LossGradient, Tokens, by_logps, check

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1},
    "corrected by token": {"vllm_importance_sampling_mode": "token_mask"},
    "corrected by sequence": {"vllm_importance_sampling_mode": "sequence_mask"},
    "one ratio per completion": {"importance_sampling_level": "sequence"},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "vespo": {"loss_type": "vespo"},
    "sapo": {"loss_type": "sapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}


def completions() -> list[Tokens]:
    """Three completions of different lengths, weights and signs."""
    draw = np.random.default_rng(0)

    def one(name: str, length: int, sign: float, weight: float) -> Tokens:
        logps, moved = -draw.exponential(2.0, length), draw.normal(0.0, 0.3, (3, length))
        return Tokens(
            name=name,
            weight=weight,
            logps=logps,
            old_logps=logps + moved[0],
            behaviour=logps + moved[1],
            advantages=np.full(length, sign),
            kept=(draw.random(length) < 0.8).astype(np.float64),
            ref_logps=logps + moved[2],
        )

    return [one("a", 5, 1.0, 0.2), one("b", 9, -0.7, 0.05), one("c", 1, 0.4, 0.5)]


@pytest.mark.parametrize("case", SETTINGS)
def test_the_derivatives_of_a_completion_depend_on_no_other_completion(case: str, tmp_path: Path) -> None:
    settings = GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[], **SETTINGS[case])
    together = by_logps("grpo", completions(), settings, settings.beta)
    for one, found in zip(completions(), together, strict=True):
        (alone,) = by_logps("grpo", [one], settings, settings.beta)
        np.testing.assert_allclose(found.values, alone.values, rtol=1e-12)
        assert found.near.tolist() == alone.near.tolist()
    assert any(np.any(found.values) for found in together)


def test_a_wrong_derivative_is_named_and_rounding_is_judged_by_its_own_pack(tmp_path: Path) -> None:
    settings = GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[], beta=0.1)
    large, small = completions()[:2], [replace(c, weight=1e-7 * c.weight) for c in completions()[:2]]
    due = by_logps("grpo", [*large, *small], settings, settings.beta)
    names, packs = ["a", "b", "c", "d"], [14, 14]
    found = [d.values.copy() for d in due]
    assert check("log-prob", names, due, found, packs) == 28 - sum(int(d.near.sum()) for d in due)
    # A hundredth of the size of the second pack is less than the rounding of the first.
    found[3][4] += 0.01 * np.abs(due[3].values).max()
    with pytest.raises(ProofError, match=r"token 4 of d .* \(1 of 9 tokens differ\)"):
        check("log-prob", names, due, found, packs)


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_every_pack_of_a_micro_batch_is_compared(wrong: int | None, tmp_path: Path) -> None:
    settings = GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[])
    objective, tally = GRPOObjective(settings), Tally()
    sequences = [
        TrainingSequence(f"p{i}#0", [5, 6, i], [7, 8, 9], [-1.0, -2.0, -3.0], [0.5, 0.5, 0.5], weight=0.1)
        for i in range(2)
    ]
    flow = LossGradient(objective)
    for place, pack in enumerate(pack_sequences(sequences, 5)):
        logps = pack.column("behaviour_logps").requires_grad_()
        batch = TokenBatch.of(pack, TokenScores(logps, torch.ones(3)))
        flow.watch(batch)
        loss = objective.loss(batch, tally)
        (2 * loss if place == wrong else loss).backward()
    assert place == 1
    if wrong is None:
        flow.check()
    else:
        with pytest.raises(ProofError, match=f"of p{wrong}#0 "):
            flow.check()


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_pairs_of_long_completions_are_computed_as_exactly_as_their_proof_asks(
    loss_type: str, tmp_path: Path
) -> None:
    # Sums of 4,096 log-probs are some 3,000 nats; the margin between two of them is a few.
    length, draw = 4096, np.random.default_rng(0)
    objective = OnlineDPOObjective(
        OnlineDPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[], loss_type=loss_type, beta=0.1)
    )
    for pair in range(4):
        sequences = []
        for side in (1.0, -1.0):
            logps = -draw.exponential(0.7, length)
            sequences.append(
                TrainingSequence(
                    f"p{pair}#{int(side < 0)}",
                    [5, 6],
                    draw.integers(7, 90, length).tolist(),
                    logps.tolist(),
                    [side] * length,
                    weight=1.0,
                    ref_logps=logps + draw.normal(0.0, 0.02, length),
                    unit=f"p{pair}",
                )
            )
        compare(objective, sequences)


@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2])
def test_the_kl_of_a_policy_near_its_reference_is_computed_as_exactly_as_its_proof_asks(
    apart: float, tmp_path: Path
) -> None:
    length, draw = 512, np.random.default_rng(0)
    logps = -draw.exponential(0.7, length)
    sequence = TrainingSequence(
        "p0#0",
        [5, 6],
        draw.integers(7, 90, length).tolist(),
        logps.tolist(),
        [0.0] * length,
        weight=1 / length,
        ref_logps=logps + draw.normal(0.0, apart, length),
    )
    compare(
        GRPOObjective(GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[], beta=0.04)), [sequence]
    )


def compare(objective: Any, sequences: list[TrainingSequence]) -> None:
    """Prove the gradient of one pack."""
    flow = LossGradient(objective)
    (pack,) = pack_sequences(sequences, 1 << 20)
    logps = pack.column("behaviour_logps").requires_grad_()
    batch = TokenBatch.of(pack, TokenScores(logps, torch.ones(len(logps))))
    flow.watch(batch)
    objective.loss(batch, Tally()).backward()
    flow.check()
    assert logps.grad is not None
    assert bool(logps.grad.any())
