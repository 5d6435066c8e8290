"""Generations that a real server samples while the trainer learns: right prompts, tokens of known age, a proof.

CI has one case per kind of trainer and shape of generation, and loses the engine at a cut connection. The methods
that share their trainer's code with one of these cases, and a server that is killed meanwhile, are tested before a
release.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import VLLM
from faulty_proxy import GENERATE, faulty_proxy
from methods import INTERRUPTED, StopAfter
from portions import portion
from server_runs import even_tokens, make_trainer, train
from servers import Asked, Server, connect, serve
from test_in_flight import gap_by_version, long_requests
from tiny import make_model, perturbed
from transformers import PreTrainedModel

import lockstep.run.source as source
import lockstep.watch.push as proofs
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import EngineLost, InputError, ProofError
from lockstep.extras.verify.explain import explain_run
from lockstep.learn.generation import Generation
from lockstep.learn.methods.online_dpo import OnlineDPOConfig
from lockstep.learn.methods.ppo import PPOConfig
from lockstep.learn.methods.reinforce_pp import ReinforcePPConfig
from lockstep.learn.methods.rloo import RLOOConfig
from lockstep.rollouts.group import RolloutGroup
from lockstep.run.trainers.methods import (
    GRPOTrainer,
    OnlineDPOTrainer,
    PPOTrainer,
    ReinforcePPTrainer,
    RLOOTrainer,
)
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.watch.receipt import check_receipt
from lockstep.weights.push import push_weights

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.usefixtures("server_key")]

AHEAD: dict[str, Any] = {"max_staleness": 2, "vllm_importance_sampling_correction": True, "logging_steps": 1}


class Watch:
    """Records what each step learned from, and the weights at its start."""

    def __init__(self) -> None:
        self.models: dict[int, PreTrainedModel] = {}
        self.generations: dict[int, Generation] = {}

    @contextmanager
    def __call__(self, trainer: GRPOTrainer, step: int) -> Iterator[None]:
        self.models[step] = deepcopy(trainer.loop.policy().model).eval()
        yield
        assert trainer.loop.generation is not None
        self.generations[step] = trainer.loop.generation


def groups_of(generation: Generation) -> dict[str, RolloutGroup]:
    return {group.prompt.prompt_id: group for group in generation.groups}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    check_receipt(folder / "receipt.jsonl")
    lines = [json.loads(line) for line in (folder / "receipt.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_every_token_has_the_log_prob_of_the_weights_it_is_stamped_with(
    untied_dir: str, tmp_path: Path, server: Server
) -> None:
    watch = Watch()
    # With these sizes pushes come in the middle of completions, and the weights differ enough to be told apart.
    trainer = make_trainer(
        untied_dir,
        tmp_path,
        server.url,
        **AHEAD,
        max_steps=5,
        learning_rate=3e-3,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=200,
    )
    train(trainer, watch)
    assert sorted(watch.generations) == list(range(5))
    ages = set()
    for step, generation in watch.generations.items():
        assert gap_by_version(watch.models, generation.completions) < 2e-3
        ages |= {step - v for c in generation.completions for v in c.weight_versions.tolist()}
        assert all(len(group.rollouts) == 8 for group in generation.groups)
    assert ages <= {0, 1, 2}
    assert 2 in ages
    # The last generation was begun two pushes earlier, by older weights than those that learned from it.
    last = watch.generations[4].completions
    assert gap_by_version(dict.fromkeys(range(5), watch.models[4]), last) > 0.01
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line, generation in zip(lines, watch.generations.values(), strict=True):
        assert line["sampled_tokens"] == sum(len(c.token_ids) for c in generation.completions)
        assert line["checked_tokens"] == generation.due_tokens
        aside = line.get("aside_tokens", 0)
        assert line["stale_tokens"] + aside == line["sampled_tokens"] - line["checked_tokens"]
        assert line["canary"]["tokens"] == 4 * 23
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for log, generation in zip(logs, watch.generations.values(), strict=True):
        old = [generation.version - v for c in generation.completions for v in c.weight_versions.tolist()]
        assert log["staleness/mean"] == pytest.approx(sum(old) / len(old))
        assert log["staleness/max"] == max(old)
        assert log["sampling/tokens"] == len(old)
        assert log["parity/checked_tokens"] == generation.due_tokens
    assert "tokens were older than the weights that learned from them" in explain_run(tmp_path)


def test_prompts_are_those_of_a_run_without_staleness_and_each_sample_has_its_own_seed(
    untied_dir: str, tmp_path: Path, server: Server
) -> None:
    """Three prompts, two per generation, five generations at a time: one prompt is sampled several times at once."""
    turns, ahead = Watch(), Watch()
    data = datasets.Dataset.from_dict({"prompt": [f"what is {i} + {i + 3}" for i in range(3)]})
    for watch, changes in ((turns, {}), (ahead, {**AHEAD, "max_staleness": 4})):
        trainer = make_trainer(
            untied_dir,
            tmp_path / str(len(changes)),
            server.url,
            data=data,
            max_steps=6,
            learning_rate=0.0,
            **changes,
        )
        train(trainer, watch)
    for step in range(6):
        assert turns.generations[step].prompt_ids == ahead.generations[step].prompt_ids
    # The policy never changes, so the same seeds give the same completions at any time.
    for step in range(6):
        for one, other in zip(
            turns.generations[step].completions, ahead.generations[step].completions, strict=True
        ):
            assert one.token_ids.tolist() == other.token_ids.tolist()
    assert len({c.token_ids.tobytes() for g in ahead.generations.values() for c in g.completions}) > 6 * 4


def test_wrong_weights_are_detected_even_if_every_token_is_old(
    untied_dir: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = source.push_weights

    def pushes_others(model: Any, engine: Any, version: int) -> Any:
        return real(perturbed(model, scale=0.5) if version == 2 else model, engine, version)

    monkeypatch.setattr(source, "push_weights", pushes_others)
    # The probes would find the fault first, so they are switched off: the canary must find the fault alone.
    monkeypatch.setattr(proofs, "check_probe", lambda *_: None)
    monkeypatch.setattr(proofs, "check_held", lambda *_: None)
    trainer = make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=4)
    with pytest.raises(ProofError, match="canary"):
        train(trainer)
    assert trainer.state.global_step == 2
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2]


def test_a_token_that_is_too_old_stops_the_run(
    untied_dir: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=6)
    monkeypatch.setattr(type(trainer.config), "generations_ahead", property(lambda _: 3))
    with pytest.raises(ProofError, match="staleness of at most 2"):
        train(trainer)


KINDS = (
    "several steps per generation",
    "RLOO",
    "PPO",
    "REINFORCE++",
    "Online DPO",
    "solved prompts leave",
    "interrupted",
)
# These two methods use the loop of GRPO and of PPO. Their losses are tested without an engine.
AS_ANOTHER = {"RLOO", "REINFORCE++"}


@pytest.mark.parametrize("kind", portion(KINDS, lambda kind: kind not in AS_ANOTHER))
def test_other_methods_and_shapes_learn_from_generations_ahead(
    kind: str, untied_dir: str, tmp_path: Path, server: Server
) -> None:
    common = {"output_dir": str(tmp_path), "vllm_server_base_url": server.url, "vllm_server_timeout": 120.0}
    common |= {"report_to": "none", "save_strategy": "no", "bf16": False, "logging_steps": 1, "max_steps": 4}
    common |= {"max_staleness": 2, "learning_rate": 1e-3, "disable_tqdm": True}
    data = datasets.Dataset.from_dict({"prompt": [f"what is {i} + {i + 3}" for i in range(12)]})
    trainer: OnlineTrainer
    groups = {"per_device_train_batch_size": 8, "max_completion_length": 20, "beta": 0.05}
    if kind == "RLOO":
        trainer = RLOOTrainer(
            untied_dir, even_tokens, RLOOConfig(**common, **groups, num_generations=4), data
        )
    elif kind == "PPO":
        trainer = PPOTrainer(untied_dir, even_tokens, PPOConfig(**common, **groups, num_generations=1), data)
    elif kind == "REINFORCE++":
        trainer = ReinforcePPTrainer(untied_dir, even_tokens, ReinforcePPConfig(**common, **groups), data)
    elif kind == "Online DPO":
        dpo = OnlineDPOConfig(**common, per_device_train_batch_size=4, max_new_tokens=20)
        trainer = OnlineDPOTrainer(untied_dir, reward_funcs=even_tokens, args=dpo, train_dataset=data)
    else:
        more: dict[str, Any] = {
            "several steps per generation": {"steps_per_generation": 2},
            "solved prompts leave": {"no_positive_resampling": 0.5},
            "interrupted": INTERRUPTED,
        }[kind]
        trainer = make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=4, **more)
    train(trainer)  # type: ignore[arg-type]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["staleness/max"] for log in logs if "staleness/max" in log][-1] > 0
    assert trainer.state.global_step == 4
    if kind == "interrupted":
        assert all(log["completions/interrupted"] > 0 for log in logs)
    counted = [
        line["stale_tokens"] + line["checked_tokens"] + line.get("aside_tokens", 0)
        for line in steps_of(tmp_path)
    ]
    assert counted == [line["sampled_tokens"] for line in steps_of(tmp_path)]
    assert all(torch.isfinite(torch.tensor(log["loss"])) for log in logs)


def test_a_run_goes_on_from_its_checkpoint_with_the_prompts_that_it_would_have_got(
    untied_dir: str, tmp_path: Path, server: Server
) -> None:
    whole, again = Watch(), Watch()
    saves = {"save_strategy": "steps", "save_steps": 2}
    train(make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=4, **saves), whole)
    resumed = make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=4, **saves)
    train(resumed, again, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(again.generations) == [2, 3]
    for step in (2, 3):
        assert whole.generations[step].prompt_ids == again.generations[step].prompt_ids
    # The unfinished generations are sampled again, with the weights of the checkpoint.
    assert {v for c in again.generations[2].completions for v in c.weight_versions.tolist()} == {2}
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4]


def test_a_second_run_begins_without_open_requests(untied_dir: str, tmp_path: Path, server: Server) -> None:
    trainer = make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=5)
    trainer.add_callback(StopAfter(2))
    trainer.train()
    assert trainer.state.global_step == 2
    trainer.remove_callback(StopAfter)
    watch = Watch()
    train(trainer, watch)
    assert sorted(watch.generations) == list(range(5))
    for generation in watch.generations.values():
        assert gap_by_version(watch.models, generation.completions) < 2e-3


def test_a_scoring_request_is_answered_before_generation_requests_that_wait(server: Server) -> None:
    engine = connect(server.url)
    push_weights(make_model(), engine, 1)
    # Without priorities, the server would answer the score after all requests that came before it. This process may
    # also read the answer so late that all other requests are answered too. Therefore there are several attempts.
    assert any(waits_after_a_score(server, engine) for _ in range(5))
    engine.close()


def waits_after_a_score(server: Server, engine: VLLMServer) -> bool:
    """Whether some of the requests that were sent before a score still wait when the score has arrived."""
    # Four times as many requests as the server decodes together. They are long, so that the last of them wait for
    # seconds.
    waiting, deadline = Asked(engine, long_requests(256, 400)), time.monotonic() + 60
    while server.waiting_requests() < 100:
        assert time.monotonic() < deadline
    engine.score({"canary": (5, 6, 7, 8)})
    found = server.waiting_requests() > 0
    assert len(waiting.result()) == 256
    return found


def test_a_run_goes_on_if_the_engine_is_lost_while_it_scores_the_canary(
    untied_dir: str, tmp_path: Path, server: Server
) -> None:
    trainer, watch = make_trainer(untied_dir, tmp_path, server.url, **AHEAD, max_steps=5), Watch()
    engine = trainer.engine
    real, asked = engine.submit_scores, []

    def submit(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        pending = real(*args, **kwargs)
        if len(asked) == 3:
            pending.cancel()
            lost = EngineLost("the server is gone", engine.recover)
            pending.result = lambda: raise_(lost)
        return pending

    engine.submit_scores = submit
    train(trainer, watch)
    assert trainer.source.losses == 1
    # The canary was requested once per step, and once more after the loss. At the start of training another call
    # scores it.
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4, 5]
    for generation in watch.generations.values():
        assert gap_by_version(watch.models, generation.completions) < 2e-3


def raise_(error: Exception) -> Any:
    raise error


def test_an_evaluation_between_steps_is_of_the_policy_as_it_is(
    untied_dir: str, tmp_path: Path, server: Server
) -> None:
    trainer = make_trainer(
        untied_dir, tmp_path, server.url, **AHEAD, max_steps=4, eval_strategy="steps", eval_steps=2
    )
    engine, limits = trainer.source.engine, set()
    real = engine.serve

    def noted(inbox: Any) -> None:
        limits.add(inbox.limit)
        real(inbox)

    engine.serve = noted
    train(trainer)
    # The evaluation waits behind two generations, so its time limit includes theirs.
    assert limits == {3 * trainer.config.generation_timeout}
    versions = {
        v for g in trainer.last_eval_groups for r in g.rollouts for v in r.completion.weight_versions.tolist()
    }
    assert versions == {4}
    assert [log["step"] for log in trainer.state.log_history if "eval_reward" in log] == [2, 4]


@pytest.mark.release
@pytest.mark.parametrize("role", ["api", "core"])
def test_a_server_that_is_killed_with_generations_under_way_loses_none(
    role: str, untied_dir: str, tmp_path: Path
) -> None:
    with serve(untied_dir, tmp_path) as server:
        check_nothing_is_lost(untied_dir, tmp_path / "run", server.url, lambda: server.kill(role))


def test_an_answer_that_is_cut_off_with_generations_under_way_loses_none(
    untied_dir: str, tmp_path: Path, server: Server
) -> None:
    with faulty_proxy(server.url) as proxy:
        check_nothing_is_lost(untied_dir, tmp_path / "run", proxy.url, lambda: proxy.once("cut", GENERATE))
        assert proxy.faults == 1


def check_nothing_is_lost(model: str, folder: Path, url: str, lose: Callable[[], None]) -> None:
    """Lose the engine in the third step. Every prompt is learned from once, and every token has the right log-prob."""
    watch = Watch()

    def losing(trainer: GRPOTrainer, step: int) -> Any:
        if step == 2:
            lose()
        return watch(trainer, step)

    trainer = make_trainer(model, folder, url, **AHEAD, max_steps=6, max_completion_length=100)
    train(trainer, losing)
    assert trainer.source.losses >= 1
    assert sorted(watch.generations) == list(range(6))
    for generation in watch.generations.values():
        assert gap_by_version(watch.models, generation.completions) < 2e-3
    names = [name for generation in watch.generations.values() for name in groups_of(generation)]
    assert len(names) == len(set(names)) == 12
    assert [line["step"] for line in steps_of(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 3, "steps_per_generation": 2}, "multiple of the 2 optimizer steps"),
        ({"max_staleness": -1}, "it must be at least 0 and at most 1000"),
        ({"vllm_importance_sampling_correction": False}, "uncorrected"),
    ],
)
def test_what_does_not_go_with_staleness_is_refused(
    changes: dict[str, Any], message: str, untied_dir: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        make_trainer(untied_dir, tmp_path, "http://127.0.0.1:1", **{**AHEAD, **changes})
