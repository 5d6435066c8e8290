"""What `transformers.Trainer` calls around a step, and the callbacks and views of every trainer.

`StepHooks` passes what happens around every optimizer step on to the loop and its proofs, and the callback `StepEvents`
what no method of `transformers.Trainer` can. `view_of` makes the panel of the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from lockstep.definitions.optimizer import OptimizerFields
from lockstep.learn.filters import IdRules
from lockstep.learn.policy_and_reference import Reference
from lockstep.learn.update import Policy
from lockstep.models.adapters import causal_model
from lockstep.report.live import About, LiveView, LogLines
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ranks import Ranks
from lockstep.run.data.prompts import MicroBatch
from lockstep.run.files.checkpoints import MethodState, ResumableSaves
from lockstep.run.files.rollouts import live_sample
from lockstep.run.loop import TrainingLoop
from lockstep.run.source import RolloutSource
from lockstep.run.trainers.optimizer import (
    WatchedCallbacks,
    check_same_changes,
    inner_optimizer,
    loaded_state,
    ready_settings,
    say_changes,
    update_proof,
)
from lockstep.run.trainers.run_files import RunFiles
from lockstep.shards.model import clip_sharded, sharded
from lockstep.watch.elements import LoadedState
from lockstep.watch.optimizer_rules import Rates
from lockstep.watch.optimizer_settings import OptimizerSettings, Taken
from lockstep.watch.reference import FrozenWeights
from lockstep.watch.run import RunWatch
from lockstep.watch.settings import SettingsProof

if TYPE_CHECKING:
    from lockstep.run.trainers.online import OnlineTrainer

_logger = logging.getLogger(__name__)


class StepHooks(Trainer):
    """The steps of a trainer.

    Attributes:
        optimizer_is_given: whether the user gave the optimizer to the constructor.
        optimizer_settings, rates: the proofs of its settings and its learning rates; None while there is no optimizer.
        inputs: the run's data, code and settings, for the receipt. Only the rank with the engine has them.
    """

    config: Any
    loop: TrainingLoop
    watch: RunWatch
    source: RolloutSource
    clock: PhaseClock
    ranks: Ranks
    critic: torch.nn.Module | None
    reference: Reference | None
    optimizer_is_given: bool
    optimizer_fields: OptimizerFields
    optimizer_settings: OptimizerSettings | None = None
    rates: Rates | None = None
    inputs: dict[str, Any]
    settings: SettingsProof
    _method_state: MethodState
    _plain_rows: bool
    rules: IdRules
    # The model and what it wraps. accelerate looks for installed packages each time it unwraps a model.
    _unwrapped: tuple[torch.nn.Module, PreTrainedModel] | None = None
    # What the receipt says about the optimizer of a resumed run, and the fields of the config that have changed since.
    _resumed_with: tuple[Taken, Sequence[str]]
    # Who has changed which setting of the optimizer, as far as the log says it.
    _said: set[tuple[str, str]]
    # What a checkpoint has brought, until the first step.
    _loaded: LoadedState | None = None

    # `micro_step` already divides by the whole optimizer step; the base class must not divide again.
    loss_is_scaled_for_ga = True

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """None: loss weights are normalised when the generation is cut, so the base class counts no tokens."""

    def _track_num_input_tokens(self, inputs: MicroBatch) -> None:
        """Nothing is counted here: the loop counts the tokens of every generation."""

    def floating_point_ops(self, inputs: Any) -> int:
        """0: completions share their prompt's positions, so `6 × tokens × parameters` would be wrong."""
        return 0

    def store_flos(self) -> None:
        """Nothing is stored. The base class would gather over all ranks here, but only one rank saves checkpoints."""

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients of policy and value head together; the base class would clip the policy only."""
        trained, most = self.loop.trained_parameters(), self.args.max_grad_norm
        if self.ranks.passes is not None:
            norm = clip_sharded(trained, most, self.ranks.passes)
        else:
            norm = self.accelerator.clip_grad_norm_(trained, most)
        self.watch.clipped(float(norm))
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.ranks.passes is not None:
            return clip_sharded(self.loop.trained_parameters(), float("inf"), self.ranks.passes)
        return super()._get_grad_norm(model, grad_norm)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: Any) -> None:
        # The base class calls it after an evaluation of its loop, before the schedule takes the metric.
        if self.rates is not None:
            self.rates.before_metric()
        super()._report_to_hp_search(trial, step, metrics)

    def _evaluate(self, *given: Any, skip_scheduler: bool = False, **named: Any) -> dict[str, float]:
        """Evaluate, and note the metric that a schedule such as `reduce_lr_on_plateau` has taken."""
        metrics = super()._evaluate(*given, skip_scheduler=skip_scheduler, **named)
        if self.rates is not None and self.rates.metrics is not None and not skip_scheduler:
            self.rates.after_metric(metrics[self.config.best_metric])
        return metrics

    def _prepare_for_training(self, *given: Any, **named: Any) -> Any:
        """Prove the optimizer as soon as it is ready, before any callback of the user's can change it."""
        settings = self.optimizer_settings
        if self.optimizer is not None and (
            settings is None or inner_optimizer(self) is not settings.optimizer
        ):
            # The program has made it before `train`.
            self.optimizer_is_given = True
        prepared = super()._prepare_for_training(*given, **named)
        # Every rank has its own optimizer, so that each rank proves it, and all ranks get the error of one.
        self.ranks.share("optimizer", self._prove_ready)
        return prepared

    def _prove_ready(self) -> None:
        self.optimizer_settings = ready_settings(self, *self._resumed_with)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load them, and note what they hold. Their digests were compared just now."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._loaded = loaded_state(self) if checkpoint is not None else None

    def begin_training(self) -> None:
        """Reset the state of an earlier call of `train`, open the receipt and prove the engine."""
        self.loop.begin()
        self._forget_gradients()
        self.watch.update = update_proof(self)
        self._freeze()
        self.source.watch.start(Path(self.args.output_dir or "."), self.state.global_step, self.inputs)
        self._note_hooks(self.state.global_step)
        if self.ranks.owner:
            self.source.proofs.keep_alarms(self.source.alarms, lambda: self.state.global_step)
        self.clock.take()

    def before_update(self) -> None:
        """Prove the gradients and the learning rate, just before the optimizer changes the weights."""
        if (loaded := self._loaded) is not None:
            self.ranks.share("loaded", loaded.check)
            self._loaded = None
        self._note_optimizer(self.state.global_step + 1)
        self._note_hooks(self.state.global_step + 1)
        self.watch.stepping()

    def after_update(self) -> None:
        """Prove what the optimizer has made of the weights."""
        self._note_optimizer(self.state.global_step + 1)
        self.watch.stepped()

    def _note_optimizer(self, step: int) -> None:
        """Prove the optimizer's settings. Changes that are taken go to the receipt and to the log. Every rank calls."""
        if (settings := self.optimizer_settings) is None:
            return
        with self.clock.phase("verify"):
            check_same_changes(self.ranks.share("optimizer", settings.check))
        given, changes = settings.news()
        if self.ranks.owner and (given is not None or changes):
            self.source.proofs.note_optimizer(step, given, changes)
            say_changes(given, changes, self._said)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Prove that weights and optimizer are as the last step left them, before they are digested and written."""
        self._note_optimizer(self.state.global_step)
        self.watch.saving()
        super()._save_checkpoint(model, trial)

    def end_step(self) -> bool:
        """Clear the value head's gradients and move the reference model. Returns whether prompts are left."""
        self._forget_gradients()
        config, reference = self.config, self._method_state.moving_reference
        if reference is not None and reference.own is not None:
            with self.watch.moving_reference(reference.own):
                if is_due := self.state.global_step % config.ref_model_sync_steps == 0:
                    reference.follow(config.ref_model_mixup_alpha)
            if is_due:
                self._freeze()
        used_up = self.loop.is_used_up()
        if used_up and self.ranks.owner:
            _logger.info(f"training ends at step {self.state.global_step}: too few prompts are left unsolved")
        return not used_up

    def _note_hooks(self, step: int) -> None:
        """Write into receipt and log which hooks and functions of the user's were taken."""
        if (taken := self.watch.hooks.news()) and self.ranks.owner:
            self.source.proofs.note_taken(step, taken)
            _logger.warning(
                f"in the way of the model's forward and backward since step {step}: {'; '.join(taken[:5])}"
            )

    def _freeze(self) -> None:
        """Note the weights that must stay as they are: those of the reference, and those under an adapter."""
        frozen = {name: p for name, p in self._policy_model().named_parameters() if not p.requires_grad}
        if self.reference is not None:
            frozen |= self.reference.own_weights
        proof = FrozenWeights(frozen, self.loop.trained_parameters(), self.config.seed) if frozen else None
        self.watch.frozen = proof

    def _forget_gradients(self) -> None:
        """Clear the value head's gradients; the base class clears the policy's only."""
        if self.critic is not None:
            self.critic.zero_grad()

    def _policy(self) -> Policy:
        accelerator, model = self.accelerator, self._causal()
        shards = sharded(model)
        return Policy(
            model,
            accelerator.autocast,
            accelerator.backward if shards is None else shards.backward(accelerator.backward),
            self.critic,
            self._plain_rows,
            self.rules,
        )

    def _policy_model(self) -> PreTrainedModel:
        if self._unwrapped is None or self._unwrapped[0] is not self.model:
            self._unwrapped = (self.model, self.accelerator.unwrap_model(self.model))
        return self._unwrapped[1]

    def _causal(self) -> PreTrainedModel:
        return causal_model(self._policy_model())

    def trained_by_name(self) -> dict[str, torch.nn.Module]:
        return {
            "policy": self._policy_model(),
            **({"critic": self.critic} if self.critic is not None else {}),
        }

    def _trained_modules(self) -> list[torch.nn.Module]:
        return [self._causal(), *([self.critic] if self.critic is not None else [])]


class StepTrainer(Protocol):
    """The methods of a trainer that the callback calls, in their order."""

    clock: PhaseClock

    def begin_training(self) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def end_step(self) -> bool: ...


class StepEvents(TrainerCallback):
    """The callback that passes the events to the trainer."""

    def __init__(self, trainer: StepTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_training()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.before_update()
        self._trainer.clock.start("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.stop("optimizer")
        self._trainer.after_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.end_step():
            # Log and save a checkpoint, as after the last step of a run.
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy not in ("no", "best")


def add_callbacks(trainer: OnlineTrainer, began: float) -> RunFiles:
    """Add the callbacks, and replace the progress bar of transformers unless the user has asked for it.

    `began` is the `time.monotonic()` of the start of the run. Returns the callback that writes the files of the run.
    """
    files, config = RunFiles(trainer, began), trainer.config

    def taking() -> AbstractContextManager[None]:
        # The constructor of the base class calls an event before there is a watch.
        return trainer.watch.hooks.taking() if hasattr(trainer, "watch") else nullcontext()

    watched = WatchedCallbacks(trainer.callback_handler, lambda: trainer.optimizer_settings, taking)
    trainer.callback_handler = watched
    for callback in (files, StepEvents(trainer), ResumableSaves(config, owner=trainer.ranks.owner)):
        trainer.add_callback(callback)
    if not config.asks_for_progress_bar:
        for printer in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            trainer.remove_callback(printer)
        trainer.add_callback(LogLines())
    return files


def view_of(trainer: OnlineTrainer) -> LiveView:
    """A view of the trainer's steps, phases and latest figures; only for the rank that holds the engine."""
    proofs = trainer.proofs
    about = About(
        f"{trainer.method} · {trainer.engine.settings().engine} in lockstep",
        model=Path(trainer.model_path).name,
        folder=str(trainer.config.output_dir),
    )
    return LiveView(
        about,
        trainer.clock.progress,
        trainer.step_log.latest,
        lambda: live_sample(trainer.source.shown_group),
        lambda: proofs.judged,
        alarms=lambda: trainer.alarms.texts,
    )
