"""Makes the proof of a run's optimizer steps from what `transformers.Trainer` has made: the optimizer and the scheduler.

`training/trainers/hooks/steps.py` calls it when training begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.models.adapters import is_adapted
from lockstep.parity.step.rates import Rates
from lockstep.parity.step.update import UpdateProof
from lockstep.shards.model import sharded

if TYPE_CHECKING:
    from lockstep.training.trainers.hooks.steps import StepHooks

_CRITIC = "value_head."


def named_parameters(trainer: StepHooks) -> dict[str, torch.nn.Parameter]:
    """Every parameter of the policy, and of the value head if there is one, by name."""
    policy, *critic = trainer._trained_modules()
    named = dict(policy.named_parameters())
    return named | {f"{_CRITIC}{name}": p for head in critic for name, p in head.named_parameters()}


def update_proof(trainer: StepHooks) -> UpdateProof | None:
    """The proof; None if training has no optimizer, as in a verification without optimizer steps.

    Raises:
        ProofError: the optimizer or the schedule do not fit the run.
    """
    if trainer.optimizer is None or trainer.lr_scheduler is None:
        return None
    args, named = trainer.config, named_parameters(trainer)
    critic = [name for name in named if name.startswith(_CRITIC)]
    rests = critic if getattr(args, "vf_coef", 1.0) == 0.0 else []
    start = trainer.state.global_step
    plain = trainer._created_lr_scheduler and not args.lr_scheduler_kwargs
    # accelerate wraps the optimizer.
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    rates = Rates(
        trainer.lr_scheduler,
        str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) if plain else None,
        args.get_warmup_steps(trainer.state.max_steps),
        trainer.state.max_steps,
        start,
        trainer.first_rate if trainer.makes_optimizer else None,
    )
    return UpdateProof(
        {name: p for name, p in named.items() if p.requires_grad},
        {name: p for name, p in named.items() if not p.requires_grad},
        optimizer,
        rates,
        args.max_grad_norm,
        args.seed,
        start,
        always=critic,
        may_rest=[*rests, *_beside_the_text(trainer, named)],
        **({} if (shards := sharded(trainer._causal())) is None else {"gathered": shards.gathered_parameter}),
    )


def _beside_the_text(trainer: StepHooks, named: dict[str, torch.nn.Parameter]) -> list[str]:
    """Names of parameters that text may not reach: towers for images or sound, and experts that few tokens are sent to."""
    policy: Any = trainer._causal()
    parts = [policy.get_decoder(), policy.get_input_embeddings(), policy.get_output_embeddings(), trainer.critic]
    reached = {id(p) for part in parts if part is not None for p in part.parameters()}
    return [n for n, p in named.items() if ".experts." in n or (id(p) not in reached and not is_adapted(policy))]
