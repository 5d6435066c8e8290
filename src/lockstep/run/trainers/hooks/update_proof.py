"""Makes the proof of a run's optimizer steps from what `transformers.Trainer` has made: the optimizer and the scheduler.

It is made when training begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR

from lockstep.definitions.schedules import PlateauSchedule
from lockstep.models.adapters import is_adapted
from lockstep.run.trainers.hooks.names import HEAD, named_parameters
from lockstep.shards.model import sharded
from lockstep.watch.optimizer_settings import OptimizerSettings
from lockstep.watch.rates import Rates
from lockstep.watch.update import UpdateProof

if TYPE_CHECKING:
    from lockstep.run.trainers.hooks.steps import StepHooks


def update_proof(trainer: StepHooks) -> UpdateProof | None:
    """The proof; None if training has no optimizer, as in a verification without optimizer steps.

    Raises:
        ProofError: the optimizer or the schedule do not fit the run.
    """
    settings = trainer.optimizer_settings
    if settings is None or trainer.lr_scheduler is None:
        return None
    args, named = trainer.config, named_parameters(trainer)
    critic = [name for name in named if name.startswith(HEAD)]
    rests = critic if getattr(args, "vf_coef", 1.0) == 0.0 else []
    start = trainer.state.global_step
    plain = trainer._created_lr_scheduler and not args.lr_scheduler_kwargs
    rates = trainer.rates = Rates(
        trainer.lr_scheduler,
        str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) if plain else None,
        args.get_warmup_steps(trainer.state.max_steps),
        trainer.state.max_steps,
        start,
        settings,
        *_by_metric(trainer, settings),
    )
    return UpdateProof(
        {name: p for name, p in named.items() if p.requires_grad},
        {name: p for name, p in named.items() if not p.requires_grad},
        settings,
        rates,
        args.max_grad_norm,
        args.seed,
        start,
        always=critic,
        may_rest=[*rests, *_beside_the_text(trainer, named)],
        **({} if (shards := sharded(trainer._causal())) is None else {"gathered": shards.gathered_parameter}),
    )


def _by_metric(trainer: StepHooks, settings: OptimizerSettings) -> tuple[int | None, PlateauSchedule | None]:
    """Of a schedule that follows metrics: how many it has taken, and its formula."""
    scheduler = trainer.lr_scheduler
    if isinstance(scheduler, GreedyLR):
        return scheduler.last_epoch, None
    if not isinstance(scheduler, ReduceLROnPlateau):
        return None, None
    state = scheduler.state_dict()
    asked = (
        trainer.config.lr_scheduler_kwargs or {}
        if trainer._created_lr_scheduler
        else {**state, "min_lr": state["min_lrs"]}
    )
    # A resumed run goes on with what its checkpoint has brought, which was compared when it was loaded.
    new = scheduler.last_epoch == 0
    rates = settings.first_rates() if new else [float(rate) for rate in scheduler.get_last_lr()]
    left = {} if new else {"best": state["best"], "bad": state["num_bad_epochs"], "waiting": state["cooldown_counter"]}
    return scheduler.last_epoch, PlateauSchedule(asked, rates, **left)


def _beside_the_text(trainer: StepHooks, named: dict[str, torch.nn.Parameter]) -> list[str]:
    """Names of parameters that text may not reach: towers for images or sound, and experts that few tokens are sent to."""
    policy: Any = trainer._causal()
    parts = [policy.get_decoder(), policy.get_input_embeddings(), policy.get_output_embeddings(), trainer.critic]
    reached = {id(p) for part in parts if part is not None for p in part.parameters()}
    return [n for n, p in named.items() if ".experts." in n or (id(p) not in reached and not is_adapted(policy))]
