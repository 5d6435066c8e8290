"""Every method with real vLLM in this process: its loop pushes, every token is proven, vLLM has the learned weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM, start
from methods import ALONE, GROUPS, PAIRS, by_length, lora, make
from tiny import CONTEXT, make_model
from transformers import PreTrainedModel, TrainerCallback

from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.learn.methods.online_dpo import OnlineDPOObjective
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.arithmetic import Precision
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.push import score_canary
from lockstep.weights.push import weights_of

pytestmark = VLLM
LIMIT = 1e-3
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO, LoRA": ("GRPO", GROUPS),
    "Online DPO": ("OnlineDPO", PAIRS),
    "PPO": ("PPO", ALONE),
    "REINFORCE++": ("ReinforcePP", {**GROUPS, "beta": 0.1}),
    "RLOO": ("RLOO", GROUPS),
}


@pytest.fixture(scope="module")
def vllm(untied_dir: str) -> Iterator[VLLMInProcess]:
    """One engine for all trainers; each trainer pushes its own weights."""
    started = start("vllm", untied_dir)
    yield started  # type: ignore[misc]
    started.close()


class Snapshots(TrainerCallback):
    """The weights after each step, under the engine's names."""

    def __init__(self) -> None:
        self.taken: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.taken.append({name: tensor.detach().cpu().clone() for name, tensor in weights_of(model)})


def changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}


def differing(engine: VLLMInProcess, model: PreTrainedModel) -> tuple[set[str], float]:
    """The modules with other weights in the engine, and the largest gap when both sides score a few sequences."""
    probed = ModuleProbe(model, engine, torch.float32).measure(1, every=True)
    return set(probed.failed), score_canary(model, engine, CONTEXT, Precision()).max_abs


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_steps_are_proven_to_the_last_token_and_leave_what_was_learned_in_vllm(
    name: str, untied_dir: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    method, fields = METHODS[name]
    sampled: list[int] = []
    snapshots = Snapshots()

    def counted(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        sampled.append(sum(len(ids) for ids in completion_ids))
        return by_length(completion_ids, **columns)

    adapter = {"peft_config": lora()} if "LoRA" in name else {}
    arguments = {"reward_funcs": counted, "callbacks": [snapshots], **adapter}
    run = make(
        method, untied_dir, tmp_path, vllm, {**fields, "max_steps": 2, "recheck_rewards": False}, **arguments
    )
    # The first call is the rehearsal.
    sampled.clear()
    run.train()

    logs = [log for log in run.state.log_history if "loss" in log]
    assert [log["parity/checked_tokens"] for log in logs] == sampled
    assert len(logs) == 2
    assert all(0.0 < log["parity/max_abs_gap"] < LIMIT for log in logs)

    initial = make_model()
    first, second = snapshots.taken
    moved = changed(dict(initial.named_parameters()), first)
    expected = (
        {n for n in first if "q_proj.weight" in n or "up_proj.weight" in n} if adapter else first.keys()
    )
    assert moved == changed(first, second) == expected

    # The last push of the loop had the weights from before the second step.
    assert vllm.version == 1
    held = make_model()
    held.load_state_dict(first)
    wrong, gap = differing(vllm, held)
    assert wrong == set()
    assert gap < LIMIT
    wrong, gap = differing(vllm, initial)
    assert {
        f"{n}.weight" for n, m in initial.named_modules() if isinstance(m, torch.nn.Linear)
    } & moved <= wrong
    assert gap > 10 * LIMIT


def test_online_dpos_pairs_are_those_of_a_prompt_with_vllm_too(
    untied_dir: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[tuple[list[RolloutGroup], list[TrainingSequence]]] = []
    with_advantages = OnlineDPOObjective.with_advantages

    def watched(objective: Any, groups: Any, sequences: Any) -> Any:
        found = with_advantages(objective, groups, sequences)
        learned.append((list(groups), found))
        return found

    monkeypatch.setattr(OnlineDPOObjective, "with_advantages", watched)
    make(
        "OnlineDPO", untied_dir, tmp_path, vllm, {**PAIRS, "per_device_train_batch_size": 4, "max_steps": 2}
    ).train()
    assert len(learned) == 2
    signs = []
    for groups, sequences in learned:
        by_name = {s.name: s for s in sequences}
        assert len(by_name) == 2 * len(groups) == 8
        for group in groups:
            pair = [by_name[str(r.completion.key)] for r in group.rollouts]
            assert {(s.prompt_ids.tobytes(), s.unit) for s in pair} == {
                (group.prompt.ids.tobytes(), group.prompt.prompt_id)
            }
            assert [s.completion_ids.tolist() for s in pair] == [
                r.completion.token_ids.tolist() for r in group.rollouts
            ]
            gain = group.rollouts[0].reward - group.rollouts[1].reward
            assert [s.advantages[0] for s in pair] == [(gain > 0) - (gain < 0), (gain < 0) - (gain > 0)]
            signs.append(pair[0].advantages[0])
    # The judge did not always choose the first one, or always the second one.
    assert {1.0, -1.0} <= set(signs)


def test_completions_end_at_the_end_token_of_the_tokenizer_that_the_trainer_was_given(
    untied_dir: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    tokenizer = load_tokenizer(untied_dir)
    tokenizer.eos_token = "<|user|>"
    model = make_model()
    model.config.name_or_path, model.generation_config.eos_token_id = untied_dir, None
    fields = {
        **GROUPS,
        "max_steps": 1,
        "logit_bias": {"0": 30.0, str(tokenizer.eos_token_id): 30.0, "5": 30.0},
    }
    run = make("GRPO", model, tmp_path, vllm, fields, processing_class=tokenizer)
    run.train()
    completions = [rollout.completion for group in run.loop.generation.groups for rollout in group.rollouts]
    assert {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"} == {
        tokenizer.eos_token_id
    }
    assert any(0 in c.token_ids for c in completions)
