"""Forward, proof and backward of one micro-batch.

Comes from: `training/generation.py`. Leaves: gradients on the policy, and sums that the trainer checks and logs. Sequences that
cannot move the policy (advantage or weight zero) are scored without gradient: every sampled token is still verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from lockstep.algorithms.corrections import importance_weights
from lockstep.algorithms.policy_loss import clipped_policy_loss, importance_ratios
from lockstep.algorithms.segments import Segments
from lockstep.parity.decomposition import split_gap
from lockstep.parity.gap import GapStats, measure_gap
from lockstep.parity.tolerances import Tolerance
from lockstep.training.config import GRPOConfig
from lockstep.training.packing import Pack, TrainingSequence, pack_sequences
from lockstep.training.phases import PhaseClock
from lockstep.training.scoring import TokenScores, score_pack


@dataclass(slots=True)
class UpdateSums:
    """Sums over the tokens of an optimizer step; the parts of a step add up.

    Attributes:
        loss: the step's loss so far.
        gap: parity gap against the policy at sampling time.
        drift: sum of |log-prob now − at sampling time|, of the policy; 0 unless it has moved since.
        ratio_min, ratio_max, ratio_sum: importance ratios trainer / engine, before truncation.
    """

    loss: float = 0.0
    tokens: int = 0
    gap: GapStats = field(default_factory=GapStats)
    drift: float = 0.0
    entropy: float = 0.0
    low_clipped: float = 0.0
    high_clipped: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = float("-inf")

    def metrics(self, limit: Tolerance) -> dict[str, float]:
        """TRL's names for what the update measured, and the parity gap's own with its parts."""
        parts = split_gap(self.gap.mean_abs, self.drift / self.tokens, limit)
        return {
            "entropy": self.entropy / self.tokens,
            "clip_ratio/low_mean": self.low_clipped / self.tokens,
            "clip_ratio/high_mean": self.high_clipped / self.tokens,
            "clip_ratio/region_mean": (self.low_clipped + self.high_clipped) / self.tokens,
            "sampling/sampling_logp_difference/mean": self.gap.mean_abs,
            "sampling/sampling_logp_difference/max": self.gap.max_abs,
            "sampling/importance_sampling_ratio/min": self.ratio_min,
            "sampling/importance_sampling_ratio/mean": self.ratio_sum / self.tokens,
            "sampling/importance_sampling_ratio/max": self.ratio_max,
            "parity/mean_abs_gap": self.gap.mean_abs,
            "parity/max_abs_gap": self.gap.max_abs,
            "parity/k3": self.gap.k3,
            "parity/checked_tokens": self.gap.tokens,
            **parts.metrics(),
        }


@dataclass(frozen=True, slots=True)
class Policy:
    """The trained model and how it computes."""

    model: PreTrainedModel
    autocast: Callable[[], AbstractContextManager]
    backward: Callable[[torch.Tensor], None]

    def score(self, pack: Pack, config: GRPOConfig) -> TokenScores:
        """Scores of a pack under the run's precision and temperature."""
        with self.autocast():
            return score_pack(self.model, pack.to(self.model.device), config.temperature, config.logits_chunk_size)


def learn(
    policy: Policy, sequences: Sequence[TrainingSequence], config: GRPOConfig, clock: PhaseClock, sums: UpdateSums
) -> float:
    """Accumulate gradients of a micro-batch and add its numbers to `sums`.

    Returns:
        The micro-batch's part of the step's loss.
    """
    moving = [s for s in sequences if s.advantage != 0.0 and s.weight != 0.0]
    still = [s for s in sequences if s.advantage == 0.0 or s.weight == 0.0]
    before = sums.loss
    with clock.phase("forward_backward"):
        for pack in pack_sequences(moving, config.token_budget):
            scores = policy.score(pack, config)
            policy.backward(_pack_loss(pack, scores, config, sums))
            _add_scores(pack, scores, sums)
    with clock.phase("verify"), torch.no_grad():
        for pack in pack_sequences(still, config.token_budget):
            _add_scores(pack, policy.score(pack, config), sums)
    return sums.loss - before


@torch.no_grad()
def score_all(
    policy: Policy, sequences: Sequence[TrainingSequence], config: GRPOConfig
) -> tuple[dict[str, tuple[float, ...]], GapStats]:
    """The policy's log-probs of whole sequences, by request name, and their gap to the engine's."""
    logps: dict[str, tuple[float, ...]] = {}
    gap = GapStats()
    for pack in pack_sequences(sequences, config.token_budget):
        scores = policy.score(pack, config).logps
        gap = gap + measure_gap(_behaviour(pack, scores), scores, pack.names())
        for sequence, part in zip(
            pack.sequences, scores.split([len(s.completion_ids) for s in pack.sequences]), strict=True
        ):
            logps[sequence.name] = tuple(part.tolist())
    return logps, gap


def _pack_loss(pack: Pack, scores: TokenScores, config: GRPOConfig, sums: UpdateSums) -> torch.Tensor:
    advantages = pack.per_token([s.advantage for s in pack.sequences])
    weights = pack.per_token([s.weight for s in pack.sequences])
    old = _old_logps(pack, scores.logps)
    assert config.epsilon_high is not None
    segments = Segments(torch.tensor([len(s.completion_ids) for s in pack.sequences], device=old.device))
    ratios = importance_ratios(scores.logps, old, segments, "token")
    token = clipped_policy_loss(ratios, advantages, config.epsilon, config.epsilon_high)
    if config.vllm_importance_sampling_correction:
        clip_max = config.vllm_importance_sampling_clip_max
        behaviour = _behaviour(pack, old)
        weights = weights * importance_weights(old, behaviour, segments, "token_truncate", None, clip_max)
    loss = (token.loss * weights).sum()
    sums.loss += loss.item()
    sums.low_clipped += token.low_clipped.sum().item()
    sums.high_clipped += token.high_clipped.sum().item()
    return loss


def _add_scores(pack: Pack, scores: TokenScores, sums: UpdateSums) -> None:
    old = _old_logps(pack, scores.logps)
    behaviour = _behaviour(pack, old)
    sums.gap = sums.gap + measure_gap(behaviour, old, pack.names())
    ratio = torch.exp(old - behaviour)
    sums.ratio_sum += ratio.sum().item()
    sums.ratio_min = min(sums.ratio_min, ratio.min().item())
    sums.ratio_max = max(sums.ratio_max, ratio.max().item())
    sums.drift += (scores.logps.detach() - old).abs().sum().item()
    sums.entropy += scores.entropies.sum().item()
    sums.tokens += len(ratio)


def _old_logps(pack: Pack, logps: torch.Tensor) -> torch.Tensor:
    """The policy's log-probs at sampling time: this very forward's, unless the policy has moved since."""
    if pack.sequences[0].old_logps is None:
        return logps.detach()
    values = [value for s in pack.sequences for value in (s.old_logps or ())]
    return torch.tensor(values, dtype=torch.float32, device=logps.device)


def _behaviour(pack: Pack, like: torch.Tensor) -> torch.Tensor:
    values = [value for s in pack.sequences for value in s.behaviour_logps]
    return torch.tensor(values, dtype=torch.float32, device=like.device)
