"""RLOO's loss and Online DPO's whole training step: ours, composed, equal TRL 1.16's own methods on the same batch."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_batches import JUNK, Batch, ids_of, random_batch, without_model

from lockstep.algorithms.losses import choose, clipped_policy_loss, preference_loss

pytest.importorskip("trl", reason="TRL is not installed here")

LENGTHS = (3, 7, 1, 2, 5, 6)


@pytest.mark.parametrize("seed", range(6))
def test_rloos_loss_gradient_and_metrics_are_trls(seed: int) -> None:
    from trl import RLOOTrainer

    batch = random_batch(seed, LENGTHS, drift=0.12)
    theirs, ours = batch.logps.clone().requires_grad_(), batch.logps.clone().requires_grad_()
    trainer = without_model(
        RLOOTrainer,
        lambda *_, **__: (batch.padded(theirs), batch.padded(batch.entropies), None),
        epsilon_low=0.2,
        epsilon_high=0.28,
    )
    inputs = {**ids_of(batch), "old_logps": batch.segments.sums(batch.old), "advantages": batch.advantages}
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()

    # The ratio of a whole completion is a product, so each completion has one clipped loss, and there are B losses.
    completion = clipped_policy_loss(batch.segments.sums(ours - batch.old).exp(), batch.advantages, 0.2, 0.28)
    completion.loss.mean().backward()
    assert completion.loss.mean().item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
    low, high = completion.low_clipped.float(), completion.high_clipped.float()
    assert logged == pytest.approx(
        {
            "entropy": batch.entropies.mean().item(),
            "clip_ratio/low_mean": low.mean().item(),
            "clip_ratio/low_min": low.min().item(),
            "clip_ratio/high_mean": high.mean().item(),
            "clip_ratio/high_max": high.max().item(),
            "clip_ratio/region_mean": (low + high).mean().item(),
        },
        abs=1e-6,
    )


def online_dpo_step(
    batch: Batch,
    logps: torch.Tensor,
    rewards: torch.Tensor,
    loss_type: str,
    beta: float,
    accumulation: int = 1,
) -> tuple[float, Any]:
    """TRL's whole training step; its gradient is stored in `logps.grad`.

    Returns:
        The loss that TRL reports, and its logged metrics.
    """
    from trl.experimental.online_dpo import OnlineDPOTrainer

    reference = object()
    trainer = without_model(
        OnlineDPOTrainer,
        lambda *_: None,
        model=SimpleNamespace(train=lambda: None),
        ref_model=reference,
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type=loss_type,
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=accumulation,
        ),
        eos_token_ids=[2],
        processing_class=SimpleNamespace(batch_decode=lambda rows, **_: ["text"] * len(rows)),
        reward_funcs=[len],
        stats=defaultdict(list),
        _beta=beta,
        state=SimpleNamespace(global_step=0, epoch=0),
        _generate=lambda *_: (*ids_of(batch).values(), None),
        _forward=lambda model, *_: batch.padded(batch.reference if model is reference else logps),
        _calculate_rewards_from_functions=lambda **_: rewards.clone(),
    )
    prompts = ["prompt"] * (len(rewards) // 2)
    return trainer.training_step(trainer.model, {"prompt": prompts}).item(), trainer.stats


def our_online_dpo(
    batch: Batch, logps: torch.Tensor, rewards: torch.Tensor, loss_type: str, beta: float
) -> torch.Tensor:
    """(P,) losses: completions i and i + P answer the same prompt. A tie has no gradient."""
    pairs = len(rewards) // 2
    chosen = choose(rewards[:pairs], rewards[pairs:])
    rows = torch.arange(pairs)
    better, worse = rows + pairs * (chosen == 1), rows + pairs * (chosen != 1)
    policy, reference = batch.segments.sums(logps), batch.segments.sums(batch.reference)
    losses = preference_loss(
        policy[better],
        policy[worse],
        reference[better],
        reference[worse],
        beta,
        loss_type,  # type: ignore[arg-type]
    )
    return losses * (chosen >= 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_online_dpos_loss_and_gradient_are_trls(loss_type: str, seed: int) -> None:
    batch = random_batch(seed, LENGTHS)
    rewards = torch.randn(6, generator=torch.Generator().manual_seed(seed))
    theirs, ours = batch.logps.clone().requires_grad_(), batch.logps.clone().requires_grad_()
    reported, _ = online_dpo_step(batch, theirs, rewards, loss_type, 0.1)
    loss = our_online_dpo(batch, ours, rewards, loss_type, 0.1).mean()
    loss.backward()
    assert loss.item() == pytest.approx(reported, rel=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a1_trls_online_dpo_does_not_divide_its_gradient_by_the_accumulated_steps() -> None:
    """TRL divides the loss that it reports, but not the loss that it differentiates."""
    batch, rewards = random_batch(0, LENGTHS), torch.arange(6.0)
    once, accumulated = batch.logps.clone().requires_grad_(), batch.logps.clone().requires_grad_()
    alone, _ = online_dpo_step(batch, once, rewards, "sigmoid", 0.1)
    quarter, _ = online_dpo_step(batch, accumulated, rewards, "sigmoid", 0.1, accumulation=4)
    assert quarter == pytest.approx(alone / 4)
    assert torch.equal(accumulated.grad, once.grad)


def test_trls_online_dpo_prefers_the_first_of_a_tie_and_the_second_where_a_score_is_missing() -> None:
    batch = random_batch(0, LENGTHS)
    for rewards in (torch.ones(6), torch.tensor([math.nan, 1.0, 1.0, 1.0, math.nan, 1.0])):
        logps = batch.logps.clone().requires_grad_()
        online_dpo_step(batch, logps, rewards, "sigmoid", 0.1)
        assert (logps.grad != 0).all()
        ours = batch.logps.clone().requires_grad_()
        our_online_dpo(batch, ours, rewards, "sigmoid", 0.1).sum().backward()
        assert (ours.grad == 0).all()


def test_trls_online_dpo_counts_padding_in_the_entropy_that_it_logs() -> None:
    batch = random_batch(0, LENGTHS)
    _, stats = online_dpo_step(batch, batch.logps.clone().requires_grad_(), torch.arange(6.0), "sigmoid", 0.1)
    entropy = -batch.segments.sums(batch.logps).mean().item()
    padding = int((batch.mask == 0).sum())
    assert stats["objective/entropy"][0] == pytest.approx(entropy - padding * JUNK / 6, rel=1e-5)
