"""What `transformers.Trainer` calls around every optimizer step, passed on to the loop and its proofs.

`training/trainers/online.py` extends `StepHooks` and makes its parts. `training/trainers/hooks/step_events.py` calls the methods
that have no place in `transformers.Trainer` itself.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from lockstep.models.adapters import causal_model
from lockstep.parity.sampling.kept_sets import KeptSetProof
from lockstep.parity.step.reference import FrozenWeights
from lockstep.parity.user_settings import SettingsProof
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.shards.gradients import clip_sharded
from lockstep.shards.model import sharded
from lockstep.training.data.prompt_order import MicroBatch
from lockstep.training.forward.filters.id_rules import IdRules
from lockstep.training.forward.reference import Reference
from lockstep.training.generate.source import RolloutSource
from lockstep.training.loop import TrainingLoop
from lockstep.training.run_files.method_state import MethodState
from lockstep.training.step.update import Policy
from lockstep.training.trainers.hooks.update_proof import update_proof

_logger = logging.getLogger(__name__)


class StepHooks(Trainer):
    """The steps of a trainer.

    Attributes:
        config: the run's configuration.
        critic: the value head; None if the method has none.
        reference: the reference model; None if the method uses none.
        makes_optimizer: whether the trainer makes the optimizer, instead of the user.
        inputs: the run's data, code and settings, for the receipt. Only the rank with the engine has them.
        settings: the proof of what the user has asked for.
    """

    config: Any
    loop: TrainingLoop
    source: RolloutSource
    clock: PhaseClock
    ranks: Ranks
    critic: torch.nn.Module | None
    reference: Reference | None
    makes_optimizer: bool
    inputs: dict[str, Any]
    settings: SettingsProof
    _method_state: MethodState
    _plain_rows: bool
    _rules: IdRules
    # The model and what it wraps. accelerate looks for installed packages each time it unwraps a model.
    _unwrapped: tuple[torch.nn.Module, PreTrainedModel] | None = None

    # `micro_step` already divides by the whole optimizer step; the base class must not divide again.
    loss_is_scaled_for_ga = True

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """None: loss weights are normalised over the step when the generation is cut, so the base class counts no tokens."""

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
        self.loop.note_clip(float(norm))
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.ranks.passes is not None:
            return clip_sharded(self.loop.trained_parameters(), float("inf"), self.ranks.passes)
        return super()._get_grad_norm(model, grad_norm)

    def first_rate(self, parameter: str) -> float:
        """The learning rate that the config gives a parameter, before the schedule."""
        return self.config.learning_rate

    def begin_training(self) -> None:
        """Reset the state of an earlier call of `train`, open the receipt and prove the engine. Called when training begins."""
        self.loop.begin()
        self._forget_gradients()
        self.loop.update_proof = update_proof(self)
        self._freeze()
        self.source.start(Path(self.args.output_dir or "."), self.state.global_step, self.inputs)
        if self.ranks.owner:
            self.source.proofs.keep_alarms(self.source.alarms, lambda: self.state.global_step)
        self.clock.take()

    def before_update(self) -> None:
        """Prove the gradients and the learning rate, just before the optimizer changes the weights."""
        self.loop.before_update()

    def after_update(self) -> None:
        """Prove what the optimizer has made of the weights."""
        self.loop.after_update()

    def end_step(self) -> bool:
        """Clear the value head's gradients, move the reference model, and check whether prompts are left. Called after each step.

        Returns:
            Whether another generation can be made.
        """
        self._forget_gradients()
        config, reference = self.config, self._method_state.moving_reference
        if reference is not None and self.state.global_step % config.ref_model_sync_steps == 0:
            reference.follow(config.ref_model_mixup_alpha)
            self._freeze()
        used_up = self.loop.is_used_up()
        if used_up and self.ranks.owner:
            _logger.info(f"training ends at step {self.state.global_step}: too few prompts are left unsolved")
        return not used_up

    def _freeze(self) -> None:
        """Note the weights that must stay as they are: those of the reference, and those under an adapter."""
        frozen = {name: p for name, p in self._policy_model().named_parameters() if not p.requires_grad}
        if self.reference is not None:
            frozen |= self.reference.own_weights
        proof = FrozenWeights(frozen, self.loop.trained_parameters(), self.config.seed) if frozen else None
        self.loop.frozen = proof

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
            self._rules,
            self.settings,
            self._kept_sets(),
        )

    def _kept_sets(self) -> KeptSetProof | None:
        filtered = self._rules.sampling.is_filtered
        return KeptSetProof(self._rules.distribution, self.source.limit) if filtered else None

    def _policy_model(self) -> PreTrainedModel:
        if self._unwrapped is None or self._unwrapped[0] is not self.model:
            self._unwrapped = (self.model, self.accelerator.unwrap_model(self.model))
        return self._unwrapped[1]

    def _causal(self) -> PreTrainedModel:
        return causal_model(self._policy_model())

    def trained_by_name(self) -> dict[str, torch.nn.Module]:
        return {"policy": self._policy_model(), **({"critic": self.critic} if self.critic is not None else {})}

    def _trained_modules(self) -> list[torch.nn.Module]:
        return [self._causal(), *([self.critic] if self.critic is not None else [])]
