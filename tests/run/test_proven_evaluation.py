"""An evaluation is proven as training is, and says what was proven and what was not held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import numpy as np
import pytest
import torch
from datasets import Dataset
from methods import GROUPS, PROMPTS
from portions import portion
from transformers import EarlyStoppingCallback

from lockstep.contract.protocol import Completion, Engine, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.extras.verify.logprob_checks import Unwatched
from lockstep.learn.generation import sequences_of
from lockstep.learn.update import StepSums, learn
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.tokens.arrays import reals
from lockstep.watch.evidence import TokenEvidence
from lockstep.watch.rewards import drawn_sequences

HELD_OUT = Dataset.from_dict({"prompt": [f"how much is {i} - 1" for i in range(5)], "answer": list(range(5))})
Make = Callable[..., OnlineTrainer]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine, tmp_path: Path) -> Make:
    def made(
        evaluation: Dataset = HELD_OUT, method: str = "GRPO", reward: Any = methods.by_length, **fields: Any
    ) -> Any:
        fields = {**(GROUPS if method != "OnlineDPO" else methods.PAIRS), **fields}
        more = {"eval_dataset": evaluation, "reward_funcs": reward}
        return methods.make(method, untied_dir, tmp_path, hf_engine, fields, **more)

    return made


@pytest.mark.parametrize("method", ["GRPO", "OnlineDPO", "PPO"])
def test_the_figures_of_the_proof_are_among_the_metrics(make: Make, method: str) -> None:
    run = make(method=method)
    metrics = run.evaluate()
    sampled = sum(len(r.token_ids) for group in run.last_eval_groups for r in group.rollouts)
    assert metrics["eval_parity/checked_tokens"] == sampled
    assert metrics["eval_parity/checked_share"] == 1.0
    assert 0.0 < metrics["eval_parity/mean_abs_gap"] < 1e-4
    assert metrics["eval_seen_in_training"] == 0.0


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {"loss_type": "grpo"}),
    "dapo, kl": ("GRPO", {"beta": 0.3}),
    "luspo, entropies": ("GRPO", {"loss_type": "luspo", "entropy_coef": 0.3, "top_entropy_quantile": 0.5}),
    "vespo": ("GRPO", {"loss_type": "vespo", "scale_rewards": "batch"}),
    "rloo": ("RLOO", {}),
    "online dpo": ("OnlineDPO", {}),
    "ppo": ("PPO", methods.ALONE),
    "reinforce++": ("ReinforcePP", methods.ALONE),
    "reinforce++, baseline": ("ReinforcePP", {"baseline": "group", "beta": 0.2}),
}


# CI has one row per path: plain, with a reference model, with entropies, pairs, values.
IN_CI = ("grpo", "dapo, kl", "luspo, entropies", "online dpo", "ppo")


@pytest.mark.parametrize("name", portion(LOSSES, lambda name: name in IN_CI))
def test_its_loss_is_that_of_a_step_on_its_completions(make: Make, name: str) -> None:
    method, fields = LOSSES[name]
    size = 4 if fields.get("num_generations") == 1 else 2
    fields = {"vllm_importance_sampling_correction": False} | fields
    run = make(HELD_OUT.select(range(size)), method, **fields)
    if run.reference is not None:
        with torch.no_grad():
            # Another reference than the policy, so that the divergence counts.
            run.reference.own.model.norm.weight += 0.3
    metrics, loop = run.evaluate(), run.loop
    step, *_ = loop.preparation.generation(loop.policy(), run.last_eval_groups, 0)
    sequences = [s for batch in step.micro_batches for s in batch]
    assert len(sequences) == run.config.completions_per_step
    prepared = loop.preparation.step(loop.policy(), sequences, moved=False)
    sums = StepSums(TokenEvidence())
    learned = learn(loop.policy(), prepared, loop.objective, loop.clock, sums, Unwatched())
    # At a ratio of 1 these are means of advantages that add up to zero.
    assert (abs(learned) > 1e-4) == (name not in ("grpo", "rloo", "reinforce++"))
    assert metrics["eval_loss"] == pytest.approx(learned, rel=1e-4, abs=1e-6)
    figures = sums.tally.figures()
    for figure in ("kl", "rewards/margins", "loss/value"):
        assert (f"eval_{figure}" in metrics) == (figure in figures)
        if figure in figures:
            assert metrics[f"eval_{figure}"] == pytest.approx(figures[figure], rel=1e-3)


def test_a_loss_without_a_reference_takes_no_forward_more(make: Make) -> None:
    many = Dataset.from_dict({"prompt": [f"{i} + 1" for i in range(40)]})
    found = [make(many, loss_type="dapo", beta=beta).evaluate() for beta in (0.0, 1e-9)]
    assert found[0]["eval_parity/checked_share"] < 1.0
    assert found[1]["eval_parity/checked_share"] == 1.0
    # The same loss: the divergence has hardly a weight.
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], abs=1e-5)


def test_its_loss_is_that_of_one_step_however_many_completions_there_are(make: Make) -> None:
    run = make(beta=0.3, reward=lambda completions, **_: [1.0] * len(completions))
    with torch.no_grad():
        run.reference.own.model.norm.weight += 0.3
    metrics = run.evaluate()
    assert metrics["eval_samples"] > run.config.completions_per_step
    # Equal rewards have no advantage, so the divergence is all of the loss.
    assert metrics["eval_loss"] == pytest.approx(0.3 * metrics["eval_kl"], rel=1e-5)
    assert metrics["eval_kl"] > 1e-4


def test_a_best_metric_that_no_evaluation_has_is_one_sentence_after_the_first_one(make: Make) -> None:
    fields = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    run = make(load_best_model_at_end=True, metric_for_best_model="rewrad", max_steps=2, **fields)
    with pytest.raises(InputError, match="'rewrad' is no metric of the evaluation; did you mean 'reward'"):
        run.evaluate()


def test_a_loss_ends_a_run_early_and_chooses_the_best_checkpoint(make: Make) -> None:
    fields = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 6,
    }
    run = make(
        beta=0.5, load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=5e-3, **fields
    )
    run.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    run.train()
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert run.config.greater_is_better is False
    assert run.state.best_metric == min(losses)
    assert len(losses) == run.state.global_step < 6
    assert losses[-1] > losses[-2]


def test_filtered_and_interrupted_completions_are_proven_too(make: Make) -> None:
    for fields in ({"top_k": 5}, {**methods.INTERRUPTED, "max_completion_length": 14}):
        assert make(**fields).evaluate()["eval_parity/checked_tokens"] > 0


def groups_of(problems: int, samples: int) -> list[RolloutGroup]:
    def rollout(name: str, sample: int) -> Rollout:
        answer = Completion(RequestKey(name, sample), [7, 8], [5, 6], [-1.0, -1.0], [0, 0], "length")
        return Rollout(answer, "")

    names = [f"eval/{i}" for i in range(problems)]
    return [RolloutGroup(Prompt(n, [7, 8], ""), tuple(rollout(n, k) for k in range(samples))) for n in names]


def test_of_a_large_evaluation_a_quarter_is_drawn_anew_each_time() -> None:
    every = sequences_of(groups_of(100, 4), 0)
    first, again, later = ([s.name for s in drawn_sequences(every, version, 1)] for version in (0, 0, 1))
    assert len(first) == len(set(first)) == 100
    assert first == again != later
    assert len(drawn_sequences(sequences_of(groups_of(20, 4), 0), 0, 1)) == 64


def sampled_otherwise(run: OnlineTrainer, change: Callable[[list[RolloutGroup]], list[RolloutGroup]]) -> Any:
    real = run.source.sample

    def sampled(prompts: Sequence[Prompt], *rest: Any) -> list[RolloutGroup]:
        return change(real(prompts, *rest))

    return patch.object(run.source, "sample", sampled)


def other_log_probs(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The log-probs of one completion in each group are those of an engine with slightly other weights."""

    def changed(rollout: Rollout) -> Rollout:
        moved = reals(rollout.completion.logprobs + np.float32(0.01))
        return replace(rollout, completion=replace(rollout.completion, logprobs=moved))

    return [replace(g, rollouts=(changed(g.rollouts[0]), *g.rollouts[1:])) for g in groups]


def columns_of_the_next(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    columns = [g.prompt.columns for g in groups]
    moved = [*columns[1:], columns[0]]
    return [replace(g, prompt=replace(g.prompt, columns=c)) for g, c in zip(groups, moved, strict=True)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_log_probs, "gap"),
        (columns_of_the_next, "are not those of the evaluation set"),
        (lambda groups: groups[1:], "are not those of the evaluation set"),
        (lambda groups: [*groups, groups[0]], "are not those of the evaluation set"),
        (
            lambda groups: [replace(g, rollouts=g.rollouts[:1]) for g in groups],
            "another number of completions than 2",
        ),
    ],
)
def test_an_evaluation_of_other_rows_or_by_another_engine_is_refused(
    make: Make, change: Any, says: str
) -> None:
    run = make()
    with sampled_otherwise(run, change), pytest.raises(ProofError, match=says):
        run.evaluate()
    assert run.last_eval_groups == []


def test_rows_that_changed_after_the_trainer_was_made_are_not_the_evaluation_set(make: Make) -> None:
    run = make()
    run._eval_prompts["eval"] = run._eval_prompts["eval"][:3]
    with pytest.raises(ProofError, match="the 3 rows that were evaluated"):
        run.evaluate()


def test_an_evaluation_on_training_prompts_is_told_and_counted(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(Dataset.from_dict({"prompt": [PROMPTS[2]["prompt"], "something else", PROMPTS[0]["prompt"]]}))
    said = "lockstep: 2 of 3 evaluation prompts are training prompts too (eval/0 first)"
    assert said in "".join(capsys.readouterr())
    assert run.evaluate()["eval_seen_in_training"] == 2.0
