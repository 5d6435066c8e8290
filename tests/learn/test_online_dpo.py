"""Online DPO's own settings: rewards or a judge, the penalty for a missing end, beta per epoch, mean over pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from methods import PAIRS, by_length, logs, make
from tiny import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError


class Longer:
    """A judge that prefers the longer text, and gives no verdict if the first prompt's number is odd."""

    def __repr__(self) -> str:
        return "Longer()"

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[int]:
        odd = [int(prompt.split()[2]) % 2 == 1 for prompt in prompts]
        return [-1 if o else int(len(b) > len(a)) for o, (a, b) in zip(odd, completions, strict=True)]


def signs(run: Any) -> dict[str, list[float]]:
    """The signs of the last generation's completions by prompt: 1 for chosen, −1 for rejected, 0 for undecided."""
    found: dict[str, list[float]] = {}
    for batch in run.loop.generation.micro_batches:
        for s in batch:
            found.setdefault(s.unit, []).append(s.advantages[0])
    return found


def test_a_judge_without_a_verdict_leaves_the_pair_undecided_and_the_rest_is_logged(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make(
        "OnlineDPO",
        untied_dir,
        tmp_path,
        hf_engine,
        {**PAIRS, "max_steps": 4},
        reward_funcs=None,
        judge=Longer(),
    )
    run.train()
    for group in run.loop.generation.groups:
        texts = [rollout.text for rollout in group.rollouts]
        odd = int(group.prompt.source.split()[2]) % 2 == 1
        first = 0.0 if odd else (-1.0 if len(texts[1]) > len(texts[0]) else 1.0)
        assert signs(run)[group.prompt.prompt_id] == [first, -first]
    # There are four steps of two prompts: every prompt once, half of them without a verdict.
    assert sum(log["pairs/undecided"] for log in logs(run)) == pytest.approx(2.0)
    decided = [log for log in logs(run) if log["pairs/undecided"] < 1]
    assert decided
    assert all(log["rewards/judge/mean"] == 0.5 for log in decided)


def test_the_loss_of_a_step_is_the_mean_over_all_pairs_and_undecided_ones_add_nothing(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def two_of_four(prompts: list[str], **_: Any) -> list[float | None]:
        # One tie, one missing score, and two decided pairs.
        return [1.0, 1.0, None, 2.0, 1.0, 0.0, 0.0, 1.0]

    fields = {**PAIRS, "per_device_train_batch_size": 4, "max_steps": 1, "rehearse_rewards": False}
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=two_of_four)
    run.train()
    # The policy equals the reference, so the loss of each decided pair is log 2.
    (log,) = logs(run)
    assert log["loss"] == pytest.approx(math.log(2) / 2, abs=1e-3)
    assert log["pairs/undecided"] == 0.5
    assert log["objective/scores_margin"] == 1.0


def test_a_completion_without_its_end_loses_the_penalty_and_with_it_the_comparison(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def cut_is_better(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0 if ids[-1] != 0 else 0.0 for ids in completion_ids]

    # End tokens are likely, because the engine samples at a high temperature from few tokens.
    found = []
    for penalty in (None, 3.0):
        fields = {
            **PAIRS,
            "max_steps": 4,
            "max_new_tokens": 40,
            "missing_eos_penalty": penalty,
            "learning_rate": 0.0,
        }
        run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=cut_is_better)
        run.train()
        found.append(run)
    plain, penalised = ([log["objective/scores"] for log in logs(run)] for run in found)
    ended = [log["val/contain_eos_token"] for log in logs(found[0])]
    assert any(0 < share < 1 for share in ended)
    for share, before, after in zip(ended, plain, penalised, strict=True):
        assert before == pytest.approx(1 - share)
        assert after == pytest.approx((1 - share) * (1 - 3.0))


def test_betas_follow_one_another_by_epoch_and_the_last_one_stays(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    # There are eight prompts, four per step: two steps per epoch.
    fields = {**PAIRS, "per_device_train_batch_size": 4, "beta": [0.5, 0.1], "max_steps": 6}
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    assert [log["beta"] for log in logs(run)] == [0.5, 0.5, 0.1, 0.1, 0.1, 0.1]


def test_a_reward_model_can_be_named_in_the_configuration(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, num_labels=1, initializer_range=0.3, pad_token_id=None
    )  # type: ignore[arg-type]
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "taste")
    make_tokenizer().save_pretrained(tmp_path / "taste")
    fields = {**PAIRS, "max_steps": 1, "reward_model_path": str(tmp_path / "taste")}
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=None)
    run.train()
    (log,) = logs(run)
    assert log["rewards/taste/std"] > 0
    for group in run.loop.generation.groups:
        first, second = group.rewards
        assert signs(run)[group.prompt.prompt_id][0] == (1.0 if first > second else -1.0)


def test_reward_functions_given_beside_a_reward_models_path_are_the_rewards(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**PAIRS, "max_steps": 1, "reward_model_path": "a/model-that-nobody-loads"}
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, fields)
    assert "reward_model_path='a/model-that-nobody-loads' has no effect" in capsys.readouterr().out
    run.train()
    assert [name for name in logs(run)[0] if name.endswith("/std")] == ["rewards/by_length/std"]


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"judge": Longer()}, "judge and reward_funcs all say which completion is better"),
        (
            {"reward_model_path": "x"},
            {"judge": Longer(), "reward_funcs": None},
            "judge and reward_model_path all say",
        ),
        ({"missing_eos_penalty": 1.0}, {"judge": Longer(), "reward_funcs": None}, "missing_eos_penalty"),
        ({}, {"reward_funcs": None}, "No reward source provided"),
        ({"beta": [0.1, 0.0]}, {}, "every beta must be above 0"),
        ({"max_new_tokens": 100}, {}, "leaves no room for a prompt"),
        ({"loss_type": "hinge"}, {}, "The choices are: sigmoid, ipo"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, fields: Any, arguments: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(
            "OnlineDPO",
            untied_dir,
            tmp_path,
            hf_engine,
            {**PAIRS, **fields},
            **{"reward_funcs": by_length, **arguments},
        )
