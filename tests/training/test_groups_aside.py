"""Of the groups without a gradient, a drawn part is verified, and the rest goes through no forward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from methods import make, parameters
from work import agreeing, worked

from lockstep.engines.protocol import Engine
from lockstep.errors import ProofError
from lockstep.parity.receipt import RECEIPT, read_receipt
from lockstep.rollouts.group import RolloutGroup
from lockstep.training.batch.pack import Pack
from lockstep.training.forward.scoring import TokenScores
from lockstep.training.step import generation
from lockstep.training.step.generation import branches_of, drawn_groups
from lockstep.training.step.update import Policy
from lockstep.training.step.update_sums import UpdateSums

PROMPTS = Dataset.from_list([{"prompt": f"What comes after {number}"} for number in range(16)])
# A group may have 16 tokens, so 8 of the 16 groups are drawn.
SIXTEEN: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 2,
    "max_completion_length": 8,
    "max_steps": 1,
    "shuffle_dataset": False,
}


def sixteen(folder: str, output: Path, engine: Engine, **fields: Any) -> Any:
    """A run of which every second group agrees, and half of these are not drawn."""
    more = {"reward_funcs": agreeing, "train_dataset": PROMPTS}
    return make("GRPO", folder, output, engine, {**SIXTEEN, **fields}, **more)


def drawn(run: Any) -> list[int]:
    return drawn_groups(16, 16, (run.config.seed, 0))


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
    monkeypatch.setattr(generation, "drawn_groups", lambda count, *_: list(range(count)))
    whole = sixteen(untied_dir, tmp_path / "whole", hf_engine)
    whole.train()
    assert whole.state.log_history[0]["parity/aside_tokens"] == 0 < part.state.log_history[0]["parity/aside_tokens"]
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
        return TokenScores(found.logps - torch.tensor(wrong).float(), found.entropies, draws=found.draws)

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
    seen: list[UpdateSums] = []
    real = UpdateSums.metrics
    monkeypatch.setattr(UpdateSums, "metrics", lambda sums, limit: seen.append(sums) or real(sums, limit))
    run = sixteen(untied_dir, tmp_path, hf_engine)
    run.train()
    (sums,) = seen
    assert sums.aside > 0
    assert sums.tally.count("entropy") == pytest.approx(tokens(list(run.loop.generation.groups)))


def test_the_draw_looks_at_nothing_that_was_sampled_and_reaches_every_group() -> None:
    assert drawn_groups(16, 64, (3, 7)) == drawn_groups(16, 64, (3, 7))
    assert len(drawn_groups(64, 4096, (1, 1))) == 8
    assert sorted(drawn_groups(4, 8, (1, 1))) == [0, 1, 2, 3]
    often = Counter(i for version in range(400) for i in drawn_groups(16, 64, (1, version)))
    # Each is drawn in 50 of 400 generations, give or take 7.
    assert min(often[i] for i in range(16)) > 20
