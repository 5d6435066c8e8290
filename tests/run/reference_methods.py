"""A plain second version of every method: whole logits of padded rows, loops over groups and tokens.

The formulas are those of the papers, with TRL's constants if TRL has the method and OpenRLHF's otherwise. Each
function takes a whole generation and returns the loss of one of its optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from reference import branches_of, sampled_places
from transformers import PreTrainedModel

from lockstep.learn.sequence import TrainingSequence


@dataclass
class Drawn:
    """A generation before any method has used it: its sequences and their rewards.

    Attributes:
        sequences: one per rollout; `old_logps`, `ref_logps` and `values` are those at the time of sampling.
        rewards: the rewards of each group; None for a completion without a reward.
        cut: whether each completion ended at the length limit.
        moved: whether the policy has changed since sampling.
        anew: whether a case is drawn again if the last bit of fp32 would decide its result.
        logp_error: the error of each log-prob from which the weight of a whole completion is made, in nats.
    """

    sequences: list[TrainingSequence]
    rewards: list[list[float | None]]
    cut: list[bool]
    moved: bool
    anew: bool = False
    logp_error: float = 0.0

    @property
    def flat_rewards(self) -> list[float | None]:
        return [reward for group in self.rewards for reward in group]


@dataclass
class Padded:
    """The results of a forward of padded rows; all have shape (B, C), and all except the mask have a gradient."""

    logps: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor
    hidden: torch.Tensor


def padded(model: PreTrainedModel, sequences: Sequence[TrainingSequence], temperature: float) -> Padded:
    """One row per branch, whole logits, counted before sampled tokens; then each rollout's tokens as one row."""
    branches = [(i, branch) for i, s in enumerate(sequences) for branch in branches_of(s)]
    rows = [torch.from_numpy(np.concatenate([s.prompt_ids, s.completion_ids])) for _, s in branches]
    width, longest = max(map(len, rows)), max(len(sampled_places(s)) for s in sequences)
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    attention = torch.stack([(torch.arange(width) < len(row)).long() for row in rows])
    found = model(input_ids=ids, attention_mask=attention, output_hidden_states=True)
    hidden = found.hidden_states[-1]
    # Mamba rounds its logits to float32.
    logits = found.logits if found.logits.dtype == hidden.dtype else model.get_output_embeddings()(hidden)
    distribution = (logits / temperature).log_softmax(-1)
    parts: list[list[list[torch.Tensor]]] = [[[] for _ in sequences] for _ in range(3)]
    for row, (i, s) in enumerate(branches):
        places = torch.tensor(sampled_places(s))
        before = len(s.prompt_ids) - 1 + places
        own = distribution[row, before]
        parts[0][i].append(own[torch.arange(len(places)), torch.tensor(s.completion_ids)[places]])
        parts[1][i].append(-(own.exp() * own).sum(-1))
        parts[2][i].append(hidden[row, before])
    logps, entropies, states = ([torch.cat(of) for of in kind] for kind in parts)

    def stacked(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.cat([v, v.new_zeros(longest - len(v), *v.shape[1:])]) for v in values])

    return Padded(
        stacked(logps), stacked(entropies), stacked([torch.ones_like(v) for v in logps]), stacked(states)
    )


def table(sequences: Sequence[TrainingSequence], rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """(B, C) from ragged rows, padded with zeros."""
    longest = max(len(sampled_places(s)) for s in sequences)
    return torch.tensor([[*row, *([0.0] * (longest - len(row)))] for row in rows], dtype=torch.float64)


def column(sequences: Sequence[TrainingSequence], name: str) -> torch.Tensor:
    return table(sequences, [getattr(s, name) for s in sequences])


def old_of(drawn: Drawn, step: slice, now: torch.Tensor) -> torch.Tensor:
    return column(drawn.sequences[step], "old_logps") if drawn.moved else now.detach()


def learned(drawn: Drawn, step: slice, mask: torch.Tensor, config: Any) -> torch.Tensor:
    """The mask, without truncated completions if these are masked."""
    if not config.mask_truncated_completions:
        return mask
    return mask * torch.tensor([[0.0 if cut else 1.0] for cut in drawn.cut[step]], dtype=mask.dtype)


def correction(old: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, config: Any) -> torch.Tensor:
    if not config.vllm_importance_sampling_correction:
        return torch.ones_like(mask)
    low = config.vllm_importance_sampling_clip_min or 0.0
    given = config.vllm_importance_sampling_clip_max
    high = math.inf if given is None else given
    level, _, bound = config.vllm_importance_sampling_mode.partition("_")
    difference = (old - behaviour).detach() * mask
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(mask)
    if bound == "geometric_mask":
        mean = (difference / mask.sum(1, keepdim=True)).exp()
        return ((mean >= low) & (mean <= high)).to(mask)
    ratio = difference.exp()
    return (
        ratio.clamp(low, high)
        if bound == "truncate"
        else torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    )


# ---- advantages of completions -----------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def without_variance(drawn: Drawn) -> list[bool]:
    """For each group: whether all of its rewards are equal."""
    return [len({r for r in group if r is not None}) < 2 for group in drawn.rewards]


def relative_to_group(rewards: list[list[float | None]], scale: str) -> list[float]:
    """GRPO's advantages."""
    every = [r for group in rewards for r in group if r is not None]
    differences = [
        r - fmean([x for x in group if x is not None]) for group in rewards for r in group if r is not None
    ]
    found = []
    for group in rewards:
        scored = [r for r in group if r is not None]
        deviation = spread({"group": scored, "advantages": differences}.get(scale, every))
        divisor = 1.0 if scale == "none" else deviation + 1e-4
        found += [0.0 if r is None or len(set(scored)) == 1 else (r - fmean(scored)) / divisor for r in group]
    return found


def second_score(reward: float | None) -> float | None:
    """The scores of another reward function, which gives no score to some completions that the first one scores."""
    return None if reward in (None, 2.5) else (reward - 1.6) ** 2


def by_function(drawn: Drawn, weights: Sequence[float]) -> list[float]:
    """GDPO's advantages: scores are normalised per function and group, summed, and normalised over the generation."""
    totals: list[float | None] = []
    for group in drawn.rewards:
        columns = [group, [second_score(r) for r in group]]
        known = [[r for r in column if r is not None] for column in columns]
        scaled = [
            [0.0 if r is None else weight * (r - fmean(own)) / (spread(own) + 1e-4) for r in column]
            for column, own, weight in zip(columns, known, weights, strict=True)
        ]
        totals += [None if r is None else sum(parts) for r, *parts in zip(group, *scaled, strict=True)]
    known_totals = [t for t in totals if t is not None]
    centre, divisor = fmean(known_totals), spread(known_totals) + 1e-4
    return [0.0 if t is None else (t - centre) / divisor for t in totals]


def leave_one_out(drawn: Drawn, config: Any) -> list[float]:
    """RLOO's advantages: the KL of the whole completion is part of its reward."""
    penalties = iter(
        sum(s.old_logps.tolist()) - sum(s.ref_logps.tolist()) if config.beta and not out else 0.0
        for s, out in zip(drawn.sequences, is_masked(drawn, config), strict=True)
    )
    found: list[float | None] = []
    low, high = config.reward_clip_range or (-math.inf, math.inf)
    for group in drawn.rewards:
        total = [(None if r is None else min(max(r, low), high), next(penalties)) for r in group]
        net = [None if r is None else r - config.beta * kl for r, kl in total]
        for i, own in enumerate(net):
            others = [r for j, r in enumerate(net) if j != i and r is not None]
            found.append(None if own is None or not others else own - fmean(others))
    if config.normalize_advantages:
        known = [a for a in found if a is not None]
        centre = fmean(known) if known else 0.0
        return [0.0 if a is None else (a - centre) / (spread(known) + 1e-4) for a in found]
    return [a or 0.0 for a in found]


def is_masked(drawn: Drawn, config: Any) -> list[bool]:
    """The completions that ended at the length limit, if these are masked."""
    return [cut and config.mask_truncated_completions for cut in drawn.cut]


def counted(drawn: Drawn, config: Any, least: int = 1) -> list[bool]:
    """The completions that have a score and are not masked, in groups with at least this many scored completions."""
    known = [sum(r is not None for r in group) >= least for group in drawn.rewards for _ in group]
    columns = zip(drawn.flat_rewards, known, is_masked(drawn, config), strict=True)
    return [r is not None and enough and not out for r, enough, out in columns]


def whitened(rows: list[list[float]], counted: list[bool]) -> list[list[float]]:
    """Scale to mean 0 and spread 1 over the tokens of the completions that count; all other tokens get 0."""
    known = [value for row, counts in zip(rows, counted, strict=True) if counts for value in row]
    centre, divisor = (fmean(known), spread(known) + 1e-4) if known else (0.0, 1.0)
    return [
        [(value - centre) / divisor if counts else 0.0 for value in row]
        for row, counts in zip(rows, counted, strict=True)
    ]


def per_token_kl(s: TrainingSequence) -> list[float]:
    assert s.old_logps is not None
    assert s.ref_logps is not None
    return [old - ref for old, ref in zip(s.old_logps, s.ref_logps, strict=True)]


def reinforce_pp_advantages(drawn: Drawn, config: Any) -> list[list[float]]:
    scores = [r or 0.0 for r in drawn.flat_rewards]
    centred = relative_to_group(drawn.rewards, "none") if config.baseline == "group" else scores
    rows = []
    for s, score in zip(drawn.sequences, centred, strict=True):
        price = config.beta if config.baseline == "none" else 0.0
        ahead, row = score, []
        for kl in reversed(per_token_kl(s)):
            # The score belongs to the last token and is discounted from there.
            ahead = (ahead if not row else config.gamma * ahead) - price * kl
            row.append(ahead)
        rows.append(row[::-1])
    return whitened(rows, counted(drawn, config, 2 if config.baseline == "group" else 1))


def ppo_targets(drawn: Drawn, config: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages, and returns."""
    advantages, returns = [], []
    for s, score in zip(drawn.sequences, drawn.flat_rewards, strict=True):
        assert s.values is not None
        count = len(sampled_places(s))
        earned = [-config.beta * kl for kl in per_token_kl(s)]
        earned[-1] += score or 0.0
        row, carried = [0.0] * count, 0.0
        for t in reversed(range(count)):
            following = s.values[t + 1] if t + 1 < count else 0.0
            carried = earned[t] + config.gamma * following - s.values[t] + config.gamma * config.lam * carried
            row[t] = carried
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, s.values, strict=True)])
    return whitened(advantages, counted(drawn, config)), returns


# ---- losses of a step --------------------------------------------------------------------------------------------


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: Any) -> torch.Tensor:
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    near = ratio.clamp(1 - config.epsilon, 1 + high)
    far = ratio if getattr(config, "delta", None) is None else ratio.clamp(max=config.delta)
    return -torch.minimum(far * advantages, near * advantages)


def drawn_errors(lengths: torch.Tensor, each: float) -> torch.Tensor:
    """(B, 1) errors of sums of `lengths` (B, 1) log-probs, each with an independent error of this size."""
    noise = torch.randn(lengths.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return each * lengths.sqrt() * noise


def grpo(
    model: PreTrainedModel, drawn: Drawn, step: slice, config: Any, coefficient: float | None = None
) -> Any:
    """GRPO and its relatives.

    Args:
        coefficient: the coefficient of the entropy bonus; by default that of the config.
    """
    sequences = drawn.sequences[step]
    now = padded(model, sequences, config.temperature)
    mask = learned(drawn, step, now.mask, config)
    old, behaviour = old_of(drawn, step, now.logps), column(sequences, "behaviour_logps")
    out = [o and config.filter_zero_variance for o in without_variance(drawn)]
    prompt = torch.tensor([g for g, group in enumerate(drawn.rewards) for _ in group])[step]
    counts = ~torch.tensor(out)[prompt]
    mask = mask * counts[:, None]
    if config.multi_objective_aggregation == "normalize_then_sum":
        found = by_function(drawn, config.reward_weights)
    else:
        rewards = [[None] * len(group) if o else group for group, o in zip(drawn.rewards, out, strict=True)]
        found = relative_to_group(rewards, config.scale_rewards)
    advantages = torch.tensor(found[step])[:, None].double()
    lengths = now.mask.sum(1, keepdim=True)
    log_ratio = now.logps - old
    if config.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * now.mask).sum(1, keepdim=True) / lengths).expand_as(now.mask)
    ratio, weight = log_ratio.exp(), correction(old, behaviour, now.mask, config)

    if config.loss_type == "vespo":
        drift = ((now.logps.detach() - old) * now.mask).sum(1, keepdim=True)
        # A value that all tokens of a completion share counts once.
        whole = config.vllm_importance_sampling_mode.startswith("sequence")
        corrected = weight.log()[:, :1] if whole else (weight.log() * now.mask).sum(1, keepdim=True)
        w = (drift + corrected + drawn_errors(lengths, drawn.logp_error)).clamp(math.log(1e-8), 20.0).exp()
        k = torch.where(advantages >= 0, config.vespo_k_pos, config.vespo_k_neg)
        rate = torch.where(advantages >= 0, config.vespo_lambda_pos, config.vespo_lambda_neg)
        loss = -(w**k * (rate * (1 - w)).exp()) * advantages * now.logps
    elif config.loss_type == "cispo":
        loss = -ratio.detach().clamp(max=config.epsilon_high) * advantages * now.logps * weight
    elif config.loss_type == "sapo":
        tau = torch.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        loss = -(4 / tau) / (1 + (-tau * (ratio - 1)).exp()) * advantages * weight
    else:
        loss = clipped(ratio, advantages, config) * weight

    if config.off_policy_mask_threshold is not None:
        drift = ((behaviour - now.logps.detach()) * now.mask).sum(1, keepdim=True) / lengths
        loss = loss * ~((advantages < 0) & (drift > config.off_policy_mask_threshold))
    chosen = mask
    if config.top_entropy_quantile < 1.0 and mask.any():
        entropies = now.entropies.detach()
        threshold = torch.quantile(entropies[mask > 0], 1 - config.top_entropy_quantile)
        assume(not drawn.anew or not bool(((entropies[mask > 0] - threshold).abs() < 2e-6).any()))
        # Equal entropies must be on the same side of the threshold, for any rounding of the last bit.
        chosen = mask * (entropies >= threshold - 1e-6)
        loss = loss * chosen
    if config.beta:
        gap = column(sequences, "ref_logps") - now.logps
        kl = gap.exp() - gap - 1
        loss = loss + config.beta * (kl * ratio if config.use_bias_correction_kl else kl)

    count = max(int(counts.sum()), 1)
    if config.average_by_prompt:
        means = [
            (loss * mask)[prompt == p].sum() / mask[prompt == p].sum().clamp(min=1)
            for p in prompt[counts].unique()
        ]
        total = sum(means) / max(len(means), 1) if means else (loss * 0).sum()
    elif config.loss_type in ("grpo", "sapo"):
        total = ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / count
    elif config.loss_type == "dr_grpo":
        total = (loss * mask).sum() / (count * config.max_completion_length)
    elif config.loss_type == "luspo":
        total = (loss * mask).sum() / count
    else:
        total = (loss * mask).sum() / mask.sum().clamp(min=1)
    bonus = (now.entropies * chosen).sum() / chosen.sum().clamp(min=1)
    return total - (config.entropy_coef if coefficient is None else coefficient) * bonus


def rloo(model: PreTrainedModel, drawn: Drawn, step: slice, config: Any) -> torch.Tensor:
    """The clipped loss of whole completions, with its gradient written out.

    The gradient of a completion's ratio is ratio × Σ weight × gradient of each log-prob. A clipped completion has no
    gradient.
    """
    sequences = drawn.sequences[step]
    now = padded(model, sequences, config.temperature)
    old = old_of(drawn, step, now.logps)
    mask = learned(drawn, step, now.mask, config)
    weight = correction(old, column(sequences, "behaviour_logps"), now.mask, config)
    advantages = torch.tensor(leave_one_out(drawn, config)[step], dtype=torch.float64)
    ratio = ((now.logps.detach() - old) * now.mask).sum(1).exp()
    outside = ((ratio > 1 + config.epsilon_high) & (advantages > 0)) | (
        (ratio < 1 - config.epsilon) & (advantages < 0)
    )
    pull = torch.where(outside, 0.0, ratio * advantages)
    sloped = -(pull * (weight * now.logps * mask).sum(1)).sum() / len(sequences)
    counted = mask.any(1).to(ratio)
    value = (clipped(ratio, advantages, config) * counted).sum() / len(sequences)
    return sloped - sloped.detach() + value


def online_dpo(model: PreTrainedModel, drawn: Drawn, step: slice, config: Any, beta: float) -> torch.Tensor:
    """The mean over all pairs of the step. A pair without a preference adds nothing to the gradient."""
    sequences = drawn.sequences[step]
    now = padded(model, sequences, config.temperature)
    gains = ((now.logps - column(sequences, "ref_logps")) * now.mask).sum(1)
    penalty = config.missing_eos_penalty or 0.0
    rewards = [
        None if r is None else r - penalty * cut
        for r, cut in zip(drawn.flat_rewards[step], drawn.cut[step], strict=True)
    ]
    total = gains.sum() * 0
    for i in range(0, len(rewards), 2):
        first, second = rewards[i], rewards[i + 1]
        if first is None or second is None or first == second:
            continue
        better, worse = (i, i + 1) if first > second else (i + 1, i)
        margin = gains[better] - gains[worse]
        if config.loss_type == "ipo":
            total = total + (margin - 1 / (2 * beta)) ** 2
        else:
            total = total + torch.log1p(torch.exp(-beta * margin))
    return total / (len(rewards) / 2)


def reinforce_pp(model: PreTrainedModel, drawn: Drawn, step: slice, config: Any) -> torch.Tensor:
    sequences = drawn.sequences[step]
    now = padded(model, sequences, config.temperature)
    old = old_of(drawn, step, now.logps)
    mask = learned(drawn, step, now.mask, config)
    weight = correction(old, column(sequences, "behaviour_logps"), now.mask, config)
    advantages = table(sequences, reinforce_pp_advantages(drawn, config)[step])
    loss = clipped((now.logps - old).exp(), advantages, config) * weight
    if config.baseline == "group":
        loss = loss + config.beta * (now.logps - column(sequences, "ref_logps")) ** 2 / 2
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def ppo(
    model: PreTrainedModel, critic: torch.nn.Linear, drawn: Drawn, step: slice, config: Any
) -> torch.Tensor:
    sequences = drawn.sequences[step]
    now = padded(model, sequences, config.temperature)
    old = old_of(drawn, step, now.logps)
    mask = learned(drawn, step, now.mask, config)
    weight = correction(old, column(sequences, "behaviour_logps"), now.mask, config)
    advantages, returns = (table(sequences, rows[step]) for rows in ppo_targets(drawn, config))
    policy = clipped((now.logps - old).exp(), advantages, config) * weight
    values, before = now.hidden @ critic.weight[0] + critic.bias[0], column(sequences, "values")
    near = torch.clamp(values, before - config.cliprange_value, before + config.cliprange_value)
    # A completion without a score has no return to learn.
    known = torch.tensor([[float(r is not None)] for r in drawn.flat_rewards[step]], dtype=torch.float64)
    value = known * torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
    return ((policy + config.vf_coef * value) * mask).sum() / mask.sum().clamp(min=1)
