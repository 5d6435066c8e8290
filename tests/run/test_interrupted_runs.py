"""Runs with interrupted thinking: every method, proven on the sampled tokens only, on both engines in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from conftest import VLLM, start
from methods import ALONE, GROUPS, INTERRUPTED, PAIRS, PROMPTS, make, parameters
from played_engine import ChangedAnswers
from tiny import make_tokenizer

import lockstep
import lockstep.learn.generation
import lockstep.learn.policy_and_reference
import lockstep.watch.run
from lockstep.config.sampling import interruption_of
from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, Engine
from lockstep.errors import InputError, ProofError
from lockstep.learn.generation import Generation, sequences_of
from lockstep.rollouts.group import Rollout
from lockstep.rollouts.programs.interruptions import Interruption
from lockstep.run.files.identity import curve_settings
from lockstep.watch.receipt import RECEIPT, check_chain, check_receipt

LIMIT = 20
AFTER = INTERRUPTED["max_thinking_length"]
PUT_IN = make_tokenizer()(INTERRUPTED["interruption"], add_special_tokens=False)["input_ids"]
BOTH = ["transformers", pytest.param("vllm", marks=VLLM)]
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO, sequences, KL": (
        "GRPO",
        {
            **GROUPS,
            "beta": 0.1,
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "num_iterations": 2,
        },
    ),
    "ScaleRL": ("GRPO", {**GROUPS, "loss_type": "cispo", "epsilon_high": 5.0, "average_by_prompt": True}),
    "GRPO, entropy": ("GRPO", {**GROUPS, "entropy_coef": 0.01, "top_entropy_quantile": 0.5}),
    "Online DPO": ("OnlineDPO", PAIRS),
    "PPO": ("PPO", {**ALONE, "num_iterations": 2}),
    "REINFORCE++": ("ReinforcePP", {**GROUPS, "beta": 0.1}),
    "RLOO": ("RLOO", {**GROUPS, "beta": 0.1, "num_iterations": 2}),
}


@pytest.fixture(scope="module", params=BOTH)
def either(request: pytest.FixtureRequest, untied_dir: str) -> Iterator[Engine]:
    """The same engine for all trainers; each trainer pushes its own weights."""
    started = start(request.param, untied_dir)
    yield started
    started.close()


class Answered:
    """The number of tokens that an engine has returned, by generation."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        real = engine.serve

        def counting(inbox: Inbox) -> None:
            self.calls.append(0)
            real(ChangedAnswers(inbox, self.counted))  # type: ignore[arg-type]

        patch.setattr(engine, "serve", counting)

    def counted(self, completion: Completion) -> Completion:
        self.calls[-1] += len(completion.token_ids)
        return completion


def limited(method: str, fields: dict[str, Any], limit: int = LIMIT) -> dict[str, Any]:
    name = "max_new_tokens" if method == "OnlineDPO" else "max_completion_length"
    # About half of the completions end before they could be interrupted.
    return {**fields, **INTERRUPTED, "stop_strings": list(ascii_lowercase), name: limit}


def was_interrupted(ids: Sequence[int]) -> bool:
    return list(ids[AFTER : AFTER + len(PUT_IN)]) == PUT_IN


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_sampled_token_is_proven_and_no_other_is_counted(
    name: str, untied_dir: str, tmp_path: Path, either: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, fields = METHODS[name]
    answered = Answered(either, monkeypatch)
    ids: list[list[list[int]]] = []
    texts: list[list[str]] = []

    def seen(completion_ids: list[list[int]], completions: list[str], **_: Any) -> list[float]:
        ids.append(completion_ids)
        texts.append(completions)
        return [float(len(own) + own[0] % 7) for own in completion_ids]

    passes = fields.get("num_iterations", 1)
    changes = {"max_steps": 2 * passes, "rehearse_rewards": False, "recheck_rewards": False}
    run = make(
        method, untied_dir, tmp_path, either, {**limited(method, fields), **changes}, reward_funcs=seen
    )
    before = parameters(run.model)
    run.train()

    logs = [log for log in run.state.log_history if "loss" in log]
    sampled = answered.calls
    assert len(sampled) == 2
    assert 0 < sum(map(was_interrupted, ids[0] + ids[1])) < len(ids[0] + ids[1])
    for generation, log in enumerate(logs[::passes]):
        own = ids[generation]
        interrupted = [was_interrupted(one) for one in own]
        assert log["completions/interrupted"] == sum(interrupted) / len(interrupted)
        # Reward functions get the whole completion.
        assert sum(map(len, own)) == sampled[generation] + sum(interrupted) * len(PUT_IN)
        assert log["completions/mean_length"] == pytest.approx(sampled[generation] / len(own))
        assert max(map(len, own)) <= LIMIT
        assert all(
            INTERRUPTED["interruption"] in t for t, i in zip(texts[generation], interrupted, strict=True) if i
        )
    # A pass over a generation checks all of its tokens.
    expected = [count for count in sampled for _ in range(passes)]
    assert [log["parity/checked_tokens"] for log in logs] == expected
    assert all(0.0 < log["parity/max_abs_gap"] < 1e-3 for log in logs)
    lines = (tmp_path / RECEIPT).read_text().splitlines()
    check_chain(lines)
    assert check_receipt(tmp_path / RECEIPT) == 3
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    assert (
        [entry["sampled_tokens"] for entry in steps]
        == [entry["checked_tokens"] for entry in steps]
        == sampled
    )
    assert any(not torch.equal(tensor, before[n]) for n, tensor in parameters(run.model).items())


def test_a_trainer_that_took_what_was_put_in_for_sampled_is_stopped(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_sampled(groups: Any, version: int) -> Any:
        whole = [r.completion.logprobs for group in groups for r in group.rollouts]
        made = zip(sequences_of(groups, version), whole, strict=True)
        return [replace(s, sampled=None, behaviour_logps=logps) for s, logps in made]

    monkeypatch.setattr(lockstep.learn.generation, "sequences_of", all_sampled)
    run = make("GRPO", untied_dir, tmp_path, hf_engine, limited("GRPO", GROUPS))
    with pytest.raises(ProofError, match="the ids, or the ids before them, of rollout"):
        run.train()
    # Without this comparison the count would show it.
    monkeypatch.setattr(lockstep.watch.run, "check_entering", lambda *_: None)
    run = make("GRPO", untied_dir, tmp_path, hf_engine, limited("GRPO", GROUPS))
    with pytest.raises(ProofError, match="tokens were compared at version 0"):
        run.train()
    # If the count were wrong too, the gap would be large, because inserted tokens are recorded with probability 1.
    for count in ("sampled_tokens", "fresh_tokens"):
        monkeypatch.setattr(
            Generation, count, property(lambda self: sum(len(c.token_ids) for c in self.completions))
        )
    run = make("GRPO", untied_dir, tmp_path, hf_engine, limited("GRPO", GROUPS))
    with pytest.raises(ProofError, match="mean_abs_gap"):
        run.train()
    assert run.state.global_step == 0


def test_places_that_are_drawn_differ_within_a_group_and_are_proven_alike(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**limited("GRPO", GROUPS), "max_steps": 1, "max_thinking_length": 9, "min_thinking_length": 1}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    found = [r.completion for group in run.loop.generation.groups for r in group.rollouts]
    places = {int(c.sampled.argmin()) for c in found if c.sampled is not None}
    assert len(places) > 1
    assert places <= set(range(1, 10))
    log = run.state.log_history[0]
    assert log["parity/checked_tokens"] == sum(len(c.sampled_places) for c in found)
    assert log["parity/max_abs_gap"] < 1e-3


def test_where_no_thinking_is_interrupted_nothing_is_logged_and_where_none_needs_it_zero(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**limited("GRPO", GROUPS), "max_steps": 1}
    without = make("GRPO", untied_dir, tmp_path, hf_engine, {**fields, "max_thinking_length": None})
    without.train()
    assert "completions/interrupted" not in without.state.log_history[0]
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    assert run.state.log_history[0]["completions/interrupted"] > 0

    def patient(rollout: Rollout) -> Rollout:
        return replace(rollout, completion=replace(rollout.completion, sampled=None))

    groups = [replace(g, rollouts=tuple(map(patient, g.rollouts))) for g in run.loop.generation.groups]
    assert run.source.metrics(groups, 0)["completions/interrupted"] == 0.0


def test_an_evaluation_is_interrupted_as_training_is(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make(
        "GRPO",
        untied_dir,
        tmp_path,
        hf_engine,
        limited("GRPO", GROUPS),
        eval_dataset=PROMPTS.select(range(3)),
    )
    metrics = run.evaluate()
    rollouts = [r for group in run.last_eval_groups for r in group.rollouts]
    interrupted = [was_interrupted(r.completion.token_ids.tolist()) for r in rollouts]
    assert metrics["eval_completions/interrupted"] == sum(interrupted) / len(interrupted) > 0


def test_the_fields_belong_to_what_a_run_that_goes_on_must_share(tmp_path: Path) -> None:
    config = lockstep.GRPOConfig(output_dir=str(tmp_path), **INTERRUPTED)
    assert {name: curve_settings(config)[name] for name in INTERRUPTED} == INTERRUPTED


# ---- bad input ---------------------------------------------------------------------------------------------------


def config(method: str = "GRPO", **fields: Any) -> Any:
    return getattr(lockstep, f"{method}Config")(output_dir="unused", **fields)


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "OnlineDPO", "ReinforcePP", "PPO"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_thinking_length": 0}, "max_thinking_length=0; it must be at least 1"),
        (
            {"max_thinking_length": 9, "min_thinking_length": 0},
            "min_thinking_length=0; it must be at least 1",
        ),
        (
            {"max_thinking_length": 9, "min_thinking_length": 10},
            "min_thinking_length=10; it must be at least 1 and at most 9",
        ),
        ({"min_thinking_length": 9}, "min_thinking_length=9 needs max_thinking_length"),
        (
            {"max_thinking_length": 512},
            r"max_thinking_length=512 leaves nothing for an answer within the (512|64) tokens",
        ),
        (
            {"max_thinking_length": 9, "interruption": ""},
            "interruption='' does not hold end_of_thinking='</think>'",
        ),
        (
            {"max_thinking_length": 9, "interruption": "Stop."},
            "interruption='Stop.' does not hold end_of_thinking=",
        ),
        ({"max_thinking_length": 9, "end_of_thinking": " "}, "end_of_thinking=' '; it must be the text"),
        (
            {"max_thinking_length": 9, "stop_strings": ["x", "/th"]},
            "stop_strings: '/th' ends every completion where",
        ),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_named(
    method: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        config(method, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_completion_length": AFTER + len(PUT_IN)},
            rf"an interruption of {len(PUT_IN)} tokens leave nothing for an",
        ),
        ({"interruption": "<|end|>."}, r"interruption='<\|end\|>.': the tokenizer makes an end token"),
        ({"interruption": "<|end|>", "end_of_thinking": "<|end|>"}, "the tokenizer makes an end token"),
    ],
    ids=str,
)
def test_what_only_the_tokenizer_can_tell_is_named_before_a_model_is_loaded(
    fields: dict[str, Any], message: str, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lockstep.learn.policy_and_reference, "load_policy", lambda *_: pytest.fail("a model was loaded")
    )
    with pytest.raises(InputError, match=message):
        make("GRPO", untied_dir, tmp_path, None, {**limited("GRPO", GROUPS), "stop_strings": None, **fields})  # type: ignore[arg-type]


def test_one_more_token_is_room_for_an_answer() -> None:
    fields = limited("GRPO", GROUPS, AFTER + len(PUT_IN) + 1)
    found = interruption_of(config(**fields), make_tokenizer())
    assert found == Interruption(AFTER, tuple(PUT_IN), tuple(make_tokenizer()(".")["input_ids"]))
    assert interruption_of(config(**fields, min_thinking_length=2), make_tokenizer()) == replace(
        found, earliest=2
    )
    assert interruption_of(config(), make_tokenizer()) is None


def test_an_end_of_thinking_of_several_tokens_is_said_once(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    make("GRPO", untied_dir, tmp_path, hf_engine, limited("GRPO", GROUPS))
    assert "end_of_thinking" not in "".join(capsys.readouterr())
    long = {"max_thinking_length": 3, "max_completion_length": 200}
    make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **long})
    assert "".join(capsys.readouterr()).count("end_of_thinking='</think>' is ") == 1
