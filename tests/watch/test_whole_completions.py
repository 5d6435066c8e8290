"""Faults of the backward that only whole completions show: late positions, early ones, chunks, the critic, one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import numpy as np
import pytest
import torch
from conftest import needs_vllm
from datasets import Dataset
from filters import rules_of
from methods import lora
from portions import portion
from servers import Server, connect
from stages import config
from test_step_gradient import From, logged
from tiny import make_model

import lockstep.learn.recomputation as recomputation
import lockstep.learn.token_logps as token_logps
from lockstep.contract.protocol import Engine
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.tokens.arrays import reals
from lockstep.watch import drawn_sums, model_gradient
from lockstep.watch.model_gradient import ModelGradient
from lockstep.watch.receipt import RECEIPT, read_receipt

LONG = Dataset.from_dict({"prompt": [f"what is {i} + {i} " * 12 for i in range(8)]})
# Positions up to which every gradient is right. A check of parts of completions never had more.
SHORT = 56
Change = Callable[[torch.Tensor], torch.Tensor]
Fault = Callable[[Any], None]


def late(made: torch.Tensor) -> torch.Tensor:
    return torch.cat([made[:, :SHORT], made[:, SHORT:].detach()], 1)


def early(made: torch.Tensor) -> torch.Tensor:
    return torch.cat([made[:, :-SHORT].detach(), made[:, -SHORT:]], 1)


def late_halved(made: torch.Tensor) -> torch.Tensor:
    return torch.cat([made[:, :SHORT], (made[:, SHORT:] + made[:, SHORT:].detach()) / 2], 1)


def on_modules(change: Change, *names: str) -> Fault:
    def inject(run: Any) -> None:
        for name, module in run.model.named_modules():
            if name.endswith(names):
                module.register_forward_hook(lambda module, given, made: change(made))

    return inject


late_rotations = on_modules(late, "q_proj", "k_proj")
late_mlp = on_modules(late, "layers.0.mlp")
early_values = on_modules(early, "layers.0.self_attn.v_proj")
early_embeddings = on_modules(early, "embed_tokens")
late_half = on_modules(late_halved, "layers.1.self_attn.o_proj")


def critic_alone(run: Any) -> None:
    run.critic.register_forward_pre_hook(lambda module, given: (given[0].detach(),))


def critic_halved(run: Any) -> None:
    run.critic.register_forward_pre_hook(lambda module, given: ((given[0] + given[0].detach()) / 2,))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """With seed 0 parts are checked after every second step, and whole completions after 0, 4, 8 … steps."""
    monkeypatch.setattr(model_gradient, "EVERY", 2)
    monkeypatch.setattr(model_gradient, "EVERY_SUM", 4)


def long_run(folder: Path, model: str, engine: Engine | None = None, **more: Any) -> Any:
    fields = {"max_completion_length": 16, "max_steps": 7, "seed": 0, "train_dataset": LONG, **more}
    if engine is None:
        fields["use_vllm"] = False
    data = fields.pop("train_dataset")
    method = fields.pop("method", "GRPO")
    arguments = {name: fields.pop(name) for name in ("peft_config",) if name in fields}
    fields = {**methods.FIELDS[method], "learning_rate": 1e-3, **fields}
    return methods.make(method, model, folder, engine, fields, train_dataset=data, **arguments)


def stopped(run: Any, fault: Fault, first: int, resume: bool = False) -> tuple[str, int]:
    """The proof that stops a run with a fault from a step on, and the number of steps before that."""
    if first:
        run.add_callback(From(first, lambda: fault(run)))
    else:
        fault(run)
    with pytest.raises(ProofError) as error:
        run.train(resume_from_checkpoint=resume or None)
    run.close()
    return error.value.check, run.state.global_step


# Each pair of dtype and moment occurs; what a run samples with has no part in a backward.
# CI runs one in bf16, and one of a critic.
CASES: list[tuple[Fault, str, dict[str, Any], str, int]] = [
    (late_rotations, "late rotations", {}, "first", 0),
    (late_rotations, "late rotations, bf16", {"bf16": True}, "middle", 4),
    (late_mlp, "late mlp, recomputed", {"gradient_checkpointing": True}, "middle", 4),
    (late_mlp, "late mlp, LoRA in bf16", {"bf16": True, "peft_config": lora()}, "first", 0),
    (early_values, "early values", {"bf16": True}, "resumed", 2),
    (early_embeddings, "early embeddings", {}, "resumed", 2),
    (late_half, "late half", {"gradient_accumulation_steps": 2}, "middle", 4),
    (critic_alone, "critic", {"method": "PPO"}, "first", 1),
    (critic_halved, "half of the critic, bf16", {"method": "PPO", "bf16": True}, "middle", 4),
    (critic_alone, "critic, resumed", {"method": "PPO"}, "resumed", 2),
]


def in_ci(case: tuple[Any, ...]) -> bool:
    return case[1] in ("late rotations, bf16", "critic")


@pytest.mark.parametrize(("fault", "name", "fields", "moment", "at"), portion(CASES, in_ci))
def test_a_fault_of_long_sequences_stops_the_run(
    untied_dir: str, tmp_path: Path, fault: Fault, name: str, fields: dict[str, Any], moment: str, at: int
) -> None:
    if moment == "resumed":
        fields = {**fields, "save_strategy": "steps", "save_steps": 2}
        long_run(tmp_path, untied_dir, **{**fields, "max_steps": 2}).train()
    run = long_run(tmp_path, untied_dir, **fields)
    first = 3 if moment == "middle" else 0
    assert stopped(run, fault, first, moment == "resumed") == ("model_gradient", at)


@pytest.mark.release
@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(("moment", "at"), [("first", 0), ("middle", 4), ("resumed", 2)])
def test_it_stops_a_run_beside_a_server_too(
    untied_dir: str, tmp_path: Path, server: Server, moment: str, at: int
) -> None:
    # The server computes in float32.
    more: dict[str, Any] = {"bf16": True, "engine_dtype": "float32"} if moment != "middle" else {}
    if moment == "resumed":
        more |= {"save_strategy": "steps", "save_steps": 2}
        long_run(tmp_path, untied_dir, connect(server.url), **more, max_steps=2).train()
    run = long_run(tmp_path, untied_dir, connect(server.url), **more)
    first = 3 if moment == "middle" else 0
    assert stopped(run, early_values, first, moment == "resumed") == ("model_gradient", at)


def test_a_chunk_of_the_head_without_a_gradient_stops_the_run(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = token_logps.checkpoint
    calls: list[int] = []

    def fourth_lost(function: Any, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        calls.append(1)
        return real(function, hidden.detach() if len(calls) % 4 == 0 else hidden, *rest, **more)

    monkeypatch.setattr(token_logps, "checkpoint", fourth_lost)
    run = long_run(tmp_path, untied_dir, logits_chunk_size=4)
    assert stopped(run, lambda run: None, 0) == ("model_gradient", 0)


@pytest.mark.release
def test_a_recomputed_layer_that_loses_late_positions_stops_the_run(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where activations have no room, layers keep products only. The tiny model's layers have room for everything."""
    real = recomputation.checkpoint

    def lost(forward: Any, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return real(forward, late(hidden), *rest, **more)

    monkeypatch.setattr(recomputation, "WEIGHTS_OF_ROOM", 0.0)
    monkeypatch.setattr(recomputation, "checkpoint", lost)
    run = long_run(tmp_path, untied_dir)
    assert stopped(run, lambda run: None, 0) == ("model_gradient", 0)


CLEAN: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "LoRA": {"peft_config": lora(), "bf16": True},
    "two updates": {"num_iterations": 2},
    "staleness": {"max_staleness": 1},
    "PPO": {"method": "PPO", "bf16": True},
    "filters": {"top_p": 0.9, "bf16": True},
}


@pytest.mark.parametrize("name", portion(CLEAN, lambda name: name == "PPO"))
def test_clean_long_runs_pass(
    untied_dir: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_gradient, "EVERY", 1)
    monkeypatch.setattr(model_gradient, "EVERY_SUM", 1)
    fields = CLEAN[name]
    run = long_run(tmp_path, untied_dir, **{"max_steps": 4, **fields})
    run.train()
    errors = [log["checked/model_gradient_error"] for log in logged(run)]
    assert len(errors) == 4
    assert max(errors) < 0.025
    if fields.get("method") == "PPO":
        # The value head is 0 before the first step.
        assert ["checked/value_gradient_error" in log for log in logged(run)] == [False, True, True, True]
    run.close()


@pytest.mark.release
def test_what_has_no_room_without_autocast_is_compared_with_it(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack has as many positions as one completion. Half of it has room for parts of completions only."""
    longest = max(len(row.split()) for row in LONG["prompt"])
    assert longest < 80
    run = long_run(tmp_path / "clean", untied_dir, bf16=True, token_budget=90, max_steps=2)
    with patch.object(model_gradient, "whole", wraps=drawn_sums.whole) as whole:
        run.train()
    assert {call.args[2] for call in whole.call_args_list} == {90}
    run.close()
    run = long_run(tmp_path / "faulty", untied_dir, bf16=True, token_budget=90)
    assert stopped(run, late_rotations, 0) == ("model_gradient", 0)


def sequence(name: str, prompt: int, completion: int, seed: int = 0) -> TrainingSequence:
    draws = np.random.default_rng(seed)
    ids = draws.integers(1, 384, prompt + completion)
    return TrainingSequence(name, ids[:prompt], ids[prompt:], reals([0.0] * completion))


def test_the_longest_of_four_is_chosen_whole_with_neighbours_that_add_no_more_than_it_has() -> None:
    group = [sequence(f"a{i}", 50, 10 + i) for i in range(4)]
    others = [sequence(f"b{i}", 20, 5, seed=1) for i in range(8)]
    sequences = [*others[:4], *group, *others[4:]]
    longest = 0
    for seed in range(50):
        packed, chosen = drawn_sums.whole(sequences, range(12), 10_000, np.random.default_rng(seed))
        assert len(chosen) == 1
        assert chosen[0] in packed
        assert len(packed) > 1
        assert packed == sequences[sequences.index(packed[0]) :][: len(packed)]
        longest += chosen[0] in group
        size = len(chosen[0].path)
        more = sum(drawn_sums._more(s, chosen[0]) for s in packed if s is not chosen[0])
        assert more <= size
    assert longest > 40
    alone, _ = drawn_sums.whole(sequences, [7], 62, np.random.default_rng(0))
    assert [s.name for s in alone] == ["a3"]


def error_of(model: Any, sequences: list[TrainingSequence], folder: Path) -> float:
    adopt_tree_attention(model)
    policy = Policy(
        model.train(), torch.enable_grad, lambda loss: loss.backward(), rules=rules_of(Sampling(6))
    )
    proof = ModelGradient(lambda: [model], config(folder, bf16=False), 0, entropies=False)
    return proof.begin(policy, sequences, [], 0).figures["checked/model_gradient_error"]


@pytest.mark.release
@pytest.mark.parametrize("lost", [1, 4, 16, 64])
def test_the_smallest_share_of_positions_that_is_found(tmp_path: Path, lost: int) -> None:
    """A layer's mlp without a gradient at the last positions before a completion of 100 ids."""
    model = make_model("qwen3")
    sequences = [sequence("one", 200, 100)]

    def change(module: Any, given: Any, made: torch.Tensor) -> torch.Tensor:
        return torch.cat([made[:, :-lost], made[:, -lost:].detach()], 1)

    handle = model.model.layers[0].mlp.register_forward_hook(change)
    found = ""
    try:
        error = error_of(model, sequences, tmp_path)
    except ProofError as refused:
        found, error = refused.check, math.nan
    handle.remove()
    print(f"{lost} of 300 positions of one mlp: {found or f'{error:.3f}, passes'}")
    assert found == "model_gradient" or lost < 16


def test_completions_of_pictures_are_parts_only(tmp_path: Path) -> None:
    found = drawn_sums.parts([sequence("one", 100, 40)], np.random.default_rng(0))
    assert [(len(s.prompt_ids), len(s.completion_ids)) for s in found[1]] == [(32, 12)]


def test_a_critic_that_could_not_be_compared_is_a_line_of_the_receipt(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, moves: Any, dtype: Any = None) -> float:
        raise NotImplementedError("no kernel for a wide dtype")

    monkeypatch.setattr("lockstep.watch.finite_differences.DrawnSum.total", fails)
    monkeypatch.setattr(model_gradient, "EVERY", 10)
    run = long_run(tmp_path, untied_dir, method="PPO", max_steps=2, seed=5)
    run.train()
    run.close()
    lines = [line for line in read_receipt(tmp_path / RECEIPT) if line["kind"] == "unproven"]
    assert [(line["step"], line["proof"]) for line in lines] == [(1, "model_gradient"), (2, "model_gradient")]
