"""A whole trainer of ours beside TRL 1.16's, with the same model, prompts and tokens: every gradient and figure.

Both compute in double precision, because rounding differs from processor to processor. (Online DPO is compared in
float32, because TRL's Online DPO holds its reference model in float32.) Our trainer samples. TRL's trainer gets the
sampled tokens and does everything
else itself: prompts, rewards, advantages, log-probs, corrections, loss, metrics, optimizer. Only its sampling method
is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accounts import Gradients
from conftest import start
from methods import PROMPTS
from shifted_engine import ShiftedEngine
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Trainer

import lockstep
from lockstep.contract.protocol import Completion, Engine
from lockstep.models.policy import model_class

COMMON: dict[str, Any] = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "optim": "sgd",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e6,
}
# Fields for Online DPO. A generation holds all prompts, because the two trainers use another order of the data. The
# prompts are equally long, because TRL attends to their padding (A3). The temperature is 1, because TRL scores at
# temperature 1.
PAIRS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_new_tokens": 12,
    "max_length": 64,
    "temperature": 1.0,
}
CLIPS = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
DTYPES = {"GRPO": torch.float64, "RLOO": torch.float64, "OnlineDPO": torch.float32}
# The rounding of float32 for figures near zero: of a mean of log-probs (about 3 nats), of the largest log-prob (about
# 10 nats), and of a loss whose parts (about 3) cancel out.
MEANS, SINGLES, SUMS = 3e-6, 1e-5, 1e-5
# The share of the largest step's gradient whose rounding appears in the smallest step's gradient.
CANCELS = 0.2


@dataclass(frozen=True)
class Played:
    """The record of a run, with one entry per step.

    Attributes:
        gradients: the gradient of each parameter, as the optimizer got it.
        losses: the results of `training_step`, summed over the micro-batches.
        logs: the logged figures.
    """

    gradients: list[dict[str, torch.Tensor]]
    losses: list[float]
    logs: list[dict[str, Any]]


def longer(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(len(ids) + sum(ids) % 7) for ids in completion_ids]


def rounder(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Another reward of another size, which gives no score to some completions."""
    return [None if sum(ids) % 5 == 0 else 0.01 * (sum(ids) % 11) for ids in completion_ids]


def decided(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that is almost never equal for two completions.

    Padding, which TRL does not remove, adds nothing to it.
    """
    return [sum(i * token for i, token in enumerate(ids, 1)) / 1000 for ids in completion_ids]


def shifted_engine(model: str) -> Engine:
    """The transformers engine in fp32. One log-prob in six is off by 3e-4, with the same sign within a completion."""

    def shift(answer: Completion, place: int) -> float:
        total = int(answer.token_ids.sum())
        return 0.0 if place % 6 != total % 6 else 3e-4 if total % 2 else -3e-4

    return ShiftedEngine(start("transformers", model), shift)  # type: ignore[return-value]


class Sampled:
    """The completions that our trainer sampled, by generation and prompt, and the adapter that it began with."""

    def __init__(self, trainer: Any) -> None:
        self.generations: list[dict[tuple[int, ...], list[Completion]]] = []
        self.adapter = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" in n}
        rollout = trainer.loop.rollout

        def recorded(*args: Any) -> Any:
            groups = rollout(*args)
            self.generations.append(
                {tuple(g.prompt.ids.tolist()): [r.completion for r in g.rollouts] for g in groups}
            )
            return groups

        trainer.loop.rollout = recorded

    def take(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """One completion per prompt, in order, from the oldest remaining generation.

        Each completion is given exactly once.
        """
        left = self.generations[0]
        found = [left[tuple(prompt)].pop(0) for prompt in prompts]
        if not any(left.values()):
            self.generations.pop(0)
        return found


def train(trainer: Trainer) -> Played:
    """Run a trainer to its end."""
    kept, losses, step = Gradients(trainer), [], trainer.training_step

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = watched  # type: ignore[method-assign]
    trainer.train()
    parts = trainer.args.gradient_accumulation_steps
    by_step = [sum(losses[i : i + parts]) for i in range(0, len(losses), parts)]
    return Played(kept.steps, by_step, [log for log in trainer.state.log_history if "loss" in log])


def ours(
    method: str,
    model: str,
    folder: Path,
    engine: Engine,
    fields: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> tuple[Played, Sampled]:
    """A run of our trainer, and its sampled completions."""
    # TRL has no rehearsal of reward functions.
    own = {**COMMON, "rehearse_rewards": False, "recheck_rewards": False, **fields}
    config = getattr(lockstep, f"{method}Config")(output_dir=str(folder), **own)
    arguments = {"reward_funcs": longer, "train_dataset": PROMPTS, **arguments}
    trainer = getattr(lockstep, f"{method}Trainer")(
        _loaded(method, model, dtype), args=config, engine=engine, **arguments
    )
    sampled = Sampled(trainer)
    return train(trainer), sampled


def theirs(
    method: str,
    model: str,
    folder: Path,
    sampled: Sampled,
    fields: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> Played:
    """A run of TRL's trainer, which learns from the completions that our trainer sampled."""
    config = _trl(f"{method}Config")(
        output_dir=str(folder), use_cpu=True, gradient_checkpointing=False, **{**COMMON, **fields}
    )
    arguments = {
        "reward_funcs": longer,
        "train_dataset": PROMPTS,
        "processing_class": _tokenizer(model),
        **arguments,
    }
    trainer = _trl(f"{method}Trainer")(_loaded(method, model, dtype), args=config, **arguments)
    for name, parameter in trainer.model.named_parameters():
        if name in sampled.adapter:
            parameter.data.copy_(sampled.adapter[name])
    SAMPLERS[method](trainer, sampled)
    played = train(trainer)
    assert not sampled.generations
    return played


def _loaded(method: str, model: str, dtype: torch.dtype | None) -> PreTrainedModel:
    kind = model_class(AutoConfig.from_pretrained(model))
    return kind.from_pretrained(model, dtype=dtype or DTYPES[method])  # type: ignore[no-any-return]


def _tokenizer(model: str) -> Any:
    """A tokenizer with a pad token.

    TRL's Online DPO does not load a tokenizer itself, and all of TRL's trainers need a pad token.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _trl(name: str) -> Any:
    import trl
    import trl.experimental.online_dpo

    return getattr(trl.experimental.online_dpo if name.startswith("OnlineDPO") else trl, name)


def _sample_grpo(trainer: Any, sampled: Sampled) -> None:
    # TRL behaves as with vLLM, which it cannot run here: it corrects for the difference of the engine's log-probs.
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)

    def single_turn(prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], list[list[float]]]:
        found = sampled.take(prompt_ids)
        return [c.token_ids.tolist() for c in found], [c.logprobs.tolist() for c in found]

    trainer._generate_single_turn = single_turn


def _sample_rloo(trainer: Any, sampled: Sampled) -> None:
    trainer._generate_single_turn = lambda prompt_ids, *_: [
        c.token_ids.tolist() for c in sampled.take(prompt_ids)
    ]


def _sample_pairs(trainer: Any, sampled: Sampled) -> None:
    def generate(_: Any, prompts: list[str], images: None) -> tuple[torch.Tensor, ...]:
        ids = trainer.processing_class(prompts)["input_ids"] * 2
        found = sampled.take(ids)
        longest = max(len(c.token_ids) for c in found)
        rows = [
            torch.nn.functional.pad(torch.tensor(c.token_ids), (0, longest - len(c.token_ids))) for c in found
        ]
        mask = torch.stack([(torch.arange(longest) < len(c.token_ids)).long() for c in found])
        prompt_ids = torch.tensor(ids)
        return prompt_ids, torch.ones_like(prompt_ids), torch.stack(rows), mask, None  # type: ignore[return-value]

    trainer._generate = generate


SAMPLERS = {"GRPO": _sample_grpo, "RLOO": _sample_rloo, "OnlineDPO": _sample_pairs}


def both(
    method: str, model: str, folder: Path, engine: Engine, fields: dict[str, Any], **arguments: Any
) -> tuple[Played, Played]:
    """A run of our trainer and a run of TRL's."""
    # TRL's RLOO does not use the engine's log-probs, so our correction is switched off here.
    own = {"vllm_importance_sampling_correction": False} if method == "RLOO" else {}
    mine, sampled = ours(method, model, folder / "ours", engine, {**fields, **own}, **arguments)
    other = theirs(method, model, folder / "theirs", sampled, fields, **arguments)
    assert len(mine.gradients) == len(other.gradients) == fields.get("max_steps", COMMON["max_steps"])
    return mine, other


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two gradients over all parameters."""
    assert ours.keys() == theirs.keys()
    return norm([ours[name].cpu() - gradient.cpu() for name, gradient in theirs.items()])


def norm(gradients: Iterable[torch.Tensor]) -> float:
    """The norm of a gradient over all parameters."""
    return sum(float(g.double().norm()) ** 2 for g in gradients) ** 0.5


def assert_same_gradients(
    ours: Played, theirs: Played, *, cancels: float = CANCELS, limit: float = 1e-5
) -> None:
    """Assert that whole gradients and losses agree to `limit`, and the gradient of each parameter to 1e-4.

    Where most of a step's gradient cancels out, a share of the largest step's gradient is added to its size, because
    sums of that size are rounded.
    """
    largest = max(norm(step.values()) for step in theirs.gradients)
    for step, (found, expected) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        size = max(norm(expected.values()), cancels * largest)
        assert distance(found, expected) <= limit * size, step
        for name, gradient in expected.items():
            assert distance({name: found[name]}, {name: gradient}) <= 1e-4 * (
                norm([gradient]) + 1e-2 * size
            ), (
                name,
                step,
            )
    assert ours.losses == pytest.approx(theirs.losses, rel=limit, abs=SUMS)


def assert_same_figures(ours: Played, theirs: Played, *, but: frozenset[str], at_least: set[str]) -> None:
    """Assert that every figure that TRL logs is logged here and has the same value.

    Args:
        but: figures, or families of figures (`name/`), that have another meaning on purpose.
        at_least: figures that must be among the compared ones.
    """
    compared, but = set(), but | {"step_time"}
    for step, (mine, other) in enumerate(zip(ours.logs, theirs.logs, strict=True)):
        assert other.keys() <= mine.keys()
        shared = {
            n for n in mine.keys() & other.keys() if n not in but and n.rpartition("/")[0] + "/" not in but
        }
        for name in sorted(shared):
            rounding = SUMS if name == "loss" else SINGLES if name.startswith("sampling/") else MEANS
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=rounding), (name, step)
        compared |= shared
    assert at_least <= compared
