"""The whole GRPO trainer beside TRL's: the same tokens give the same gradients, losses and logged figures.

CI compares every loss, level, correction and scale; their combinations are compared before a release. The formulas of
all losses and corrections are also compared with TRL's on made-up batches, which takes no run
(`tests/algorithms/test_against_trl_loss.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import correction
from methods import PROMPTS, lora
from pairs import (
    CLIPS,
    Played,
    assert_same_figures,
    assert_same_gradients,
    both,
    distance,
    longer,
    norm,
    ours,
    rounder,
    shifted_engine,
    theirs,
)
from portions import portion

from lockstep.contract.protocol import Engine

pytest.importorskip("trl", reason="TRL is not installed here")

LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
LEVELS = ["token", "sequence"]
SCALES = ["group", "batch", "none"]
MODES = [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
# The engine's log-probs are off by more than this, so every kind of bound has an effect.
BOUNDS = (0.9998, 1.0002)
# Both sides set this field, because TRL has another default (P6).
TOKENS = {"vllm_importance_sampling_mode": "token_truncate"}
GROUPS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    # In the second pass the policy has changed, so clips have an effect.
    "num_iterations": 2,
    **TOKENS,
}
ALWAYS = {
    "loss", "grad_norm", "entropy", "reward", "reward_std", "frac_reward_zero_std", "rewards/longer/mean",
    "rewards/longer/std",
    "num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
}  # fmt: skip
LOGGED = {"cispo": {"cispo_clip_ratio"}, "vespo": {"vespo/phi_seq_mean"}, "sapo": set[str]()}
# TRL logs the weights that it applies; Lockstep logs the raw ratios (docs/reference/migrating-from-trl.md).
RATIOS = frozenset({"sampling/importance_sampling_ratio/"})


@pytest.fixture(scope="module")
def engine(talkative_dir: str) -> Any:
    return shifted_engine(talkative_dir)


def grpo(
    model: str, folder: Path, engine: Engine, fields: dict[str, Any], **arguments: Any
) -> tuple[Played, Played]:
    return both("GRPO", model, folder, engine, {**GROUPS, **fields}, **arguments)


def settings() -> list[Any]:
    """All combinations of losses, levels and corrections that TRL takes, with alternating scales.

    A fifth of them has no mark: every loss, level, correction and scale occurs in it. The rest is marked `release`.
    """
    found = []
    taken = [
        s
        for s in product(LOSSES, LEVELS, MODES)
        if not (s[0] == "vespo" and (s[2] or "").startswith("sequence"))
    ]
    for number, (loss, level, mode) in enumerate(taken):
        marks = [pytest.mark.release] if (number + number // 5) % 5 else []
        found.append(pytest.param(loss, level, SCALES[(number + number // 3) % 3], mode, marks=marks))
    return found


@pytest.mark.parametrize(("loss", "level", "scale", "mode"), settings())
def test_gradients_loss_and_figures_are_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine, loss: str, level: str, scale: str, mode: str | None
) -> None:
    fields: dict[str, Any] = {
        "loss_type": loss,
        "importance_sampling_level": level,
        "scale_rewards": scale,
        "beta": 0.04,
    }
    fields |= {"epsilon": 0.01, "epsilon_high": 1.01 if loss == "cispo" else 0.012}
    if scale == "none":
        # Advantages are about six times as large; with this learning rate the policy changes by the same amount.
        fields["learning_rate"] = 2e-4
    fields |= correction(mode, *BOUNDS) if mode else {"vllm_importance_sampling_correction": False}
    mine, other = grpo(talkative_dir, tmp_path, engine, fields)
    assert_same_gradients(mine, other)
    assert_same_figures(mine, other, but=RATIOS, at_least=ALWAYS | LOGGED.get(loss, CLIPS) | {"kl"})
    # The logged ratios are raw in every mode, and also without a correction.
    assert all(log["sampling/importance_sampling_ratio/max"] > 1.0002 for log in mine.logs)
    assert all(0.999 < log["sampling/effective_sample_size"] < 1 for log in mine.logs)


@pytest.mark.parametrize("loss", portion(LOSSES, lambda loss: loss in ("dapo", "vespo")))
def test_gradients_and_loss_are_trls_in_float32(
    talkative_dir: str, tmp_path: Path, engine: Engine, loss: str
) -> None:
    fields = {
        "loss_type": loss,
        "epsilon": 0.01,
        "epsilon_high": 1.01 if loss == "cispo" else 0.012,
        "num_iterations": 1,
    }
    mine, other = grpo(talkative_dir, tmp_path, engine, fields, dtype=torch.float32)
    # Rounding depends on the processor, and our run may be on a GPU: 1.02e-5 (vespo, second step) on an Intel Xeon
    # with AVX-512; 1.6e-5 (vespo's loss) between the CPU and the pretend GPU, whose attention is not fused.
    assert_same_gradients(mine, other, cancels=0.5, limit=2e-5)


def test_the_settings_above_clip_and_correct(talkative_dir: str, tmp_path: Path, engine: Engine) -> None:
    """If nothing were clipped or corrected, the comparison would show nothing."""
    base = {"epsilon": 0.01, "epsilon_high": 0.012}
    plain, _ = grpo(talkative_dir, tmp_path / "plain", engine, base)
    figures = plain.logs[1]
    assert min(figures["clip_ratio/low_mean"], figures["clip_ratio/high_mean"]) > 0.05
    for mode in MODES[1:]:
        fields = {**base, **correction(str(mode), *BOUNDS)}
        corrected, _ = ours("GRPO", talkative_dir, tmp_path / str(mode), engine, {**GROUPS, **fields})
        gradient = plain.gradients[0]
        assert distance(corrected.gradients[0], gradient) > 3e-5 * norm(gradient.values()), mode


OPTIONS: dict[str, dict[str, Any]] = {
    # The bounds are far from 1, so every weight equals a bound.
    "tokens' weights cut": correction("token_truncate", None, 0.8),
    "completions' weights raised": correction("sequence_truncate", 1.3, None) | {"loss_type": "grpo"},
    "temperature": {"temperature": 0.7, "beta": 0.04},
    "one pass": {"num_iterations": 1},
    "plain KL": {"beta": 0.04, "use_bias_correction_kl": False},
    "dual clip": {"delta": 1.005, "epsilon": 0.01, "epsilon_high": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.001},
    "high entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.02},
    "entropy bonus": {"entropy_coef": 0.05, "loss_type": "dr_grpo"},
    "adaptive bonus": {
        "use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.02, "entropy_target": 4.0,
        "max_steps": 4,
    },
    "adaptive bonus, at rest": {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 1.0},
    "reference in step": {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3},
    "all at once": {
        "beta": 0.02, "delta": 1.005, "entropy_coef": 0.02, "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 0.001,
        "importance_sampling_level": "sequence", "loss_type": "grpo",
    },
}  # fmt: skip
MORE = {name: {"policy_loss", "entropy_coef"} for name, fields in OPTIONS.items() if "entropy_coef" in fields}


@pytest.fixture(scope="module")
def plain(
    talkative_dir: str, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Played]:
    """A run without any option, by its number of steps."""

    def run(steps: int) -> Played:
        folder = tmp_path_factory.mktemp("plain")
        return ours("GRPO", talkative_dir, folder, engine, {**GROUPS, "max_steps": steps})[0]

    return functools.cache(run)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine, plain: Callable[[int], Played], option: str
) -> None:
    fields = OPTIONS[option]
    mine, other = grpo(talkative_dir, tmp_path, engine, fields)
    assert_same_gradients(mine, other)
    if option not in ("one pass", "adaptive bonus, at rest"):
        without = plain(len(mine.gradients)).gradients
        moved = [distance(a, b) / norm(b.values()) for a, b in zip(mine.gradients, without, strict=True)]
        assert max(moved) > 1e-3
    cut = RATIOS if "weights" in option else frozenset[str]()
    assert_same_figures(mine, other, but=cut, at_least=ALWAYS | CLIPS | MORE.get(option, set()))


def test_trl_refuses_vespo_with_the_corrections_of_whole_completions(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    """Lockstep takes these combinations: `test_methods.py` has their padded reference."""
    fields = {**GROUPS, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}
    _, sampled = ours("GRPO", talkative_dir, tmp_path / "ours", engine, fields)
    with pytest.raises(ValueError, match="VESPO loss requires"):
        theirs("GRPO", talkative_dir, tmp_path / "theirs", sampled, {**fields, "use_vllm": True})


def test_the_sum_of_several_rewards_is_trls_and_so_are_their_figures(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    for scale in ("group", "batch"):
        fields = {"reward_weights": [0.2, 30.0], "scale_rewards": scale}
        mine, other = grpo(talkative_dir, tmp_path / scale, engine, fields, reward_funcs=[longer, rounder])
        assert_same_gradients(mine, other)
        assert_same_figures(
            mine, other, but=frozenset(), at_least=ALWAYS | {"rewards/rounder/mean", "rewards/rounder/std"}
        )


def test_gdpo_is_trls(talkative_dir: str, tmp_path: Path, engine: Engine) -> None:
    fields = {"reward_weights": [0.7, 0.3], "multi_objective_aggregation": "normalize_then_sum"}
    mine, other = grpo(talkative_dir, tmp_path, engine, fields, reward_funcs=[longer, rounder])
    assert_same_gradients(mine, other)
    assert_same_figures(
        mine, other, but=frozenset(), at_least=ALWAYS | {"rewards/rounder/mean", "rewards/rounder/std"}
    )


def test_an_adapters_gradients_are_trls_and_its_reference_is_the_model_without_it(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    mine, other = grpo(
        talkative_dir, tmp_path, engine, {"beta": 0.3, "learning_rate": 0.1}, peft_config=lora()
    )
    assert all("lora_" in name for name in mine.gradients[0])
    assert mine.logs[1]["kl"] > 1e-3
    assert_same_gradients(mine, other)
    assert_same_figures(mine, other, but=frozenset(), at_least=ALWAYS | CLIPS | {"kl"})


def test_accumulated_gradients_are_trls_and_only_trls_figures_are_means_of_micro_batches(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    mine, other = grpo(talkative_dir, tmp_path, engine, {"gradient_accumulation_steps": 2})
    assert_same_gradients(mine, other)
    means = frozenset({"entropy", "clip_ratio/"})
    assert_same_figures(mine, other, but=means, at_least=ALWAYS - {"entropy"})
    assert mine.logs[0]["entropy"] == pytest.approx(other.logs[0]["entropy"], rel=0.05)


def test_masked_completions_teach_nothing_in_both_and_only_trl_leaves_them_out_of_its_figures(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    fields = {"mask_truncated_completions": True, "beta": 0.04, "entropy_coef": 0.02}
    mine, other = grpo(talkative_dir, tmp_path, engine, fields)
    assert 0 < mine.logs[0]["completions/clipped_ratio"] < 1
    assert_same_gradients(mine, other)
    # Our figures are over every sampled token, because every sampled token is verified.
    of_all = frozenset(
        {"entropy", "sampling/importance_sampling_ratio/", "sampling/sampling_logp_difference/"}
    )
    assert_same_figures(
        mine, other, but=of_all, at_least=(ALWAYS - {"entropy"}) | CLIPS | {"kl", "policy_loss"}
    )
    assert mine.logs[0]["entropy"] != pytest.approx(other.logs[0]["entropy"], rel=1e-3)


def test_completions_without_an_advantage_are_in_trls_clip_ratios_and_not_in_ours(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    """These completions cannot be clipped, and here they have no backward pass.

    Gradients and all other figures of a step are equal.

    Here they also have no second forward in the second step: their part of its entropy is that of the first step.
    """

    def same_in_one_group(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        first = min(prompts)
        return [
            0.5 if p == first else value for p, value in zip(prompts, longer(completion_ids), strict=True)
        ]

    fields = {"epsilon": 0.01, "epsilon_high": 0.012}
    mine, other = grpo(talkative_dir, tmp_path, engine, fields, reward_funcs=same_in_one_group)
    assert mine.logs[0]["frac_reward_zero_std"] == 0.5
    assert_same_gradients(mine, other)
    assert_same_figures(mine, other, but=frozenset({"clip_ratio/", "entropy"}), at_least={"loss", "reward"})
    found, expected = ([log["entropy"] for log in played.logs] for played in (mine, other))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert 1e-5 < abs(found[1] / expected[1] - 1) < 0.01
    assert mine.logs[1]["clip_ratio/region_mean"] > 1.1 * other.logs[1]["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_function_is_given_what_trl_gives_it(
    talkative_dir: str, tmp_path: Path, engine: Engine, conversational: bool, method: str
) -> None:
    seen: list[dict[str, Any]] = []

    def watching(completion_ids: list[list[int]], **given: Any) -> list[float]:
        seen.append({**given, "completion_ids": completion_ids})
        return longer(completion_ids)

    prompts = PROMPTS["prompt"]
    texts = [[{"role": "user", "content": text}] for text in prompts] if conversational else list(prompts)
    data = PROMPTS.from_dict(
        {"prompt": texts, "answer": [len(t) for t in prompts], "hint": [f"h{t}" for t in prompts]}
    )
    fields = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 1,
    }
    fields |= {"beta": 0.0, **(TOKENS if method == "GRPO" else {})}
    mine, other = both(
        method, talkative_dir, tmp_path, engine, fields, reward_funcs=watching, train_dataset=data
    )
    assert_same_gradients(mine, other)
    first, second = seen
    assert first.keys() == second.keys()
    columns = ("prompts", "completions", "completion_ids", "answer", "hint")
    rows = [sorted(zip(*(call[c] for c in columns), strict=True), key=repr) for call in seen]
    assert rows[0] == rows[1]
