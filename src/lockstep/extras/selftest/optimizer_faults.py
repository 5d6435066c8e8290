"""Faults of the trainer's optimizer step.

U1 to U13 are faults of the optimizer, its settings and its step, from the last backward to the new weights. They need
real optimizer steps: `Stage.learn` takes them, and gives the stage its weights back.

A1 to A6 are faults of what the step learns from, and of how it is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch

import lockstep.learn.update as updating
import lockstep.rollouts.driver as collecting
from lockstep.contract.protocol import Completion
from lockstep.definitions.optimizer import optimizer_fields
from lockstep.errors import InputError
from lockstep.extras.selftest import seams
from lockstep.extras.selftest.seams import Fault, Patch
from lockstep.extras.verify.stage import Stage
from lockstep.learn.generation import Generation
from lockstep.learn.sequence import TrainingSequence

# Takes a real step of an optimizer.
Step = Callable[[], Any]


def _steps_become(change: Callable[[torch.optim.Optimizer, Step], Any]) -> Callable[[Stage], Patch]:
    """The optimizer's step is replaced."""

    def inject(stage: Stage) -> Patch:
        real = torch.optim.AdamW.step

        def step(self: Any, closure: Any = None) -> Any:
            return change(self, lambda: real(self))

        return patch.object(torch.optim.AdamW, "step", step)

    return inject


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _twice(optimizer: torch.optim.Optimizer, step: Step) -> None:
    step()
    step()


def _upwards(optimizer: torch.optim.Optimizer, step: Step) -> None:
    with torch.no_grad():
        for p in _parameters(optimizer):
            if p.grad is not None:
                p.grad.neg_()
    step()


def _ten_times(optimizer: torch.optim.Optimizer, step: Step) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= 10
    step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _without_moments(optimizer: torch.optim.Optimizer, step: Step) -> None:
    optimizer.state.clear()
    step()


@torch.no_grad()
def _rounded(optimizer: torch.optim.Optimizer, step: Step) -> None:
    step()
    for p in _parameters(optimizer):
        p.copy_(p.to(torch.bfloat16))


def _put_back(left_out: Callable[[torch.Tensor], bool]) -> Callable[[torch.optim.Optimizer, Step], None]:
    @torch.no_grad()
    def change(optimizer: torch.optim.Optimizer, step: Step) -> None:
        kept = [(p, p.detach().clone()) for p in _parameters(optimizer) if left_out(p)]
        step()
        for p, old in kept:
            p.copy_(old)

    return change


@torch.no_grad()
def _largest_stay(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Of the largest tensor the 20 elements with the largest gradients."""
    p = max(_parameters(optimizer), key=torch.numel)
    assert p.grad is not None
    at = p.grad.flatten().abs().topk(20).indices
    old = p.flatten()[at]
    step()
    p.view(-1)[at] = old


@contextmanager
def _cut_after_the_clip(stage: Stage) -> Iterator[None]:
    """Of the largest tensor the 20 largest gradients. The norm that the clip reports is right."""
    real = stage.trainer.accelerator.clip_grad_norm_

    def clip(parameters: Any, limit: float) -> Any:
        own = list(parameters)
        norm = real(own, limit)
        gradient = max((p.grad for p in own if p.grad is not None), key=torch.numel)
        gradient.view(-1)[gradient.flatten().abs().topk(20).indices] /= 2
        return norm

    with patch.object(stage.trainer.accelerator, "clip_grad_norm_", clip):
        yield


def _gradients_kept(stage: Stage) -> Patch:
    return patch.object(stage.model, "zero_grad", lambda *args, **kwargs: None)


@contextmanager
def _cleared_between(stage: Stage) -> Iterator[None]:
    """Packs are small, so that a step has several backward passes."""
    real = stage.trainer.accelerator.backward

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        stage.model.zero_grad(set_to_none=True)
        real(loss, **kwargs)

    with (
        patch.object(stage.trainer.accelerator, "backward", backward),
        patch.object(stage.config, "token_budget", 1),
    ):
        # In a run that has begun, the backward counts as one that was there at its beginning.
        stage.trainer.watch.hooks.note()
        yield


@contextmanager
def _not_clipped(stage: Stage) -> Iterator[None]:
    """The limit is small, so that there is something to clip. The norm that the clip reports is right."""

    def norm(parameters: Any, limit: float) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])

    with (
        patch.object(stage.trainer.args, "max_grad_norm", 1e-6),
        patch.object(stage.trainer.accelerator, "clip_grad_norm_", norm),
    ):
        yield


@contextmanager
def _half_clipped(stage: Stage) -> Iterator[None]:
    """Only the first half of the tensors is seen and clipped."""
    real = stage.trainer.accelerator.clip_grad_norm_

    def clip(parameters: Any, limit: float) -> torch.Tensor:
        own = list(parameters)
        return real(own[: len(own) // 2], limit)

    with (
        patch.object(stage.trainer.args, "max_grad_norm", 1e-6),
        patch.object(stage.trainer.accelerator, "clip_grad_norm_", clip),
    ):
        yield


def _schedule_twice(stage: Stage) -> Patch:
    kind: Any = torch.optim.lr_scheduler.LRScheduler
    real = kind.step

    def step(self: Any, *args: Any) -> None:
        real(self, *args)
        real(self, *args)

    return patch.object(kind, "step", step)


def _made_with(**settings: Any) -> Callable[[Stage], Patch]:
    """The optimizer is made with other settings than the config's."""

    def inject(stage: Stage) -> Patch:
        real = stage.trainer.create_optimizer

        def create(*given: Any) -> torch.optim.Optimizer:
            optimizer = real(*given)
            for group in optimizer.param_groups:
                group.update(settings)
            return optimizer

        return patch.object(stage.trainer, "create_optimizer", create)

    return inject


@contextmanager
def _all_decay(stage: Stage) -> Iterator[None]:
    """The user asks for a weight decay of 0.1. Norms and biases have one too."""

    def names(model: torch.nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    trainer, asked = stage.trainer, optimizer_fields({**vars(stage.config), "weight_decay": 0.1})
    with (
        patch.object(trainer.args, "weight_decay", 0.1),
        patch.multiple(trainer, optimizer_fields=asked, get_decay_parameter_names=names),
    ):
        yield


def _before_the_second_step(change: Callable[[torch.optim.Optimizer], None]) -> Callable[[Stage], Patch]:
    """Something changes the optimizer in the middle of the run, outside of all callbacks."""

    def inject(stage: Stage) -> Patch:
        steps = 0

        def second(optimizer: torch.optim.Optimizer, step: Step) -> None:
            nonlocal steps
            steps += 1
            if steps == 2:
                change(optimizer)
            step()

        return _steps_become(second)(stage)

    return inject


def _decay_more(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 10.0


def _exchange_moments(optimizer: torch.optim.Optimizer) -> None:
    """Of the first two tensors of one shape that have different moments."""
    for one, other in combinations(optimizer.state.values(), 2):
        first, second = one["exp_avg"], other["exp_avg"]
        if first.shape == second.shape and not torch.equal(first, second):
            one["exp_avg"], other["exp_avg"] = second, first
            return
    raise InputError("no two tensors have the same shape")


def _count_on(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] += 1


def _fault(id: str, what: str, inject: Callable[[Stage], Patch]) -> Fault:
    return Fault(id, what, inject, learns=True)


OPTIMIZER_FAULTS = (
    _fault("U1", "the optimizer never steps", _steps_become(lambda optimizer, step: None)),
    _fault("U2", "the optimizer steps twice", _steps_become(_twice)),
    _fault("U3", "the optimizer goes up the gradient", _steps_become(_upwards)),
    _fault("U4", "ten times the learning rate", _steps_become(_ten_times)),
    _fault("U4b", "the schedule runs twice as fast", _schedule_twice),
    _fault("U5", "the optimizer's moments are lost at each step", _steps_become(_without_moments)),
    _fault("U6", "master weights rounded to bf16 after each step", _steps_become(_rounded)),
    _fault("U7", "norms and biases are left out of the step", _steps_become(_put_back(lambda p: p.ndim < 2))),
    _fault("U8", "matrices are left out of the step", _steps_become(_put_back(lambda p: p.ndim > 1))),
    _fault("U9", "gradients are not cleared after the step", _gradients_kept),
    _fault("U10", "gradients are cleared before the last backward of the step", _cleared_between),
    _fault("U11", "gradients are not clipped", _not_clipped),
    _fault("U11b", "half of the gradients are clipped, by their own norm", _half_clipped),
    _fault("U12", "the optimizer is made with a weight decay of 10", _made_with(weight_decay=10.0)),
    _fault("U12b", "the optimizer is made with exchanged betas", _made_with(betas=(0.999, 0.9))),
    _fault("U12c", "norms and biases have a weight decay", _all_decay),
    _fault("U12d", "the weight decay becomes 10 at the second step", _before_the_second_step(_decay_more)),
    _fault("U13", "two tensors exchange their moments", _before_the_second_step(_exchange_moments)),
    _fault("U13b", "the optimizer counts a step that it has not taken", _before_the_second_step(_count_on)),
    _fault("U14", "the 20 elements with the largest gradients stay", _steps_become(_largest_stay)),
    _fault("U14b", "the 20 largest gradients are halved after the clip", _cut_after_the_clip),
)

Batch = tuple[TrainingSequence, ...]


def _mean_of_parts(generation: Generation, share: float) -> Generation:
    """Each micro-batch is normalised by its own number of tokens, and counts with `share`."""

    def weighted(batch: Batch) -> Batch:
        tokens = sum(s.length for s in batch)
        return tuple(replace(s, weight=share / tokens) for s in batch)

    return replace(generation, micro_batches=tuple(weighted(batch) for batch in generation.micro_batches))


def _summed(stage: Stage) -> Patch:
    return seams.generations_become(lambda generation: _mean_of_parts(generation, 1.0))


def _averaged(stage: Stage) -> Patch:
    return seams.generations_become(lambda g: _mean_of_parts(g, 1.0 / len(g.micro_batches)))


def _attends_to_others(stage: Stage) -> Patch:
    """A token sees every token before it in its row, also those of sibling completions and the padding."""
    real = updating.pack_sequences

    def packed(sequences: Sequence[TrainingSequence], budget: int) -> Iterator[Any]:
        for pack in real(sequences, budget):
            assert pack.ends is not None
            yield replace(pack, ends=torch.full_like(pack.ends, len(pack.ends)))

    return patch.object(updating, "pack_sequences", packed)


def _needs_tree(stage: Stage) -> str:
    is_plain = stage.trainer.loop.policy().plain_rows
    return "the model learns from plain rows, which hold one completion each" if is_plain else ""


def _guessed_reason(stage: Stage) -> Patch:
    def guessed(answer: Completion) -> Completion:
        ended = answer.token_ids[-1] == stage.tokenizer.eos_token_id
        return replace(answer, finish_reason="stop" if ended else "length")

    return seams.each_answer_becomes(stage, guessed)


def _one_seed(stage: Stage) -> Patch:
    return patch.object(collecting, "request_seed", lambda run_seed, version, key: run_seed)


def _long_ones_dropped(stage: Stage) -> Patch:
    def dropped(generation: Generation) -> Generation:
        batches = generation.micro_batches
        longest = max(s.length for batch in batches for s in batch)
        shorter = tuple(tuple(s for s in batch if s.length < longest) or batch[:1] for batch in batches)
        return replace(generation, micro_batches=shorter)

    return seams.generations_become(dropped)


STEP_FAULTS = (
    Fault("A1", "gradients of micro-batches summed, not averaged", _summed, check="exact accounting"),
    Fault("A2", "the loss normalised per micro-batch, not per step", _averaged, check="exact accounting"),
    Fault("A3", "tokens attend to padding and to other rows", _attends_to_others, needs=_needs_tree),
    Fault("A4", "truncation guessed from the last token", _guessed_reason, check="finish reasons"),
    Fault(
        "A5", "one seed for all requests: a group of equal completions", seams.at_temperature_one(_one_seed)
    ),
    Fault("A6", "long rollouts left out of the step", _long_ones_dropped),
)
