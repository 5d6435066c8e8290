"""The optimizer of a run with the proofs of its settings (`watch/optimizer_settings.py`) and steps (`watch/update.py`).

The settings are proven when the optimizer is ready, and what callbacks change is noted for the receipt.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_callback import CallbackHandler, EarlyStoppingCallback, TrainerCallback

from lockstep.definitions.optimizer import SETTING_OF, PlateauSchedule
from lockstep.errors import ProofError
from lockstep.models.adapters import is_adapted
from lockstep.shards.model import sharded
from lockstep.watch.elements import LoadedState
from lockstep.watch.optimizer_rules import Rates
from lockstep.watch.optimizer_settings import Change, OptimizerSettings, Taken
from lockstep.watch.update import UpdateProof
from lockstep.whose_code import is_lockstep, top_module

if TYPE_CHECKING:
    from lockstep.run.trainers.hooks import StepHooks

# Before the names of the parameters of a value head.
HEAD = "value_head."


def named_parameters(trainer: StepHooks) -> dict[str, torch.nn.Parameter]:
    """Every parameter of the policy, and of the value head if there is one, by name."""
    policy, *critic = trainer._trained_modules()
    named = dict(policy.named_parameters())
    return named | {f"{HEAD}{name}": p for head in critic for name, p in head.named_parameters()}


_logger = logging.getLogger(__name__)

# Methods of `transformers.Trainer` by which a subclass makes an optimizer of its own.
_MAKERS = (
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
)


def ready_settings(trainer: StepHooks, taken: Taken, changed: Sequence[str]) -> OptimizerSettings | None:
    """The proof of the settings of an optimizer that is ready, after a checkpoint was loaded into it if there is one.

    Args:
        taken: what the receipt says about the optimizer.
        changed: fields of the config whose values have changed since the run was interrupted. They are set now,
            because a checkpoint brings back the earlier values.
    """
    optimizer, scheduler, step = inner_optimizer(trainer), trainer.lr_scheduler, trainer.state.global_step
    if optimizer is None or scheduler is None:
        return None
    named, earlier = named_parameters(trainer), trainer.optimizer_settings
    again = earlier is not None and earlier.optimizer is optimizer and not step
    if again:
        # `train` was called before. Its optimizer goes on, with what was changed then.
        taken = earlier.so_far()  # type: ignore[union-attr]
    given = trainer.optimizer_is_given or makes_optimizer(type(trainer))
    norms = {
        p
        for module in trainer._trained_modules()
        for part in module.modules()
        if isinstance(part, torch.nn.LayerNorm)
        for p in part.parameters()
    }

    def wanted(name: str) -> dict[str, Any]:
        return trainer.optimizer_fields.of(
            name, in_layer_norm=named[name] in norms, in_head=name.startswith(HEAD)
        )

    names = {p: name for name, p in named.items() if p.requires_grad}
    if not given and changed:
        _set_anew(optimizer, scheduler, {SETTING_OF[c] for c in changed if c in SETTING_OF}, names, wanted)
    settings = OptimizerSettings(optimizer, scheduler, names, None if given else wanted, taken)
    if again:
        settings.tell_again()
    elif not step and not given:
        _check_empty(optimizer, names)
    return settings


def loaded_state(trainer: StepHooks) -> LoadedState:
    """The weights and the optimizer's state of a resumed run, as the checkpoint gave them."""
    trained = {name: p for name, p in named_parameters(trainer).items() if p.requires_grad}
    return LoadedState(inner_optimizer(trainer), trained, (trainer.config.seed, trainer.state.global_step, 3))


def inner_optimizer(trainer: StepHooks) -> Any:
    """The optimizer itself: accelerate wraps it."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def check_same_changes(parts: Sequence[Any]) -> None:
    """Compare the changes that were taken on all ranks."""
    for rank, part in enumerate(parts):
        differs = next((c for c in [*part, *parts[0]] if part.count(c) != parts[0].count(c)), None)
        if differs is None:
            continue
        where = rank if part.count(differs) > parts[0].count(differs) else 0
        raise ProofError(
            "optimizer",
            f"on rank {where} alone, {differs['by']} has changed {Change(**differs)}",
            "a callback changes the optimizer on some ranks only",
            "make the same change on every rank: do not ask for is_world_process_zero first",
        )


def say_changes(given: Any, changes: Sequence[Change], said: set[tuple[str, str]]) -> None:
    """Write what was taken into the log: each setting once per program that changes it."""
    if given is not None:
        _logger.info(
            "the optimizer was given by the program: its settings are taken as they are, not those of the "
            "config (the receipt has them)"
        )
    for change in changes:
        if (key := (change.by, change.field)) not in said:
            said.add(key)
            until = "from now on" if change.place is None else "until the schedule sets another"
            _logger.warning(
                f"{change.by} has changed the optimizer: {change}. The proofs use this value {until}"
            )


# Callbacks of transformers that only a user adds, to end a training.
_ASKED_FOR = (EarlyStoppingCallback,)


class WatchedCallbacks(CallbackHandler):
    """Calls callbacks as the `handler` of transformers does, and notes what the user's callbacks change.

    `taking` makes a context in which hooks, forwards and attention functions may change: trackers of transformers add
    hooks when training begins. `stopped_by` is the callback that has asked for the end of the training.
    """

    stopped_by: TrainerCallback | None = None

    def __init__(
        self,
        handler: CallbackHandler,
        settings: Callable[[], OptimizerSettings | None],
        taking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        # The callbacks and all else of the other handler, whose constructor has called them already.
        self.__dict__.update(vars(handler))
        self._settings, self._taking = settings, taking

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call an event of every callback, in their order."""
        if event == "on_optimizer_step" and (settings := self._settings()) is not None:
            settings.note_step()
        if event == "on_train_begin":
            self.stopped_by = None
        for callback in self.callbacks:
            alone = copy.copy(self)
            alone.callbacks = [callback]
            before = control.should_training_stop
            control = alone._call(callback, event, args, state, control, kwargs)
            if control.should_training_stop and not before:
                self.stopped_by = callback
        return control

    @property
    def end_was_asked_for(self) -> bool:
        """Whether the user or Lockstep has asked for the end of the training, by a callback."""
        kind = type(self.stopped_by)
        return self.stopped_by is not None and (top_module(kind) != "transformers" or kind in _ASKED_FOR)

    def _call(
        self, callback: Any, event: str, args: Any, state: Any, control: Any, others: dict[str, Any]
    ) -> Any:
        settings, kind = self._settings(), type(callback)
        of_library = top_module(kind) == "transformers"
        with ExitStack() as watched:
            if _has_own(callback, event) and not is_lockstep(kind):
                if settings is not None and not of_library:
                    watched.enter_context(settings.explained(f"callback {kind.__name__} ({event})"))
                if not of_library or event == "on_train_begin":
                    watched.enter_context(self._taking())
            return super().call_event(event, args, state, control, **others)


def _has_own(callback: Any, event: str) -> bool:
    """Whether a callback does something at an event."""
    return event in vars(callback) or getattr(type(callback), event, None) is not getattr(
        TrainerCallback, event, None
    )


def makes_optimizer(kind: type) -> bool:
    """Whether a subclass of the user's makes the optimizer, or decides which tensors decay."""
    makers = [base for base in kind.__mro__ if any(name in vars(base) for name in _MAKERS)]
    return any(not is_lockstep(base) and top_module(base) != "transformers" for base in makers)


def _check_empty(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]) -> None:
    """Refuse a new optimizer that begins with moments. That of torch's AdamW is empty before its first step."""
    held = [name for p, name in names.items() if optimizer.state.get(p)]
    if type(optimizer) is torch.optim.AdamW and held:
        raise ProofError(
            "optimizer",
            f"a new optimizer already holds moments of {held[0]} ({len(held)} of {len(names)} tensors)",
            "moments of another run were loaded into it",
            "resume from a checkpoint, or give an optimizer of your own",
        )


def _set_anew(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    settings: set[str],
    names: dict[torch.nn.Parameter, str],
    wanted: Callable[[str], dict[str, Any]],
) -> None:
    """Set what the config gives now. The learning rate keeps its place in the schedule."""
    bases = getattr(scheduler, "base_lrs", None)
    for index, group in enumerate(optimizer.param_groups):
        own = [names[p] for p in group["params"] if p in names]
        due = {k: v for k, v in wanted(own[0]).items() if k in settings and k in group} if own else {}
        rate, before = due.pop("initial_lr", None), group.get("initial_lr")
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in due.items()})
        if rate is None or not bases:
            continue
        share = float(group["lr"]) / before if before else 0.0
        bases[index] = group["initial_lr"] = rate
        group["lr"] = scheduler._last_lr[index] = rate * share


def update_proof(trainer: StepHooks) -> UpdateProof | None:
    """The proof of the steps; None if training has no optimizer, as in a verification without optimizer steps."""
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
    left = (
        {}
        if new
        else {"best": state["best"], "bad": state["num_bad_epochs"], "waiting": state["cooldown_counter"]}
    )
    return scheduler.last_epoch, PlateauSchedule(asked, rates, **left)


def _beside_the_text(trainer: StepHooks, named: dict[str, torch.nn.Parameter]) -> list[str]:
    """Names of parameters that text may not reach: towers for images or sound, and experts with few tokens."""
    policy: Any = trainer._causal()
    parts = [
        policy.get_decoder(),
        policy.get_input_embeddings(),
        policy.get_output_embeddings(),
        trainer.critic,
    ]
    reached = {id(p) for part in parts if part is not None for p in part.parameters()}
    return [
        n for n, p in named.items() if ".experts." in n or (id(p) not in reached and not is_adapted(policy))
    ]
