"""Our policy losses, composed as a trainer does, equal TRL 1.16's own `_compute_loss`: loss, gradients and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from portions import portion
from trl_batches import Batch, ids_of, random_batch, without_model

from lockstep.algorithms.corrections import high_entropy_mask, importance_weights, k3, off_policy_mask
from lockstep.algorithms.losses import (
    TokenLoss,
    cispo_loss,
    clipped_policy_loss,
    importance_ratios,
    sapo_loss,
    token_weights,
    vespo_loss,
)

pytest.importorskip("trl", reason="TRL is not installed here")

LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
LEVELS = ["token", "sequence"]
CORRECTIONS = [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
# CI has every two of a loss, a level and a correction together.
SETTINGS = portion(
    product(LOSSES, LEVELS, CORRECTIONS),
    lambda case: (LOSSES.index(case[0]) + LEVELS.index(case[1]) + CORRECTIONS.index(case[2])) % 2 == 0,
)
LIMIT = 9
SAPO = (1.0, 1.05)
VESPO = (2.0, 3.0, 3.0, 2.0)
BOUNDS = (0.5, 1.6)


@dataclass(frozen=True)
class Case:
    """One combination of all the settings of TRL's loss."""

    loss: str
    level: str = "token"
    correction: str | None = None
    beta: float = 0.0
    weigh_kl: bool = False
    delta: float | None = None
    off_policy: float | None = None
    share: float = 1.0
    epsilon: float = 0.2
    epsilon_high: float = 0.28

    @property
    def correction_level(self) -> str:
        return "sequence" if (self.correction or "").startswith("sequence") else "token"


def cases(loss: str, level: str, correction: str | None) -> Iterator[Case]:
    """Every combination of the other settings."""
    penalties = [(0.0, False), (0.04, False), (0.04, True)]
    # For cispo the upper bound is the limit of the ratio itself.
    epsilons = [(0.2, 1.1), (0.1, 1.3)] if loss == "cispo" else [(0.2, 0.28), (0.1, 0.15)]
    for (beta, weigh), delta, off_policy, share, (low, high) in product(
        penalties, (None, 1.4), (None, 0.02), (1.0, 0.4), epsilons
    ):
        yield Case(loss, level, correction, beta, weigh, delta, off_policy, share, low, high)


def correction_of(batch: Batch, case: Case) -> torch.Tensor | None:
    if case.correction is None:
        return None
    return importance_weights(batch.old, batch.behaviour, batch.segments, case.correction, *BOUNDS)  # type: ignore[arg-type]


def trl_loss(
    batch: Batch, case: Case, accumulation: int = 1, generated: int | None = None
) -> tuple[torch.Tensor, Any]:
    """TRL's loss of one micro-batch and its trainer, which holds the metrics.

    Args:
        accumulation: micro-batches of an optimizer step, and of a generation.
        generated: tokens of the generation, if there is more than this micro-batch.
    """
    from trl import GRPOTrainer

    trainer = without_model(
        GRPOTrainer,
        lambda *_, **__: (batch.padded(batch.logps), batch.padded(batch.entropies, 9.0), None),
        args=SimpleNamespace(
            delta=case.delta,
            use_bias_correction_kl=case.weigh_kl,
            steps_per_generation=accumulation,
            sapo_temperature_pos=SAPO[0],
            sapo_temperature_neg=SAPO[1],
            **dict(
                zip(
                    ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), VESPO, strict=True
                )
            ),
        ),
        loss_type=case.loss,
        importance_sampling_level=case.level,
        beta=case.beta,
        epsilon_low=case.epsilon,
        epsilon_high=case.epsilon_high,
        top_entropy_quantile=case.share,
        off_policy_mask_threshold=case.off_policy,
        use_vllm=case.correction is not None,
        vllm_importance_sampling_correction=case.correction is not None,
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=LIMIT,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        **ids_of(batch),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.padded(batch.old, -0.4),
        "sampling_per_token_logps": batch.padded(batch.behaviour, 0.0),
        "ref_per_token_logps": batch.padded(batch.reference, -2.2),
        "num_items_in_batch": torch.tensor(generated or len(batch.logps)),
    }
    weights = correction_of(batch, case)
    if weights is not None and case.correction_level == "sequence":
        # One value per completion; a completion without tokens has exp(0).
        lengths = batch.segments.lengths
        inputs["importance_sampling_ratio"] = torch.where(lengths > 0, batch.segments.means(weights), 1.0)[
            :, None
        ]
    elif weights is not None:
        inputs["importance_sampling_ratio"] = batch.padded(weights, 1.0)
    return trainer._compute_loss(trainer.model, inputs), trainer


def our_policy_loss(
    batch: Batch, case: Case, ratios: torch.Tensor, advantages: torch.Tensor
) -> tuple[TokenLoss, torch.Tensor | None]:
    if case.loss == "cispo":
        return cispo_loss(ratios, batch.logps, advantages, case.epsilon_high), None
    if case.loss == "sapo":
        return sapo_loss(ratios, advantages, *SAPO), None
    if case.loss == "vespo":
        level: Any = case.correction_level
        return vespo_loss(
            batch.logps, batch.old, advantages, batch.segments, correction_of(batch, case), *VESPO, level
        )
    return clipped_policy_loss(ratios, advantages, case.epsilon, case.epsilon_high, case.delta), None


def our_loss(batch: Batch, case: Case) -> tuple[torch.Tensor, dict[str, float]]:
    """(N,) weighted losses, whose sum is the step's, and TRL's metrics from our parts."""
    segments = batch.segments
    advantages = segments.spread(batch.advantages)
    ratios = importance_ratios(batch.logps, batch.old, segments, case.level)  # type: ignore[arg-type]
    token, phi = our_policy_loss(batch, case, ratios, advantages)
    losses = token.loss
    if case.off_policy is not None:
        losses = losses * off_policy_mask(batch.logps, batch.behaviour, advantages, segments, case.off_policy)
    if case.share < 1.0:
        losses = losses * high_entropy_mask(batch.entropies, case.share)
    correction = correction_of(batch, case)
    if correction is not None and case.loss != "vespo":
        losses = losses * correction
    metrics = {"entropy": float(batch.entropies.mean())}
    if case.beta:
        kl = k3(batch.logps, batch.reference) * (ratios if case.weigh_kl else 1.0)
        losses = losses + case.beta * kl
        metrics["kl"] = float(kl.mean())
    weights = segments.spread(token_weights(segments.lengths, case.loss, LIMIT))  # type: ignore[arg-type]
    return losses * weights, metrics | clip_metrics(batch, case, token, phi)


def clip_metrics(batch: Batch, case: Case, token: TokenLoss, phi: torch.Tensor | None) -> dict[str, float]:
    """Per token; or per completion if the ratio is one per completion. TRL also counts a completion without tokens."""

    def share(clipped: torch.Tensor) -> float:
        rows = batch.segments.means(clipped.float())
        return float(rows.mean() if case.level == "sequence" else clipped.float().mean())

    if phi is not None:
        return {"vespo/phi_seq_mean": float(phi.mean())}
    if case.loss == "sapo":
        return {}
    if case.loss == "cispo":
        return {"cispo_clip_ratio": share(token.high_clipped)}
    written = batch.segments.lengths > (-1 if case.level == "sequence" else 0)
    return {
        "clip_ratio/low_mean": share(token.low_clipped),
        "clip_ratio/high_mean": share(token.high_clipped),
        "clip_ratio/region_mean": share(token.low_clipped | token.high_clipped),
        "clip_ratio/low_min": float(batch.segments.means(token.low_clipped.float())[written].min()),
        "clip_ratio/high_max": float(batch.segments.means(token.high_clipped.float())[written].max()),
    }


def with_gradient(batch: Batch) -> Batch:
    return replace(batch, logps=batch.logps.clone().requires_grad_())


@pytest.mark.parametrize(("loss", "level", "correction"), SETTINGS)
def test_loss_gradient_and_metrics_are_trls(loss: str, level: str, correction: str | None) -> None:
    for seed, case in enumerate(cases(loss, level, correction)):
        theirs, ours = with_gradient(random_batch(seed)), with_gradient(random_batch(seed))
        expected, trainer = trl_loss(theirs, case)
        losses, metrics = our_loss(ours, case)
        expected.backward()
        losses.sum().backward()
        size = float(losses.detach().abs().sum())
        assert losses.sum().item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5 * size), case
        largest = float(theirs.logps.grad.abs().max())
        torch.testing.assert_close(
            ours.logps.grad, theirs.logps.grad, rtol=1e-5, atol=1e-5 * largest, msg=str(case)
        )
        logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
        assert metrics == pytest.approx(logged, rel=1e-5, abs=1e-6), case


def test_the_batches_reach_every_branch() -> None:
    """Both clips, both masks and delta have an effect in the batches above.

    Otherwise the comparison would show nothing.
    """
    low = high = beyond = dropped = 0.0
    for seed in range(48):
        batch = random_batch(seed)
        advantages = batch.segments.spread(batch.advantages)
        ratios = importance_ratios(batch.logps, batch.old, batch.segments, "sequence")
        token = clipped_policy_loss(ratios, advantages, 0.2, 0.28)
        low, high = low + token.low_clipped.sum(), high + token.high_clipped.sum()
        beyond += ((ratios > 1.4) & (advantages < 0)).sum()
        kept = off_policy_mask(batch.logps, batch.behaviour, advantages, batch.segments, 0.02)
        dropped += (kept == 0).sum()
    assert min(low, high, beyond, dropped) >= 3


def test_a2_trls_bnpo_depends_on_how_a_step_is_split_and_ours_does_not() -> None:
    """TRL divides by the tokens of each micro-batch, so tokens of a smaller micro-batch have more weight (#7206)."""
    batch = random_batch(0, (2, 3, 9, 8))
    halves = [batch.rows(slice(0, 2)), batch.rows(slice(2, 4))]
    for loss in LOSSES:
        case = Case(loss)
        whole = float(trl_loss(batch, case)[0])
        ours = float(our_loss(batch, case)[0].sum())
        split = sum(
            float(trl_loss(half, case, accumulation=2, generated=len(batch.logps))[0]) for half in halves
        )
        assert ours == pytest.approx(whole, rel=1e-4), loss
        if loss == "bnpo":
            assert abs(split - ours) > 0.05 * abs(ours)
        else:
            assert split == pytest.approx(ours, rel=1e-4), loss


def test_a2_trls_grpo_depends_on_the_split_where_micro_batches_differ_in_completions() -> None:
    """TRL averages the means of 1 and of 3 completions with equal weights; here each completion has weight 1/4."""
    batch = random_batch(0, (2, 3, 9, 8))
    parts = [batch.rows(slice(0, 1)), batch.rows(slice(1, 4))]
    split = sum(float(trl_loss(part, Case("grpo"), accumulation=2)[0]) for part in parts)
    ours = float(our_loss(batch, Case("grpo"))[0].sum())
    assert float(trl_loss(batch, Case("grpo"))[0]) == pytest.approx(ours, rel=1e-4)
    assert abs(split - ours) > 0.05 * abs(ours)


def test_a2_trls_dapo_divides_a_step_by_the_mean_tokens_of_its_generations_steps() -> None:
    """With two steps per generation, TRL gives a step of few long completions more weight than a mean over tokens."""
    batch = random_batch(0, (2, 3, 9, 8))
    step = batch.rows(slice(2, 4))
    theirs, trainer = trl_loss(step, Case("dapo"), generated=len(batch.logps))
    trainer.args.steps_per_generation = 2
    ours = our_loss(step, Case("dapo"))[0].sum()
    # The step has 17 of 22 tokens, and TRL divides by 22 / 2.
    assert 2 * float(theirs) == pytest.approx(float(ours) * 17 / 11, rel=1e-4)


def test_trl_counts_completions_where_every_one_has_at_most_one_token() -> None:
    """TRL treats a (B, 1) tensor of tokens as one of completions: an absent token counts with its padding's value."""
    batch = random_batch(0, (1, 0, 1))
    _, trainer = trl_loss(batch, Case("grpo"))
    assert trainer._metrics["train"]["entropy"][0] == pytest.approx((float(batch.entropies.sum()) + 9.0) / 3)
    assert our_loss(batch, Case("grpo"))[1]["entropy"] == pytest.approx(float(batch.entropies.mean()))
