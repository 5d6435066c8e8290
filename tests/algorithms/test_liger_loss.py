"""Liger's fused loss computes the head in chunks and then GRPO's losses.

Our chunks and losses give the same on the same hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_against_trl_loss import LIMIT, LOSSES, SAPO, VESPO, Case, cases, correction_of, our_loss
from trl_batches import Batch, random_batch

from lockstep.learn.token_logps import token_logps

pytest.importorskip("liger_kernel", reason="Liger is not installed here")

WIDTH, VOCABULARY, TEMPERATURE = 8, 37, 0.7
# Liger's luspo differs from TRL's if completions are not equally long.
EVEN = (4, 4, 4, 4)
# Liger refuses a ratio per completion for the other losses.
LEVELS = [(loss, "token") for loss in LOSSES] + [(loss, "sequence") for loss in [*LOSSES[:4], "luspo"]]


def moved(batch: Batch, logps: torch.Tensor) -> Batch:
    """The batch with these log-probs; all other log-probs keep their distance to them."""
    there = logps.detach() - batch.logps
    return replace(
        batch,
        logps=logps,
        old=batch.old + there,
        behaviour=batch.behaviour + there,
        reference=batch.reference + there,
    )


def ligers_loss(
    batch: Batch, case: Case, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    mask = batch.mask
    weights = correction_of(batch, case)
    of_completions = (
        torch.where(batch.segments.lengths > 0, batch.segments.means(weights), 1.0)
        if weights is not None
        else None
    )
    ratios = (
        of_completions
        if case.correction_level == "sequence"
        else weights
        if weights is None
        else batch.padded(weights, 1.0)
    )
    names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    loss = LigerFusedLinearGRPOLoss(
        beta=case.beta,
        compiled=False,
        use_ref_model=case.beta != 0.0,
        chunk_size=2,
        epsilon_low=case.epsilon,
        epsilon_high=case.epsilon_high,
        loss_type=case.loss,
        max_completion_length=LIMIT,
        importance_sampling_level=case.level,
        sapo_temperature_pos=SAPO[0],
        sapo_temperature_neg=SAPO[1],
        temperature=TEMPERATURE,
        delta=case.delta,
        use_bias_correction_kl=case.weigh_kl,
        **dict(zip(names, VESPO, strict=True)),
    )
    rows = torch.stack([batch.padded(column, 0.0) for column in hidden.unbind(1)], -1)
    found, _ = loss(
        rows,
        head,
        batch.padded(targets, 0).long(),
        mask,
        batch.advantages,
        old_per_token_logps=batch.padded(batch.old, -0.4),
        ref_per_token_logps=batch.padded(batch.reference, -2.2),
        vllm_is_ratio=ratios,
    )
    return found


def our_chunks(
    batch: Batch, case: Case, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    logps = scored(hidden, head, targets)
    return our_loss(replace(batch, logps=logps), case)[0].sum()


def scored(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logps(
        lambda rows: rows @ head.T,
        hidden,
        torch.arange(len(hidden)),
        targets,
        temperature=TEMPERATURE,
        chunk_size=5,
        entropy_gradient=False,
    )[0]


@dataclass(frozen=True)
class Drawn:
    """A batch, and the hidden states from which its log-probs are computed."""

    batch: Batch
    hidden: torch.Tensor
    head: torch.Tensor
    targets: torch.Tensor


def drawn(seed: int, *lengths: tuple[int, ...]) -> Drawn:
    torch.manual_seed(seed)
    batch = random_batch(seed, *lengths)
    hidden, head = 0.3 * torch.randn(len(batch.logps), WIDTH), torch.randn(VOCABULARY, WIDTH)
    targets = torch.randint(VOCABULARY, (len(hidden),))
    return Drawn(moved(batch, scored(hidden, head, targets)), hidden, head, targets)


def values(compute: Any, case: Case, given: Drawn) -> tuple[torch.Tensor, ...]:
    """The loss, and its gradients with respect to hidden states and head."""
    inputs = given.hidden.clone().requires_grad_(), given.head.clone().requires_grad_()
    loss = compute(given.batch, case, *inputs, given.targets)
    return loss.detach(), *torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("correction", [None, "token_truncate", "sequence_truncate"])
@pytest.mark.parametrize(("loss", "level"), LEVELS)
def test_loss_and_gradients_are_ligers(loss: str, level: str, correction: str | None) -> None:
    for seed, case in enumerate(cases(loss, level, correction)):
        # Liger does not have these masks.
        if case.off_policy is None and case.share == 1.0:
            given = drawn(seed, *([EVEN] if loss == "luspo" else []))
            expected, found = values(ligers_loss, case, given), values(our_chunks, case, given)
            sizes = [float(part.abs().max()) for part in expected]
            for one, other, size in zip(found, expected, [max(sizes), *sizes[1:]], strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-5, atol=1e-5 * size, msg=lambda m, c=case: f"{c}: {m}"
                )


def test_ligers_luspo_is_not_trls_where_lengths_differ() -> None:
    """Liger divides by the longest completion and then multiplies by length.

    TRL 1.16 sums the tokens of a completion, like Lockstep.
    """
    given = drawn(0)
    expected, found = (values(compute, Case("luspo"), given)[0] for compute in (ligers_loss, our_chunks))
    assert abs(float(expected - found)) > 0.01 * abs(float(expected))
