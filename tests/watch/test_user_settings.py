"""What the user has asked for is what requests, answers, rewards and the loss have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import numpy as np
import pytest
import torch
from methods import GROUPS, INTERRUPTED
from tiny import make_tokenizer

import lockstep.learn.update as updating
import lockstep.run.source as source_module
from lockstep import GRPOConfig, OnlineDPOConfig
from lockstep.config.sampling import sampling_of
from lockstep.contract.distribution import processed_logprobs
from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.definitions.sampling import broken_rule, logprob, user_settings, weighted_sum
from lockstep.errors import ProofError
from lockstep.watch.settings import SettingsProof

TOKENIZER = make_tokenizer()
ASKED: dict[str, Any] = {
    "temperature": 0.7,
    "max_completion_length": 8,
    "stop_strings": ["zz"],
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {"5": -1.5},
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["the"],
    "min_tokens": 2,
    "structured_outputs_json": {"type": "object"},
}
LOST: dict[str, Any] = {
    "temperature": 1.0,
    "max_tokens": 16,
    "stop": (),
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "allowed_token_ids": None,
    "bad_words": (),
    "min_tokens": 0,
    "grammar": None,
}


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def config(folder: Path, **fields: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(folder), bf16=False, **fields)


def proof_of(folder: Path, **fields: Any) -> SettingsProof:
    return SettingsProof(user_settings(vars(config(folder, **fields))), encode)


def request(sampling: Sampling) -> GenerationRequest:
    return GenerationRequest(RequestKey("train/0", 0), [7, 8], sampling, 0)


# ---- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOST)
def test_a_request_that_lacks_a_setting_is_refused(tmp_path: Path, name: str) -> None:
    made = config(tmp_path, **ASKED)
    proof, sampling = SettingsProof(user_settings(vars(made)), encode), sampling_of(made, TOKENIZER, (0,))
    proof.check_request(request(sampling))
    # A turn of a conversation has a part of the limit.
    proof.check_request(request(replace(sampling, max_tokens=3)))
    with pytest.raises(ProofError, match="limits" if name == "max_tokens" else "settings"):
        proof.check_request(request(replace(sampling, **{name: LOST[name]})))


def test_a_request_with_a_setting_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    proof = proof_of(tmp_path)
    proof.check_request(request(Sampling(256)))
    for extra in (
        {"top_k": 3},
        {"grammar": Grammar("regex", "a")},
        {"stop": ("x",)},
        {"allowed_token_ids": (1, 2)},
    ):
        with pytest.raises(ProofError, match="settings"):
            proof.check_request(request(Sampling(256, **extra)))  # type: ignore[arg-type]


def test_a_call_may_have_stop_strings_of_its_own_beside_all_of_the_runs(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, stop_strings=["END"])
    proof.check_request(replace(request(Sampling(256, stop=("END", "Obs:"))), own_stop=("Obs:",)))
    for stop, own in [(("END", "Obs:"), ()), (("Obs:",), ("Obs:",)), (("Obs:", "END"), ("Obs:",))]:
        with pytest.raises(ProofError, match="settings"):
            proof.check_request(replace(request(Sampling(256, stop=stop)), own_stop=own))


def test_the_settings_of_every_way_to_ask_are_read(tmp_path: Path) -> None:
    asked = user_settings(vars(config(tmp_path, generation_kwargs={"top_k": 5, "logit_bias": {"3": 2}})))
    assert (asked.numbers["top_k"], asked.logit_bias) == (5, {3: 2.0})
    greedy = user_settings(vars(config(tmp_path, top_k=5, generation_kwargs={"do_sample": False})))
    assert greedy.numbers["top_k"] == 1
    pairs = user_settings(vars(OnlineDPOConfig(output_dir=str(tmp_path), bf16=False, max_new_tokens=9)))
    assert pairs.max_tokens == 9


def test_a_run_whose_config_loses_a_setting_does_not_start(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def losing(*given: Any) -> Sampling:
        return replace(sampling_of(*given), temperature=1.0)

    with (
        patch.object(source_module, "sampling_of", losing),
        pytest.raises(ProofError, match=r"the distribution that the trainer scores has temperature=1\.0"),
    ):
        methods.make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "temperature": 0.7})


def test_a_temperature_that_is_set_after_the_trainer_was_made_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1})
    run.args.temperature = 0.5
    with pytest.raises(
        ProofError,
        match=r"(?s)has temperature=0\.5; the user has asked for 1\.0.*set the fields when the config",
    ):
        run.train()


# ---- answers -----------------------------------------------------------------------------------------------------


def completion(ids: list[int], reason: str, sampled: list[bool] | None = None) -> Completion:
    key, count = RequestKey("train/0", 0), len(ids)
    return Completion(key, [7, 8], ids, [-1.0] * count, [0] * count, reason, sampled)  # type: ignore[arg-type]


def test_a_completion_ends_at_the_limit_or_where_the_context_is_full(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, max_completion_length=8)
    proof.check_completion(completion([5] * 8, "length"), 100)
    proof.check_completion(completion([5] * 3, "stop"), 100)
    proof.check_completion(completion([5] * 4, "length"), 6)
    for ids, reason, context in (([5] * 4, "length", 100), ([5] * 9, "length", 100), ([5] * 5, "stop", 6)):
        with pytest.raises(ProofError, match="limits"):
            proof.check_completion(completion(ids, reason), context)
    with pytest.raises(ProofError, match="thinking is never interrupted"):
        proof.check_completion(completion([5] * 8, "length", [True] * 7 + [False]), 100)


INSERTED, END = np.array([30, 31]), np.array([31])


@pytest.mark.parametrize(
    ("ids", "inserted", "says"),
    [
        ([5, 5, 5, 30, 31, 6], [3, 4], None),
        ([5, 5, 30, 31, 6], [2, 3], None),
        # It has ended its thinking by itself, or ended at all.
        ([5, 5, 31, 6, 6, 6], [], None),
        ([5, 5, 5], [], None),
        ([5, 5, 5, 6], [], "was not interrupted"),
        ([5, 5, 5, 31], [], "was not interrupted"),
        ([5, 30, 31, 6], [1, 2], "after 1 tokens instead of 2 to 3"),
        ([5, 5, 5, 5, 30, 31], [4, 5], "after 4 tokens instead of 2 to 3"),
        ([5, 31, 30, 31, 6], [2, 3], "although it had ended"),
        ([5, 5, 5, 31, 30, 6], [3, 4], "not the 2 ids"),
        ([5, 5, 5, 30, 6, 31], [3, 5], "not the 2 ids"),
    ],
)
def test_thinking_is_interrupted_where_the_user_has_asked_for_it(
    ids: list[int], inserted: list[int], says: str | None
) -> None:
    sampled = ~np.isin(np.arange(len(ids)), inserted)
    found = broken_rule(np.array(ids), sampled, 2, 3, INSERTED, END)
    assert found is None if says is None else says in (found or "")


# ---- rewards -----------------------------------------------------------------------------------------------------


def test_a_reward_is_the_sum_of_its_scores_with_the_users_weights(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, reward_weights=[2.0, 0.5])
    proof.check_reward("a", 2.0 * 3 + 0.5 * 4, [3.0, 4.0])
    # The score of an environment has no weight of the user's.
    proof.check_reward("a", 6.0 + 1.0, [3.0, None, 1.0])
    proof.check_reward("a", float("nan"), [None, None])
    for reward, scores in ((7.0, [3.0, 4.0]), (0.0, [None, None]), (float("nan"), [3.0, 4.0])):
        with pytest.raises(ProofError, match="rewards"):
            proof.check_reward("a", reward, scores)
    assert weighted_sum([None, 0.0], (2.0,)) == 0.0


# ---- the loss ----------------------------------------------------------------------------------------------------

DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "bias": {"bias": {3: 2.0, 5: -1.0}},
    "repetition": {"repetition": 1.7},
    "presence and frequency": {"presence": 0.5, "frequency": 0.3},
    "all": {"bias": {3: 2.0}, "repetition": 1.7, "presence": -0.5, "frequency": 0.3},
    "allowed ids": {"allowed": [0, 4, 9], "bias": {4: 1.0}},
}


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_the_definition_of_a_log_prob_is_that_of_the_engines(case: str) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 3
    settings = DISTRIBUTIONS[case]
    prompt, before = [1, 3, 3], [4, 5, 5, 3]
    found = logprob(logits.numpy(), 4, 0.7, prompt=prompt, before=before, **settings)
    names = {
        "repetition": "repetition_penalty",
        "presence": "presence_penalty",
        "frequency": "frequency_penalty",
    }
    fields = {names[n]: v for n, v in settings.items() if n in names}
    bias, allowed = settings.get("bias", {}), settings.get("allowed")
    sampling = Sampling(
        9,
        temperature=0.7,
        logit_bias=tuple(bias.items()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        **fields,
    )
    assert found == pytest.approx(float(processed_logprobs(logits, sampling, prompt, before)[4]), abs=1e-5)


def test_a_log_prob_among_kept_ids_is_normalised_over_them() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0])
    due = float(torch.tensor([0.0, 2.0, 3.0]).div(0.5).log_softmax(-1)[1])
    assert logprob(logits, 2, 0.5, kept=[0, 2, 3]) == pytest.approx(due)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties and a bias": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {"9": 1.0}},
    "top-k": {"top_k": 8, "repetition_penalty": 1.3},
    # The bias makes inserted ids likely, so that the penalty for them is visible.
    "interrupted": {
        **INTERRUPTED,
        "repetition_penalty": 1.3,
        "logit_bias": {"29": 6.0, "82": 6.0, "86": 6.0},
        "max_completion_length": 14,
    },
    "several steps": {"num_iterations": 2, "beta": 0.1},
}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("fault", [False, True], ids=["as asked", "another temperature"])
def test_the_loss_has_the_temperature_that_the_user_has_asked_for(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, case: str, fault: bool
) -> None:
    fields = {**GROUPS, "temperature": 0.8, "max_steps": 1, **RUNS[case]}
    run, real, looked = methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields), updating.score_pack, []

    def otherwise(model: Any, pack: Any, temperature: float, *rest: Any, **more: Any) -> Any:
        return real(model, pack, temperature * (1.02 if fault else 1.0), *rest, **more)

    def watched(proof: SettingsProof, found: np.ndarray, due: np.ndarray, *, single: bool) -> None:
        looked.extend(found)
        check_logps(proof, found, due, single=single)

    check_logps = SettingsProof.check_logps
    with patch.object(updating, "score_pack", otherwise), patch.object(SettingsProof, "check_logps", watched):
        if not fault:
            run.train()
        else:
            with pytest.raises(
                ProofError, match=r"temperature.*at the temperature 0\.8 that the user has asked for"
            ):
                run.train()
    assert looked
