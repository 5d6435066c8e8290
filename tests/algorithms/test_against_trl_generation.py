"""Our advantages and importance weights equal those of TRL 1.16's own `_generate_and_score_completions` for the same
rewards and log-probs. The test gives generation, scores and rewards to TRL's method; everything after them is TRL's
own code."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_batches import Batch, random_batch, without_model

from lockstep.algorithms.advantages import (
    compared,
    group_advantages,
    leave_one_out_advantages,
    normalised_reward_advantages,
    whiten,
)
from lockstep.algorithms.corrections import importance_weights, k1

pytest.importorskip("trl", reason="TRL is not installed here")

GROUP = 4
WEIGHTS = torch.tensor([1.0, 0.3])


def random_scores(seed: int, groups: int = 5) -> torch.Tensor:
    """(groups × 4, 2) scores: some are missing; a group has equal scores, no score, or a single score."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(groups * GROUP, 2, generator=random) * torch.tensor([1.0, 20.0])
    scores[torch.rand(scores.shape, generator=random) < 0.15] = math.nan
    scores[GROUP : 2 * GROUP] = torch.tensor([0.1, 0.7])
    scores[2 * GROUP : 3 * GROUP] = math.nan
    scores[3 * GROUP : 4 * GROUP - 1] = math.nan
    return scores


def summed(scores: torch.Tensor) -> list[torch.Tensor]:
    """Weighted sums over the reward functions, one tensor per group; NaN where no function gave a score."""
    totals = (scores * WEIGHTS).nansum(1).masked_fill(scores.isnan().all(1), math.nan)
    return list(totals.split(GROUP))


def trl_output(
    trainer_class: type, scores: torch.Tensor, batch: Batch | None = None, **attributes: object
) -> Any:
    """TRL's result for rewards and for the log-probs of `batch`: `old` from the policy, `behaviour` from the engine."""
    if batch is None:
        batch = random_batch(0, (2,) * len(scores))
    ids = [[1] * length for length in batch.segments.lengths.tolist()]
    engine = [part.tolist() for part in batch.behaviour.split(batch.segments.lengths.tolist())]
    prompts, names = [[1]] * len(ids), ["first", "second"]
    answers: tuple[object, ...] = (prompts, ids, None, names, engine, {}, None, None)
    if trainer_class.__name__ == "RLOOTrainer":
        answers = (prompts, ids, names)
    reference = object()
    trainer = without_model(
        trainer_class,
        lambda model, *_, **__: (
            batch.padded(batch.reference if model is reference else batch.old),
            None,
            None,
        ),
        **{
            "args": SimpleNamespace(
                per_device_train_batch_size=len(ids),
                steps_per_generation=1,
                gradient_accumulation_steps=1,
                gradient_checkpointing_kwargs=None,
            ),
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "_generate": lambda _: answers,
            "_calculate_rewards": lambda *_: scores.clone(),
            "_logs": {"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": []},
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "pad_to_multiple_of": None,
            "mask_truncated_completions": False,
            "num_iterations": 1,
            "num_generations": GROUP,
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "beta": 0.0,
            "ref_model": reference,
            "reward_weights": WEIGHTS,
            "reward_funcs": names,
            "reward_func_names": names,
            "reward_clip_range": None,
            "multi_objective_aggregation": "sum_then_normalize",
            "scale_rewards": "group",
            "normalize_advantages": False,
            **attributes,
        },
    )
    return trainer._generate_and_score_completions([{"prompt": "p"}] * len(ids))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trls(scale: str, seed: int) -> None:
    from trl import GRPOTrainer

    scores = random_scores(seed)
    theirs = trl_output(GRPOTrainer, scores, scale_rewards=scale)["advantages"]
    ours = torch.cat(group_advantages(summed(scores), scale))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_normalised_for_each_reward_function_are_trls(seed: int) -> None:
    from trl import GRPOTrainer

    scores = random_scores(seed)
    theirs = trl_output(GRPOTrainer, scores, multi_objective_aggregation="normalize_then_sum")["advantages"]
    ours = torch.cat(normalised_reward_advantages(list(scores.split(GROUP)), WEIGHTS))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_leave_one_out_advantages_are_trls(beta: float, normalised: bool, seed: int) -> None:
    from trl import RLOOTrainer

    scores, batch = random_scores(seed), random_batch(seed, (3, 1, 4, 2, 6) * 4)
    theirs = trl_output(RLOOTrainer, scores, batch, beta=beta, normalize_advantages=normalised)["advantages"]
    prices = beta * batch.segments.sums(k1(batch.old, batch.reference))
    rewards = list((torch.cat(summed(scores)) - prices).split(GROUP))
    ours = torch.cat(leave_one_out_advantages(rewards))
    if normalised:
        ours = whiten(ours, torch.cat(compared(rewards)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [(None, 1.05), (0.96, None), (0.9, 1.1)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_are_trls(mode: str, bounds: tuple[float | None, float | None]) -> None:
    from trl import GRPOTrainer

    batch = random_batch(3, (3, 1, 4, 2))
    theirs = trl_output(
        GRPOTrainer,
        random_scores(0)[:GROUP],
        batch,
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=bounds[0],
        vllm_importance_sampling_clip_max=bounds[1],
    )["importance_sampling_ratio"]
    ours = importance_weights(batch.old, batch.behaviour, batch.segments, mode, *bounds)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs.expand(-1, 4)[batch.mask.bool()], rtol=1e-5, atol=1e-6)
    assert (ours != torch.exp(batch.old - batch.behaviour)).any()


def test_trl_gives_advantages_to_equal_rewards_whose_mean_rounds_and_ours_are_zero() -> None:
    from trl import GRPOTrainer

    scores = torch.full((GROUP * 2, 2), math.nan)
    scores[:, 0] = torch.tensor([0.11, 0.11, 0.11, math.nan] * 2)
    theirs = trl_output(GRPOTrainer, scores, scale_rewards="group")["advantages"]
    assert 0 < theirs.abs().max() < 1e-3
    assert torch.cat(group_advantages(summed(scores), "group")).tolist() == [0.0] * 8
