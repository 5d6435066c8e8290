"""The plain reference: one padded row per completion, whole logits, no sharing, no packing.

It is slow and easy to check.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.learn.sequence import TrainingSequence


@dataclass(frozen=True, slots=True, eq=False)
class Tree(TrainingSequence):
    """A rollout of several branches as the reference sees it: the sampled tokens of one branch after the other."""

    branches: tuple[TrainingSequence, ...] = ()


def branches_of(sequence: TrainingSequence) -> tuple[TrainingSequence, ...]:
    """The sequences of which each is one row."""
    return sequence.branches if isinstance(sequence, Tree) else (sequence,)


def sampled_places(sequence: TrainingSequence) -> list[int]:
    """The places of the sampled tokens in a completion. The other tokens are only attended to."""
    return [i for i in range(len(sequence.completion_ids)) if sequence.sampled is None or sequence.sampled[i]]


def padded_logps(
    model: PreTrainedModel, sequences: list[TrainingSequence], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, C) log-probs of sampled tokens, right-padded, and the (B, C) mask of real ones."""
    rows = [torch.from_numpy(np.concatenate([s.prompt_ids, s.completion_ids])) for s in sequences]
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        attention[i, : len(row)] = 1
    logps = (model(input_ids=ids, attention_mask=attention).logits / temperature).log_softmax(-1)
    longest = max(len(sampled_places(s)) for s in sequences)
    scored, mask = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest)
    parts = []
    for i, s in enumerate(sequences):
        places = torch.tensor(sampled_places(s))
        count = len(places)
        own = logps[i, len(s.prompt_ids) - 1 + places, torch.tensor(s.completion_ids)[places]]
        parts.append(torch.nn.functional.pad(own, (0, longest - count)))
        mask[i, :count] = 1
    return torch.stack(parts) + 0 * scored, mask


def reference_loss(
    model: PreTrainedModel, sequences: list[TrainingSequence], config: GRPOConfig
) -> torch.Tensor:
    """GRPO's loss of a whole optimizer step, written as in the papers."""
    logps, mask = padded_logps(model, sequences, config.temperature)
    old = logps.detach().clone()
    behaviour = torch.zeros_like(logps)
    for i, s in enumerate(sequences):
        if s.old_logps is not None:
            old[i, : len(s.old_logps)] = torch.tensor(s.old_logps)
        behaviour[i, : len(s.behaviour_logps)] = torch.tensor(s.behaviour_logps)
    advantages = torch.tensor([s.advantages[0] for s in sequences])[:, None]
    ratio = torch.exp(logps - old)
    assert config.epsilon_high is not None
    per_token = -torch.min(
        ratio * advantages, ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high) * advantages
    )
    if config.vllm_importance_sampling_correction:
        per_token = per_token * torch.exp(old - behaviour).clamp(max=config.vllm_importance_sampling_clip_max)
    if config.loss_type == "grpo":
        return ((per_token * mask).sum(1) / mask.sum(1)).mean()
    if config.loss_type == "dr_grpo":
        return (per_token * mask).sum() / (len(sequences) * config.max_completion_length)
    return (per_token * mask).sum() / mask.sum()
