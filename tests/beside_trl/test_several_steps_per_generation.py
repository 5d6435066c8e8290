"""Several optimizer steps per generation beside TRL's: which completions a step learns from, and the loss's mean.

TRL shuffles the completions of a generation before it cuts them into steps. Lockstep cuts them in the order of their
groups. The tests replace TRL's shuffle with the identity, so that both make the same cut; everything else is TRL's
code. The last test keeps the shuffle.

CI makes every cut with one loss, and one cut with each of the other losses, because the cut does not know the loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import start
from methods import lora
from pairs import (
    CLIPS,
    Played,
    assert_same_figures,
    assert_same_gradients,
    both,
    distance,
    norm,
    shifted_engine,
)
from portions import portion

from lockstep.contract.protocol import Engine

pytest.importorskip("trl", reason="TRL is not installed here")

# One step has one group, so every step has completions of its own.
GROUPS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 4,
    "epsilon": 0.01,
    "epsilon_high": 0.012,
}
GRPO = {**GROUPS, "beta": 0.04, "vllm_importance_sampling_mode": "token_truncate"}
# The ratio is that of a whole completion, so it changes about twelve times as fast.
RLOO = {
    **GROUPS,
    "per_device_train_batch_size": 8,
    "beta": 0.0,
    "normalize_advantages": True,
    "learning_rate": 2e-5,
}
CUTS: dict[str, dict[str, Any]] = {
    "two steps": {"steps_per_generation": 2},
    "two steps twice": {"steps_per_generation": 2, "num_iterations": 2},
    "four micro-batches in two steps": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "one generation for all": {"steps_per_generation": 4, "max_steps": 4},
}
# TRL's `bnpo` is averaged over micro-batches (A2).
SAME = [
    (loss, cut)
    for loss in ("grpo", "dr_grpo", "luspo", "bnpo")
    for cut, fields in CUTS.items()
    if loss != "bnpo" or "gradient_accumulation_steps" not in fields
]
# TRL logs these figures once, for the whole generation; Lockstep logs them for each step
# (docs/reference/migrating-from-trl.md).
OF_THE_GENERATION = frozenset(
    f"sampling/{name}/" for name in ("sampling_logp_difference", "importance_sampling_ratio")
)
# In TRL these figures are means of the micro-batches' means.
OF_MICRO_BATCHES = frozenset({"entropy", "kl", "clip_ratio/"})
# TRL divides these losses by the tokens of the generation's average step; Lockstep divides by the tokens of the step
# itself.
BY_TOKENS = {"dapo": {}, "cispo": {"epsilon_high": 1.01}, "vespo": {}}


@pytest.fixture(scope="module")
def engine(talkative_dir: str) -> Any:
    return shifted_engine(talkative_dir)


@pytest.fixture
def unshuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.grpo_trainer
    import trl.trainer.rloo_trainer

    for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda rows: rows)


def assert_agree(mine: Played, other: Played, cut: dict[str, Any], at_least: set[str]) -> None:
    assert_same_gradients(mine, other)
    gradients = [norm(step.values()) for step in mine.gradients]
    assert len({round(size, 6) for size in gradients}) == len(gradients)
    averaged = OF_MICRO_BATCHES if "gradient_accumulation_steps" in cut else frozenset[str]()
    assert_same_figures(
        mine, other, but=OF_THE_GENERATION | averaged, at_least={"loss", "grad_norm", "reward"}
    )
    if not averaged:
        assert_same_figures(mine, other, but=OF_THE_GENERATION, at_least=at_least)
        # In the later steps the policy differs from the policy that sampled.
        clipped = [log["clip_ratio/region_mean"] for log in mine.logs]
        assert clipped[0] == 0 < max(clipped)


@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize(
    ("loss", "cut"), portion(SAME, lambda c: c[0] == "grpo" or c[1] == "two steps twice")
)
def test_grpos_steps_of_one_generation_are_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine, loss: str, cut: str
) -> None:
    fields = {**GRPO, "loss_type": loss, **CUTS[cut]}
    mine, other = both("GRPO", talkative_dir, tmp_path, engine, fields)
    assert_agree(mine, other, CUTS[cut], {"entropy", "kl"} | CLIPS)


@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize("cut", portion(CUTS, lambda cut: cut == "four micro-batches in two steps"))
def test_rloos_steps_of_one_generation_are_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine, cut: str
) -> None:
    # The run stays within one epoch, because the next epoch has another order of prompts.
    fields = {**RLOO, **CUTS[cut]} | ({"max_steps": 2} if "gradient_accumulation_steps" in CUTS[cut] else {})
    mine, other = both("RLOO", talkative_dir, tmp_path, start("transformers", talkative_dir), fields)
    assert_agree(mine, other, CUTS[cut], {"entropy"} | CLIPS)


@pytest.mark.usefixtures("unshuffled")
def test_an_adapters_steps_of_one_generation_are_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    fields = {**GRPO, "loss_type": "grpo", "learning_rate": 0.1, "steps_per_generation": 2}
    mine, other = both("GRPO", talkative_dir, tmp_path, engine, fields, peft_config=lora())
    assert_same_gradients(mine, other)


@pytest.mark.usefixtures("unshuffled")
def test_trl_logs_of_the_whole_generation_what_ours_log_of_each_step(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    fields = {**GRPO, "loss_type": "grpo", "steps_per_generation": 4}
    mine, other = both("GRPO", talkative_dir, tmp_path, engine, fields)
    tokens = [log["parity/checked_tokens"] for log in mine.logs]
    differences, ratios = sorted(OF_THE_GENERATION, reverse=True)
    for name in (f"{differences}mean", f"{ratios}mean"):
        mean = sum(n * log[name] for n, log in zip(tokens, mine.logs, strict=True)) / sum(tokens)
        assert other.logs[0][name] == pytest.approx(mean, abs=3e-6)
    assert other.logs[0][f"{differences}max"] == pytest.approx(
        max(log[f"{differences}max"] for log in mine.logs), abs=3e-6
    )
    assert not any(name in log for log in other.logs[1:] for name in (f"{differences}mean", f"{ratios}mean"))


@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize("loss", BY_TOKENS)
def test_what_is_averaged_over_tokens_is_by_the_steps_own_here_and_by_the_generations_average_step_in_trl(
    talkative_dir: str, tmp_path: Path, engine: Engine, loss: str
) -> None:
    """The number of tokens is the only difference.

    The policy does not change, so each step shows this difference alone.
    """
    fields = {
        **GRPO,
        "beta": 0.0,
        "loss_type": loss,
        **BY_TOKENS[loss],
        "steps_per_generation": 4,
        "learning_rate": 0.0,
    }
    mine, other = both("GRPO", talkative_dir, tmp_path, engine, fields)
    tokens = [log["parity/checked_tokens"] for log in mine.logs]
    average = sum(tokens) / len(tokens)
    assert max(tokens) > 1.3 * min(tokens)
    for step, own in enumerate(tokens):
        scaled = {name: gradient * (own / average) for name, gradient in mine.gradients[step].items()}
        theirs = other.gradients[step]
        assert distance(scaled, theirs) <= 1e-5 * max(norm(theirs.values()), 1e-2), step
        assert distance(mine.gradients[step], theirs) > 1e-2 * norm(theirs.values()), step
        assert other.losses[step] == pytest.approx(mine.losses[step] * own / average, rel=1e-5, abs=1e-5)


@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize("loss", portion(BY_TOKENS, lambda loss: loss == "dapo"))
def test_of_equally_long_completions_these_are_trls_too(untied_dir: str, tmp_path: Path, loss: str) -> None:
    fields = {
        **GRPO,
        "loss_type": loss,
        **BY_TOKENS[loss],
        "steps_per_generation": 2,
        "max_completion_length": 2,
    }
    mine, other = both("GRPO", untied_dir, tmp_path, start("transformers", untied_dir), fields)
    assert {(log["completions/min_length"], log["completions/max_length"]) for log in mine.logs[::2]} == {
        (2.0, 2.0)
    }
    assert_same_gradients(mine, other)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_with_trls_shuffle_the_steps_of_a_generation_differ_and_their_sum_does_not(
    talkative_dir: str, tmp_path: Path, engine: Engine, method: str
) -> None:
    """The policy does not change, so the sum is over the same completions of the same policy."""
    fields = {**GRPO, "loss_type": "grpo"} if method == "GRPO" else RLOO
    fields = {**fields, "steps_per_generation": 4, "learning_rate": 0.0}
    engine = engine if method == "GRPO" else start("transformers", talkative_dir)
    mine, other = both(method, talkative_dir, tmp_path, engine, fields)
    for found, expected in zip(mine.gradients, other.gradients, strict=True):
        assert distance(found, expected) > 0.1 * norm(expected.values())
    sums = [
        {name: sum(step[name] for step in played.gradients) for name in played.gradients[0]}
        for played in (mine, other)
    ]
    assert distance(sums[0], sums[1]) <= 1e-5 * max(norm(step.values()) for step in other.gradients)
