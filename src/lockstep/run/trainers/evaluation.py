"""Evaluates a trainer's policy by sampling: on its evaluation sets, or on other rows.

One evaluation is a push, samples, scores and proofs as for a generation of training. Nothing is learned. The result has
scored groups, the method's loss on them, and the figures of their proof.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from datasets import Dataset
from transformers.trainer_utils import PredictionOutput

from lockstep.errors import InputError, did_you_mean
from lockstep.learn.generation import sequences_of
from lockstep.learn.loss_alone import loss_alone, needs_scores
from lockstep.progress import busy
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.run.data.prompts import SINGLE, check_dataset, named_sets, read_sets, with_empty_prompts
from lockstep.run.loop import TrainingLoop
from lockstep.run.metrics import evaluation_metrics
from lockstep.run.source import RolloutSource
from lockstep.run.trainers.checks import check_open
from lockstep.run.trainers.run_files import RunFiles
from lockstep.run.trainers.trl_names import TRLNames
from lockstep.watch.inputs import data_digest
from lockstep.watch.rewards import count_seen, drawn_sequences


def evaluate(
    loop: TrainingLoop, prompts: Sequence[Prompt], digest: Callable[[], str]
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Scored rollouts of a set by the policy as it is, and their loss and proof in figures. Every rank calls.

    Args:
        digest: gives the digest of the set's rows (`data_digest`), on the rank that holds the engine.
    """
    count, version, seed = loop.config.group_size_eval, loop.state().global_step, loop.config.seed
    groups = list(loop.rollout_in_parts(prompts, count))
    every, policy = sequences_of(groups, version), loop.policy()
    sequences = every if needs_scores(loop.objective) else drawn_sequences(every, version, seed)
    scored = loop.preparation.scores(policy, sequences)
    proven = loop.watch.evaluated(groups, prompts, scored, digest, count)
    learned = (
        loss_alone(loop.preparation, loop.objective, policy, groups, version, every, scored) if every else {}
    )
    return groups, learned | proven


_logger = logging.getLogger(__name__)


class EvaluatesBySampling(TRLNames):
    """Replaces the evaluation of `transformers.Trainer`, which computes a loss.

    Attributes:
        last_eval_groups: the rollouts of the last evaluation, of all its sets.
    """

    loop: TrainingLoop
    source: RolloutSource
    clock: PhaseClock
    ranks: Ranks
    last_eval_groups: list[RolloutGroup]
    files: RunFiles
    _is_closed: bool
    inputs: dict[str, Any]
    _train_prompts: list[Prompt]
    _eval_prompts: dict[str, list[Prompt]]
    # The metric of each of the trainer's own sets.
    _seen: dict[str, dict[str, float]]
    # Makes prompts of datasets that come later. The number is the engine's longest sequence, in tokens.
    _prompts_of: Callable[[Mapping[str, Dataset], int], dict[str, list[Prompt]]]
    _has_environments: bool

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = SINGLE
    ) -> dict[str, float]:
        """Mean reward on evaluation prompts, sampled as in training. Every rank calls.

        Args:
            eval_dataset: other rows than the trainer's: a dataset, a mapping of datasets, or the name of one of the
                trainer's sets.
            ignore_keys: not used; there are no outputs of a model to leave out.
            metric_key_prefix: begins the name of every metric. The sets of a mapping have their name behind it.

        Returns:
            `eval_reward`, `eval_reward_ci95` (half-width, over problems), `eval_samples`, `eval_problems`, the
            rollout metrics, the figures of the proof under `eval_parity/` (`checked_share`: share of the tokens that
            the policy has scored again), and `eval_seen_in_training`, the number of evaluation prompts that are
            training prompts too. For a set `math` of a mapping the names begin with `eval_math_`.

        Raises:
            InputError: there is no evaluation set, or its rows cannot be prompts.
            ProofError: trainer and engine do not agree, or other rows than those of the evaluation set were evaluated.
        """
        check_open(self._is_closed)
        with self.noting_failure():
            found = self._evaluate_sets(eval_dataset, metric_key_prefix)
        if self._writes_files and eval_dataset is None:
            # On several ranks the owner may need the others: it scores shown rollouts with a model that may be sharded.
            self.ranks.on_owner("evaluation files", lambda: self.files.evaluated(found))
        return found

    @property
    def _writes_files(self) -> bool:
        return self.files in self.callback_handler.callbacks

    def noting_failure(self) -> AbstractContextManager[None]:
        """A context in which an error is written into the run's files, unless the user has removed `RunFiles`."""
        return self.files.noting_failure() if self._writes_files else nullcontext()

    def _evaluate_sets(self, eval_dataset: Any, metric_key_prefix: str) -> dict[str, float]:
        self.last_eval_groups = []
        self.take_weights()
        found: dict[str, float] = {}
        for name, prompts in self._evaluated(eval_dataset).items():
            own = name.removeprefix(SINGLE).removeprefix("/")
            prefix = (
                f"{metric_key_prefix}_{own}"
                if own and not isinstance(eval_dataset, str)
                else metric_key_prefix
            )
            groups, named = self._sampled(name, prompts, prefix)
            named |= self.take_eval_notes(prefix)
            self.last_eval_groups += groups
            self.log(dict(named))
            self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
            found |= named
        if eval_dataset is None and metric_key_prefix == SINGLE:
            self._check_best_metric(found)
        return found

    def _check_best_metric(self, found: Mapping[str, float]) -> None:
        asked = self.args.metric_for_best_model
        if asked is None or asked in found or f"{SINGLE}_{asked}" in found:
            return
        known = ", ".join(name.removeprefix(f"{SINGLE}_") for name in found if "/" not in name)
        near = did_you_mean(asked, [name.removeprefix(f"{SINGLE}_") for name in found])
        raise InputError(
            f"metric_for_best_model={asked!r} is no metric of the evaluation; "
            + (near or f"there are {known}, and others")
        )

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Completions and mean reward on other rows. Every rank calls.

        Args:
            test_dataset: a dataset with a column `prompt`.
            ignore_keys: not used.

        Returns:
            `predictions` are the texts, (rows, completions per row); there are no `label_ids`; `metrics` are those of
            `evaluate`.

        Raises:
            InputError: there is no evaluation set, or its rows cannot be prompts.
            ProofError: trainer and engine do not agree, or other rows were evaluated.
        """
        check_open(self._is_closed)
        prompts = [p for own in self._evaluated(test_dataset).values() for p in own]
        groups, named = self._sampled("", prompts, metric_key_prefix)
        self.callback_handler.on_predict(self.args, self.state, self.control, named)
        texts = np.array([[rollout.text for rollout in group.rollouts] for group in groups], dtype=object)
        return PredictionOutput(predictions=texts, label_ids=None, metrics=named)

    def count_seen(self, prompts: list[Prompt]) -> dict[str, float]:
        """The metric `seen_in_training`: how many prompts are training prompts too. A warning, if there are some."""
        if self._has_environments:
            # An environment gives the prompts of its rows.
            return {}
        return {"seen_in_training": float(count_seen(self._train_prompts, prompts, tell=self.ranks.owner))}

    def _sampled(
        self, name: str, prompts: list[Prompt], prefix: str
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        is_own = self._eval_prompts.get(name) is prompts
        seen = self._seen[name] if is_own else self.count_seen(prompts)
        digest = "" if is_own else data_digest(prompts)
        # The time of an evaluation is not counted as time of a step.
        with self.clock.aside(), busy(f"evaluating on {len(prompts)} held-out problems", self.clock.progress):
            groups, proven = evaluate(
                self.loop, prompts, lambda: digest or self.inputs["data"][f"{name} data"]
            )
        if self.ranks.owner and not any(rollout.scored for group in groups for rollout in group.rollouts):
            _logger.warning(f"no completion of this evaluation ({prefix}) has a score: its reward is NaN")
        measured = self.source.metrics(groups, self.state.global_step) | proven | seen
        return groups, evaluation_metrics(groups, measured, prefix)

    def _evaluated(self, given: Any) -> dict[str, list[Prompt]]:
        """The prompts to evaluate, by the name of their set."""
        if given is None:
            if not self._eval_prompts:
                raise InputError(
                    "there is no evaluation set: give eval_dataset, here or when the trainer is made"
                )
            return self._eval_prompts
        if isinstance(given, str):
            name = f"{SINGLE}/{given}"
            if name not in self._eval_prompts:
                known = ", ".join(key.removeprefix(f"{SINGLE}/") for key in self._eval_prompts) or "none"
                raise InputError(f"there is no evaluation set {given!r}; there are: {known}")
            return {name: self._eval_prompts[name]}

        sets: dict[str, Any] = {}
        self.ranks.share("evaluation data", lambda: sets.update(self._checked(given)))
        context = self.ranks.from_owner(
            "context",
            lambda: self.source.engine.settings().max_model_len,
            lambda length: length,
            lambda length: length,
        )
        return self._prompts_of(sets, context)

    def _checked(self, given: Any) -> dict[str, Any]:
        """Other rows than the trainer's, by the name of their set."""
        sets = named_sets(read_sets(given))
        if self._has_environments:
            sets = {name: with_empty_prompts(data) for name, data in sets.items()}
        for name, data in sets.items():
            check_dataset(data, name)
        return sets
