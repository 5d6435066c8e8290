"""Every method's gradients equal a plain padded reference, however its generation is cut into steps, micro-batches and packs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import reference_methods as plain
import torch
from blocks import small_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import sampled_places
from reference_methods import Drawn
from tiny import make_model

from lockstep import (
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from lockstep.engines.protocol import Completion, RequestKey
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.judges import judge_pairs, judged
from lockstep.training.generation import prepare_generation, sequences_of
from lockstep.training.grpo import GRPOObjective
from lockstep.training.objective import Objective
from lockstep.training.online_dpo import OnlineDPOObjective
from lockstep.training.packing import TrainingSequence
from lockstep.training.phases import PhaseClock
from lockstep.training.ppo import PPOObjective
from lockstep.training.reinforce_pp import ReinforcePPObjective
from lockstep.training.rloo import RLOOObjective
from lockstep.training.tree_attention import adopt_tree_attention
from lockstep.training.update import Policy, UpdateSums, learn, score_all

pytestmark = pytest.mark.usefixtures("one_thread")

# In double precision a difference is a mistake. What is left is the float32 of advantages, values and columns.
MODEL = make_model("qwen2").double()


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    """Packs of these sizes attend by trees too, as long ones do."""
    adopt_tree_attention(MODEL)
    with small_blocks():
        yield


LIMIT = 1e-5
few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def make_critic() -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(7)
    critic = torch.nn.Linear(64, 1).double()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return critic


@st.composite
def shapes(draw: st.DrawFn, sizes: tuple[int, ...] = (2, 4)) -> dict[str, Any]:
    """How a generation looks: steps × micro-batches × groups, lengths, rewards, and where packs are cut."""
    size = draw(st.sampled_from(sizes))
    steps, micro = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    groups = steps * micro * draw(st.integers(1, 2))
    count = groups * size
    rewards = [
        # Few values, so that groups agree and pairs are tied.
        draw(st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5, None]), min_size=size, max_size=size))
        for _ in range(groups)
    ]
    if all(reward is None for group in rewards for reward in group):
        rewards[0][0] = 1.0
    return {
        "size": size,
        "steps": steps,
        "micro": micro,
        "rewards": rewards,
        "lengths": draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        # Before which of its tokens something is put into each completion.
        "holes": draw(st.lists(st.just([]) | st.lists(st.integers(0, 9), max_size=4), min_size=count, max_size=count)),
        "cut": draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        "prompts": draw(st.lists(st.integers(1, 12), min_size=groups, max_size=groups)),
        "moved": draw(st.booleans()),
        "budget": draw(st.integers(1, 200)),
        "chunk": draw(st.integers(1, 40)),
        "seed": draw(st.integers(0, 10**6)),
    }


def single(values: torch.Tensor) -> tuple[float, ...]:
    """As they cross to the loss: in float32."""
    return tuple(values.float().tolist())


def drawn_of(shape: dict[str, Any], temperature: float) -> Drawn:
    generator = torch.Generator().manual_seed(shape["seed"])

    def ids(count: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, high, (count,), generator=generator).tolist())

    sequences, lengths, holes = [], iter(shape["lengths"]), iter(shape["holes"])
    for g, length in enumerate(shape["prompts"]):
        prompt = (5, 6, *ids(length, 60))
        for i in range(shape["size"]):
            # Few distinct tokens, so that branches meet.
            sampled = [True] * next(lengths)
            for place in next(holes):
                sampled.insert(place, False)
            mask = None if all(sampled) else tuple(sampled)
            sequences.append(TrainingSequence(f"p{g}#{i}", prompt, ids(len(sampled), 9), (), sampled=mask))
    with torch.no_grad():
        rows = plain.padded(MODEL, sequences, temperature).logps

    def noise(count: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    known = []
    for s, row in zip(sequences, rows, strict=True):
        count = len(sampled_places(s))
        old = row[:count] + (noise(count, 0.25) if shape["moved"] else 0.0)
        known.append(
            replace(
                s,
                old_logps=single(old),
                behaviour_logps=single(old + noise(count, 0.4)),
                ref_logps=single(row[:count] + noise(count, 0.5)),
                values=single(noise(count, 1.0)),
            )
        )
    return Drawn(known, shape["rewards"], shape["cut"], shape["moved"])


def groups_of(drawn: Drawn) -> list[RolloutGroup]:
    """The same, as the engine and the reward functions give it."""
    sequences, cut = iter(drawn.sequences), iter(drawn.cut)
    groups = []
    for g, rewards in enumerate(drawn.rewards):
        rollouts = []
        for i, reward in enumerate(rewards):
            s = next(sequences)
            n, own = len(s.completion_ids), iter(s.behaviour_logps)
            logps = tuple(next(own) if s.sampled is None or s.sampled[place] else 0.0 for place in range(n))
            reason = "length" if next(cut) else "stop"
            key = RequestKey(f"p{g}", i)
            completion = Completion(key, s.prompt_ids, s.completion_ids, logps, (0,) * n, reason, s.sampled)  # type: ignore[arg-type]
            scores = {"first": reward, "second": plain.second_score(reward)}
            rollouts.append(Rollout(completion, f"text {g} {i}", scores, math.nan if reward is None else reward))
        groups.append(RolloutGroup(Prompt(f"p{g}", s.prompt_ids, "text"), tuple(rollouts)))
    return groups


def config(kind: type, shape: dict[str, Any], **fields: Any) -> Any:
    completions = len(shape["lengths"])
    parts = shape["steps"] * shape["micro"]
    base: dict[str, Any] = {"output_dir": "unused", "bf16": False, "report_to": []}
    base |= {"token_budget": shape["budget"], "logits_chunk_size": shape["chunk"], "temperature": 0.8}
    base |= {"gradient_accumulation_steps": shape["micro"], "save_strategy": "no"}
    if kind is OnlineDPOConfig:
        base |= {"per_device_train_batch_size": completions // shape["micro"] // 2}
    else:
        base |= {"per_device_train_batch_size": completions // parts, "num_generations": shape["size"]}
        base |= {"steps_per_generation": parts, "max_completion_length": 9}
    return kind(**{**base, **fields})


def gradients(*parts: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for i, part in enumerate(parts):
        for name, p in part.named_parameters():
            found[f"{i}.{name}"] = p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        part.zero_grad()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).norm())
        assert difference <= LIMIT * float(gradient.norm()) + 1e-7 * largest + 1e-9, (name, difference, largest)


def check(
    objective: Objective[Any],
    shape: dict[str, Any],
    reference: Callable[[Drawn, slice], torch.Tensor],
    critic: torch.nn.Linear | None = None,
    drawn: Drawn | None = None,
    groups: list[RolloutGroup] | None = None,
) -> list[dict[str, float]]:
    """Gradients of each optimizer step, side by side; gives what the steps logged."""
    run = objective.config
    drawn = drawn or drawn_of(shape, run.temperature)
    groups = groups or groups_of(drawn)
    sampled_alone = [replace(s, old_logps=None, ref_logps=None, values=None) for s in drawn.sequences]
    assert sequences_of(groups) == sampled_alone
    generation = prepare_generation(groups, objective, 0, drawn.sequences)
    assert generation.sampled_tokens == sum(shape["lengths"])
    if not drawn.moved:
        generation = generation.without_old_logps()
    policy = Policy(MODEL, contextlib.nullcontext, lambda loss: loss.backward(), critic)
    parts = [MODEL, *([critic] if critic is not None else [])]
    logged, size = [], run.completions_per_step
    for step in range(len(drawn.sequences) // size):
        expected_loss = reference(drawn, slice(step * size, (step + 1) * size))
        expected_loss.backward()
        expected = gradients(*parts)
        sequences = objective.prepare_step(
            generation.step(step, shape["micro"]), lambda those: score_all(policy, those, run).entropies
        )
        prepared = generation.with_step(step, shape["micro"], sequences)
        sums = UpdateSums()
        for micro in prepared.micro_batches[step * shape["micro"] : (step + 1) * shape["micro"]]:
            learn(policy, micro, objective, PhaseClock(), sums)
        logged.append(sums.tally.figures() | objective.finish_step(sums.tally))
        assert sums.gap.tokens == sum(len(s.behaviour_logps) for s in sequences)
        assert_same(gradients(*parts), expected)
    return logged


GRPO_VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.3, "mask_truncated_completions": True},
    "dr_grpo, plain KL": {
        "loss_type": "dr_grpo",
        "beta": 0.3,
        "use_bias_correction_kl": False,
        "scale_rewards": "none",
    },
    "bnpo, entropy": {"loss_type": "bnpo", "entropy_coef": 0.2, "mask_truncated_completions": True},
    "dapo, KL, entropy, quantile": {"beta": 0.1, "entropy_coef": 0.2, "top_entropy_quantile": 0.4},
    "quantile, masked": {"top_entropy_quantile": 0.3, "mask_truncated_completions": True, "scale_rewards": "batch"},
    "dual clip": {"delta": 1.5, "epsilon_high": 0.4, "vllm_importance_sampling_mode": "sequence_mask"},
    "GSPO": {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.2},
    "LUSPO": {"importance_sampling_level": "sequence", "loss_type": "luspo", "mask_truncated_completions": True},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 1.3, "entropy_coef": 0.1},
    "SAPO": {"loss_type": "sapo", "beta": 0.1, "mask_truncated_completions": True},
    "VESPO": {"loss_type": "vespo", "off_policy_mask_threshold": 0.1, "mask_truncated_completions": True},
    "VESPO, KL": {"loss_type": "vespo", "beta": 0.1, "top_entropy_quantile": 0.5},
    "GDPO": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    "IcePop": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.7,
        "vllm_importance_sampling_clip_max": 1.4,
    },
    "sequences truncated": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_min": 0.6,
        "loss_type": "grpo",
    },
    "geometric mask": {
        "vllm_importance_sampling_mode": "sequence_geometric_mask",
        "vllm_importance_sampling_clip_min": 0.9,
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "ScaleRL": {
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "scale_rewards": "advantages",
        "average_by_prompt": True,
        "filter_zero_variance": True,
    },
    "by prompt, KL, masked": {"average_by_prompt": True, "beta": 0.1, "mask_truncated_completions": True},
    "filtered, grpo, KL": {"loss_type": "grpo", "filter_zero_variance": True, "beta": 0.2},
    "filtered, dapo, entropy, quantile": {
        "filter_zero_variance": True,
        "entropy_coef": 0.2,
        "top_entropy_quantile": 0.5,
        "mask_truncated_completions": True,
        "scale_rewards": "batch",
    },
}


@pytest.mark.parametrize("variant", sorted(GRPO_VARIANTS))
@few
@given(shape=shapes())
def test_grpo_equals_the_padded_reference(variant: str, shape: dict[str, Any]) -> None:
    run = config(GRPOConfig, shape, **GRPO_VARIANTS[variant])
    check(GRPOObjective(run), shape, lambda drawn, step: plain.grpo(MODEL, drawn, step, run))


def test_gdpo_leaves_a_group_whose_scores_agree_without_an_advantage_of_the_last_bit() -> None:
    shape = {"size": 2, "steps": 2, "micro": 1, "rewards": [[0.0, 0.0], [0.0, 1.0]], "lengths": [1, 1, 1, 1]}
    shape |= {"cut": [False] * 4, "prompts": [1, 1], "moved": False, "budget": 1, "chunk": 1, "seed": 0}
    shape |= {"holes": [[]] * 4}
    run = config(GRPOConfig, shape, **GRPO_VARIANTS["GDPO"])
    check(GRPOObjective(run), shape, lambda drawn, step: plain.grpo(MODEL, drawn, step, run))


@few
@given(shape=shapes(), entropies=st.lists(st.sampled_from([0.5, 9.0]), min_size=1, max_size=5))
def test_the_adaptive_bonus_counts_only_after_a_step_of_low_entropy_and_moves_within_its_bounds(
    shape: dict[str, Any], entropies: list[float]
) -> None:
    fields = {"entropy_coef": 0.2, "entropy_coef_delta": 0.15, "entropy_coef_min": 0.1, "entropy_coef_max": 0.4}
    run = config(GRPOConfig, shape, use_adaptive_entropy=True, **fields)
    objective = GRPOObjective(run)
    drawn = drawn_of(shape, run.temperature)
    coefficient, low = 0.2, False
    for target in entropies:
        run.entropy_target = target
        with torch.no_grad():
            now = plain.padded(MODEL, drawn.sequences, run.temperature)
        # The last step's entropy is compared with the target as it stands, so all steps of a shape have to agree.
        size = run.completions_per_step
        means = [
            float((now.entropies[i : i + size]).sum() / now.mask[i : i + size].sum())
            for i in range(0, len(drawn.sequences), size)
        ]
        assert all((mean <= target) == (means[0] <= target) for mean in means)
        state = objective.state()
        expected = state["entropy_coef"] if state["last_entropy"] <= target else 0.0
        assert state["entropy_coef"] == pytest.approx(coefficient)
        steps = []
        for mean in means:
            steps.append(expected)
            low = mean <= target
            coefficient = min(max(coefficient + (0.15 if low else -0.15), 0.1), 0.4)
            expected = coefficient if low else 0.0
        coefficients = iter(steps)
        check(
            objective,
            shape,
            lambda d, step, c=coefficients: plain.grpo(MODEL, d, step, run, next(c)),
            drawn=drawn,
        )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize_advantages": True, "mask_truncated_completions": True},
        {"beta": 0.0, "reward_clip_range": (0.5, 2.0)},
        {"reward_clip_range": (0.5, 2.0), "vllm_importance_sampling_mode": "sequence_mask"},
    ],
    ids=str,
)
@few
@given(shape=shapes())
def test_rloo_equals_the_padded_reference(fields: dict[str, Any], shape: dict[str, Any]) -> None:
    run = config(RLOOConfig, shape, **fields)
    check(RLOOObjective(run), shape, lambda drawn, step: plain.rloo(MODEL, drawn, step, run))


@pytest.mark.parametrize(
    "fields", [{}, {"loss_type": "ipo"}, {"missing_eos_penalty": 1.5}, {"beta": [0.5, 0.2]}], ids=str
)
@few
@given(shape=shapes(sizes=(2,)), epoch=st.integers(0, 2))
def test_online_dpo_equals_the_padded_reference(fields: dict[str, Any], shape: dict[str, Any], epoch: int) -> None:
    shape |= {"steps": 1, "moved": False}
    run = config(OnlineDPOConfig, _even(shape), **fields)
    objective = OnlineDPOObjective(run)
    objective.epoch = epoch
    beta = run.beta[min(epoch, len(run.beta) - 1)]
    (logged,) = check(objective, shape, lambda drawn, step: plain.online_dpo(MODEL, drawn, step, run, beta))
    assert logged["beta"] == beta


def _even(shape: dict[str, Any]) -> dict[str, Any]:
    """As many micro-batches as divide the pairs."""
    while len(shape["rewards"]) % shape["micro"]:
        shape["micro"] -= 1
    return shape


class Fixed:
    """A judge with its verdicts ready."""

    def __init__(self, verdicts: list[int]) -> None:
        self.verdicts = verdicts

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        return self.verdicts


@few
@given(shape=shapes(sizes=(2,)), seed=st.integers(0, 99))
def test_online_dpo_with_a_judge_prefers_as_the_judge_does(shape: dict[str, Any], seed: int) -> None:
    shape |= {"steps": 1, "moved": False}
    run = config(OnlineDPOConfig, _even(shape))
    generator = torch.Generator().manual_seed(seed)
    verdicts = torch.randint(-1, 2, (len(shape["rewards"]),), generator=generator).tolist()
    values = {0: [1.0, 0.0], 1: [0.0, 1.0], -1: [None, None]}
    drawn = drawn_of(shape, run.temperature)
    seen = replace(drawn, rewards=[[None, None]] * len(verdicts))
    groups = groups_of(seen)
    groups = [judged(g, v) for g, v in zip(groups, judge_pairs(groups, Fixed(verdicts)), strict=True)]
    drawn = replace(drawn, rewards=[values[v] for v in verdicts])
    (logged,) = check(
        OnlineDPOObjective(run),
        shape,
        lambda d, step: plain.online_dpo(MODEL, d, step, run, run.beta[0]),
        drawn=drawn,
        groups=groups,
    )
    assert logged["pairs/undecided"] == pytest.approx(verdicts.count(-1) / len(verdicts))


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.1},
        {"beta": 0.0, "mask_truncated_completions": True},
        {"beta": 0.2, "gamma": 0.9},
        {"beta": 0.2, "baseline": "group", "mask_truncated_completions": True},
    ],
    ids=str,
)
@few
@given(shape=shapes())
def test_reinforce_pp_equals_the_padded_reference(fields: dict[str, Any], shape: dict[str, Any]) -> None:
    run = config(ReinforcePPConfig, shape, **fields)
    check(ReinforcePPObjective(run), shape, lambda drawn, step: plain.reinforce_pp(MODEL, drawn, step, run))


@pytest.mark.parametrize(
    "fields", [{}, {"gamma": 0.9, "vf_coef": 2.0}, {"lam": 0.5, "mask_truncated_completions": True}], ids=str
)
@few
@given(shape=shapes(sizes=(1, 2)))
def test_ppo_equals_the_padded_reference_in_policy_and_value_head(
    fields: dict[str, Any], shape: dict[str, Any]
) -> None:
    run, critic = config(PPOConfig, shape, **fields), make_critic()
    check(PPOObjective(run), shape, lambda drawn, step: plain.ppo(MODEL, critic, drawn, step, run), critic)
