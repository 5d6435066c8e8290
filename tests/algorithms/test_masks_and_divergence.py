"""Which tokens are masked, and how far a policy is from its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.corrections import high_entropy_mask, k1, k2, k3, off_policy_mask
from lockstep.algorithms.segments import Segments


def test_only_bad_completions_that_the_policy_has_left_are_dropped() -> None:
    segments = Segments(torch.tensor([2, 2, 2, 0]))
    logps = torch.tensor([-1.0, -3.0, -1.0, -3.0, -1.0, -1.2], requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    kept = off_policy_mask(logps, torch.full((6,), -1.0), advantages, segments, 0.5)
    assert kept.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert not kept.requires_grad


def test_the_drift_of_the_mask_is_a_mean_and_its_threshold_is_kept() -> None:
    segments = Segments(torch.tensor([4]))
    behaviour, bad = torch.tensor([0.0, 0.0, 0.0, 2.0]), torch.full((4,), -1.0)
    assert off_policy_mask(torch.zeros(4), behaviour, bad, segments, 0.5).tolist() == [1.0] * 4
    assert off_policy_mask(torch.zeros(4), behaviour, bad, segments, 0.49).tolist() == [0.0] * 4
    assert off_policy_mask(torch.zeros(4), behaviour, torch.zeros(4), segments, 0.49).tolist() == [1.0] * 4
    # A completion that the policy now gives a higher probability must not be masked.
    assert off_policy_mask(behaviour, torch.zeros(4), bad, segments, 0.49).tolist() == [1.0] * 4


@settings(deadline=None)
@given(st.lists(st.floats(0, 8, width=32), min_size=1, max_size=40, unique=True), st.floats(0.01, 1.0))
def test_the_mask_keeps_the_most_uncertain_share(entropies: list[float], share: float) -> None:
    mask = high_entropy_mask(torch.tensor(entropies), share)
    kept = [e for e, keep in zip(entropies, mask.tolist(), strict=True) if keep]
    left = [e for e, keep in zip(entropies, mask.tolist(), strict=True) if not keep]
    assert kept
    assert not left or min(kept) > max(left)
    assert abs(len(kept) - share * len(entropies)) <= 1


def test_a_share_of_one_keeps_everything_and_nothing_has_no_quantile() -> None:
    assert high_entropy_mask(torch.tensor([0.1, 0.0, 3.0]), 1.0).tolist() == [True, True, True]
    assert high_entropy_mask(torch.zeros(0), 0.2).tolist() == []


def test_the_estimators_have_the_mean_and_the_gradients_that_are_claimed() -> None:
    """Exact expectations over a vocabulary of five tokens."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64).log_softmax(0)
    logps = logits.log_softmax(0)
    kl = (logps.exp() * (logps - ref)).sum()
    reverse = (ref.exp() * (ref - logps)).sum()
    probabilities = logps.exp().detach()

    def gradient(value: torch.Tensor) -> list[float]:
        return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()

    for estimator in (k1, k3):
        assert float((probabilities * estimator(logps, ref)).sum()) == pytest.approx(float(kl))
    assert gradient((probabilities * k1(logps, ref)).sum()) == pytest.approx([0.0] * 5, abs=1e-12)
    assert gradient((probabilities * k2(logps, ref)).sum()) == pytest.approx(gradient(kl))
    assert gradient((probabilities * k3(logps, ref)).sum()) == pytest.approx(gradient(reverse))


@settings(deadline=None)
@given(st.floats(-5, 0), st.floats(-5, 0))
def test_k2_and_k3_are_never_negative_and_zero_at_parity(logp: float, ref: float) -> None:
    policy, reference = torch.tensor([logp]), torch.tensor([ref])
    assert float(k2(policy, reference)) >= 0
    assert float(k3(policy, reference)) >= 0
    assert float(k3(policy, policy)) == float(k2(policy, policy)) == float(k1(policy, policy)) == 0.0
    if abs(logp - ref) < 0.01:
        assert float(k3(policy, reference)) == pytest.approx(float(k2(policy, reference)), rel=0.02, abs=1e-7)
