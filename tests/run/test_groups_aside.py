"""Of the completions without a gradient, a drawn part is verified, and the rest goes through no forward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from methods import make, parameters
from work import agreeing, worked

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.learn import generation
from lockstep.learn.generation import branches_of, picked_rollouts
from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.update import Policy, StepSums
from lockstep.rollouts.group import RolloutGroup
from lockstep.watch.receipt import RECEIPT, read_receipt

PROMPTS = Dataset.from_list([{"prompt": f"What comes after {number}"} for number in range(16)])
# A completion may have 8 tokens, so 16 of the 32 completions are drawn: 8 of the 16 groups.
SIXTEEN: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 2,
    "max_completion_length": 8,
    "max_steps": 1,
    "shuffle_dataset": False,
}


TOGETHER = generation.TOGETHER


@pytest.fixture(autouse=True)
def every_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of every generation is drawn, in place of a larger part of some."""
    monkeypatch.setattr(generation, "TOGETHER", 128)


def sixteen(folder: str, output: Path, engine: Engine, **fields: Any) -> Any:
    """A run of which every second group agrees, and half of these are not drawn."""
    more = {"reward_funcs": agreeing, "train_dataset": PROMPTS}
    return make("GRPO", folder, output, engine, {**SIXTEEN, **fields}, **more)


def drawn(run: Any) -> list[int]:
    return [place for place, own in enumerate(picked_rollouts(16, 2, 8, run.config.seed, 0)) if own]


def names(groups: list[RolloutGroup]) -> Counter[str]:
    return Counter(str(completion.key) for completion in branches_of(groups))


def tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(completion.sampled_places) for completion in branches_of(groups))


def test_the_rest_goes_through_no_forward_and_is_counted(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sixteen(untied_dir, tmp_path, hf_engine)
    work = worked(run, monkeypatch)
    groups, chosen = list(run.loop.generation.groups), set(drawn(run))
    verified = [groups[i] for i in range(0, 16, 2) if i in chosen]
    aside = [groups[i] for i in range(0, 16, 2) if i not in chosen]
    assert verified
    assert aside
    assert work.learned() == names(groups[1::2])
    assert work.looked() == names(verified)
    (log,) = (log for log in run.state.log_history if "loss" in log)
    assert log["parity/aside_tokens"] == tokens(aside)
    assert log["parity/checked_tokens"] == tokens(groups) - tokens(aside)
    assert log["sampling/tokens"] == tokens(groups)
    (line,) = (line for line in read_receipt(tmp_path / RECEIPT) if line["kind"] == "step")
    assert line["checked_tokens"] + line["aside_tokens"] == line["sampled_tokens"] == tokens(groups)
    # Rewards decide what is learned from, so tokens are bet on only where they do not decide.
    assert line["draws"]["tokens"] == tokens([groups[i] for i in chosen])


def test_where_everything_is_scored_first_every_token_is_verified_and_the_bets_are_on_the_drawn_groups(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = sixteen(untied_dir, tmp_path, hf_engine, num_iterations=2)
    run.train()
    groups = list(run.loop.generation.groups)
    (line,) = (line for line in read_receipt(tmp_path / RECEIPT) if line["kind"] == "step")
    assert line["checked_tokens"] == line["sampled_tokens"] == tokens(groups)
    assert line["draws"]["tokens"] == tokens([groups[i] for i in drawn(run)]) < tokens(groups)


def test_the_step_is_the_one_in_which_everything_is_verified(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = sixteen(untied_dir, tmp_path / "part", hf_engine)
    part.train()
    monkeypatch.setattr(generation, "picked_rollouts", lambda groups, size, *_: [[*range(size)]] * groups)
    whole = sixteen(untied_dir, tmp_path / "whole", hf_engine)
    whole.train()
    assert (
        whole.state.log_history[0]["parity/aside_tokens"]
        == 0
        < part.state.log_history[0]["parity/aside_tokens"]
    )
    found, due = parameters(part.model), parameters(whole.model)
    assert all(torch.equal(found[name], due[name]) for name in due)


@pytest.mark.parametrize("place", ["drawn", "aside"])
def test_a_wrong_log_prob_without_a_gradient_stops_the_run_if_its_group_is_drawn(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    clean = sixteen(untied_dir, tmp_path / "clean", hf_engine)
    clean.train()
    chosen = set(drawn(clean))
    group = next(i for i in range(0, 16, 2) if (i in chosen) == (place == "drawn"))
    real = Policy.score

    def score(policy: Policy, pack: Pack, *args: Any, **kwargs: Any) -> TokenScores:
        found = real(policy, pack, *args, **kwargs)
        wrong = [s.name == name for s in pack.sequences for _ in range(s.length)]
        return TokenScores(
            found.logps - torch.tensor(wrong, device=found.logps.device).float(),
            found.entropies,
            draws=found.draws,
        )

    name = str(clean.loop.generation.groups[group].rollouts[0].completion.key)
    run = sixteen(untied_dir, tmp_path / "wrong", hf_engine)
    monkeypatch.setattr(Policy, "score", score)
    if place == "drawn":
        with pytest.raises(ProofError, match=r"gap|temperature"):
            run.train()
    else:
        run.train()


def test_verified_tokens_stand_for_those_left_aside_in_means(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StepSums] = []
    real = StepSums.metrics
    monkeypatch.setattr(StepSums, "metrics", lambda sums: seen.append(sums) or real(sums))
    run = sixteen(untied_dir, tmp_path, hf_engine)
    run.train()
    (sums,) = seen
    assert sums.aside > 0
    assert sums.tally.count("entropy") == pytest.approx(tokens(list(run.loop.generation.groups)))


def test_where_nothing_is_drawn_nothing_is_bet_on_and_all_that_is_learned_from_is_compared(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "TOGETHER", 256)
    run = sixteen(untied_dir, tmp_path, hf_engine, max_steps=4)
    run.train()
    lines = [line for line in read_receipt(tmp_path / RECEIPT) if line["kind"] == "step"]
    logs = [log for log in run.state.log_history if "loss" in log]
    whole = [any(picked_rollouts(16, 2, 8, run.config.seed, number)) for number in range(4)]
    assert sorted(whole[:2]) == sorted(whole[2:]) == [False, True]
    for drawn_here, line, log in zip(whole, lines, logs, strict=True):
        assert line["aside_tokens"] == (0 if drawn_here else line["sampled_tokens"] - line["checked_tokens"])
        assert bool(line["aside_tokens"]) != drawn_here
        assert line["checked_tokens"] >= line["sampled_tokens"] // 4
        assert line["draws"]["tokens"] == (line["sampled_tokens"] if drawn_here else 0)
        assert ("parity/draws_z" in log) == drawn_here
    assert [line["draws"]["generations"] for line in lines] == [sum(whole[: i + 1]) for i in range(4)]


def test_the_choice_counts_generations_and_not_the_steps_of_one(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        generation, "picked_rollouts", lambda *given: asked.append(given[-1]) or picked_rollouts(*given)
    )
    sixteen(untied_dir, tmp_path, hf_engine, max_steps=4, num_iterations=2).train()
    assert asked == [0, 1]


@pytest.mark.parametrize(
    ("groups", "size", "tokens", "block"),
    [
        (16, 8, 8, 8),
        (2, 8, 64, 8),
        (4, 8, 16, 4),
        (3, 8, 128, 2),
        (16, 8, 64, 1),
        (4, 2, 8, 1),
        (3, 4, 12, 1),
    ],
)
def test_each_rollout_is_drawn_equally_often_whatever_was_sampled(
    groups: int, size: int, tokens: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in eight, or more where a generation has few tokens; all those of a block of generations in one of them."""
    monkeypatch.setattr(generation, "TOGETHER", TOGETHER)
    drawn = [picked_rollouts(groups, size, tokens, 3, number) for number in range(512)]
    assert drawn == [picked_rollouts(groups, size, tokens, 3, number) for number in range(512)]
    blocks = [tuple(any(own) for own in drawn[start : start + block]) for start in range(0, 512, block)]
    assert {sum(found) for found in blocks} == {1}
    assert len(set(blocks)) == block
    often = Counter((group, place) for found in drawn for group, own in enumerate(found) for place in own)
    each = 512 / max(1, min(8, groups * size * tokens // 128))
    # A draw of one in eight gives 64, give or take 8.
    assert all(abs(often[group, place] - each) < 45 for group in range(groups) for place in range(size))


def test_of_a_large_generation_whole_groups_are_drawn_and_of_the_last_one_a_part() -> None:
    assert sorted(len(own) for own in picked_rollouts(10, 8, 4096, 1, 1)) == [0] * 8 + [2, 8]
