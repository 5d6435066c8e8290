"""Lets the trainer's own forward and backward compute the gradient of a drawn sum of scores, for `parity/backward/`.

`training/loop.py` asks it before the first forward of a step: at the first step of a run, and later as often as its share of the
run's time allows. It changes neither weights nor random numbers, and leaves no gradient behind.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lockstep.engines.protocol import Completion, RequestKey, Sampling
from lockstep.errors import ProofError
from lockstep.models.quantised import is_quantised
from lockstep.parity.backward.finite_differences import Directions, Drawn, check_computed_gradient, check_model_gradient
from lockstep.parity.logprobs.distributions import Distribution
from lockstep.parity.tolerances import gradient_limit
from lockstep.shards.model import sharded
from lockstep.tokens.arrays import filled, places_of, whole_numbers
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.step.update import Policy

_logger = logging.getLogger(__name__)

# Share of a run's time that the checks after the first one may take.
SHARE = 0.01
# Completions of one check, and ids of each: the end of its prompt, and the beginning of the completion.
_COMPLETIONS, _PROMPT, _IDS = 2, 32, 12
# Drawn sums, if the gradient of the first one in half precision is over the limit.
_DRAWS = 5


class ModelGradient:
    """The checks of one run, on one rank.

    Args:
        trained: gives the modules that the optimizer changes.
        entropies: whether the method's loss has a gradient through entropies.
        rank: of this process; ranks draw other completions.
    """

    def __init__(
        self, trained: Callable[[], list[torch.nn.Module]], config: OnlineConfig, rank: int, *, entropies: bool
    ) -> None:
        self._trained, self._config, self._rank, self._entropies = trained, config, rank, entropies
        self._told: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Start again: the next step is checked."""
        self._spent, self._began, self._is_first = 0.0, time.perf_counter(), True

    def check(self, policy: Policy, sequences: Sequence[TrainingSequence], step: int) -> dict[str, float]:
        """Check the model's backward, if it is time to.

        Args:
            sequences: those of the step, of which a few are drawn.
            step: number of steps before this one.

        Returns:
            Figures to log; empty if nothing was checked.

        Raises:
            ProofError: the backward gives another gradient than finite differences of a plain forward.
        """
        now = time.perf_counter()
        if not sequences or not (self._is_first or self._spent <= SHARE * (now - self._began)):
            return {}
        if sharded(policy.model) is not None:
            self._say("a sharded model has no float64 copy on one rank")
            return {}
        # With 4-bit weights the kernels of a library compute, in few digits.
        if any(is_quantised(p) for p in policy.model.parameters()):
            return {}
        named = {
            f"value_head.{name}" if i else name: p
            for i, module in enumerate(self._trained())
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        if any("lora_magnitude_vector" in name for name in named):
            self._say(
                "DoRA's backward takes a norm of the weights as constant, on purpose, so it is not the true gradient"
            )
            return {}
        # Another proof (`accumulation`) must find a gradient that is left from an earlier step.
        if any(p.grad is not None and bool(p.grad.any()) for p in named.values()):
            return {}
        self._is_first = False
        try:
            error = self._error(policy, sequences, named, (self._config.seed, step, self._rank))
        finally:
            self._spent += time.perf_counter() - now
        return {} if error is None else {"checked/model_gradient_error": error}

    def _error(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        named: Mapping[str, torch.nn.Parameter],
        seed: tuple[int, ...],
    ) -> float | None:
        chosen, factors = self._draw(policy, sequences, seed)
        drawn = Drawn(
            policy.model, policy.critic, [_completion(s) for s in chosen], factors, self._distribution(policy)
        )
        precision = self._config.precision
        autocast = precision.autocast
        if autocast is None or policy.model.dtype != torch.float32:
            with self._gradients(policy, chosen, factors, named):
                return self._proven(drawn, named, seed, gradient_limit(precision.dtype_of(policy.model)))
        # Without autocast the limit is narrow. Then the gradient with autocast is compared with the gradient without it.
        exactly = replace(policy, autocast=nullcontext)
        with self._gradients(exactly, chosen, factors, named):
            error = self._proven(drawn, named, seed, gradient_limit(torch.float32))
            exact = Directions(named, seed)
        if any(".experts." in name for name in named):
            # Rounding may send a token to another expert, which then gets its gradient.
            return error
        limit, distances = gradient_limit(autocast), [self._distance(policy, chosen, factors, exact)]
        for number in range(1, _DRAWS) if limit < distances[0] < math.inf else ():
            again = (*seed, number)
            chosen, factors = self._draw(policy, sequences, again)
            with self._gradients(exactly, chosen, factors, named):
                exact = Directions(named, again)
            distances.append(self._distance(policy, chosen, factors, exact))
        check_computed_gradient(distances, limit)
        return error

    def _draw(
        self, policy: Policy, sequences: Sequence[TrainingSequence], seed: tuple[int, ...]
    ) -> tuple[list[TrainingSequence], torch.Tensor]:
        """Drawn sequences, cut, and the (3, N) factors of their log-probs, entropies and values."""
        draws = np.random.default_rng(seed)
        chosen = [_cut(s) for s in _pair(sequences, draws)]
        size = sum(s.length for s in chosen)
        used = (True, self._entropies, policy.critic is not None)
        signs = draws.integers(0, 2, (3, size)) * 2.0 - 1.0
        return chosen, torch.from_numpy(signs * np.array(used)[:, None] / np.sqrt(size * sum(used)))

    def _distance(
        self, policy: Policy, chosen: Sequence[TrainingSequence], factors: torch.Tensor, exact: Directions
    ) -> float:
        """How far the gradient of a drawn sum is from the exact one, in sizes of the exact one."""
        with self._gradients(policy, chosen, factors, exact.named):
            return exact.distance()

    def _proven(
        self, drawn: Drawn, named: Mapping[str, torch.nn.Parameter], seed: tuple[int, ...], limit: float
    ) -> float | None:
        try:
            error = check_model_gradient(drawn, named, seed, limit)
        except ProofError:
            raise
        except Exception as trouble:  # noqa: BLE001 - a kernel of any library may refuse float64 in its own way
            self._say(f"a forward in float64 fails ({type(trouble).__name__}: {str(trouble)[:200]})")
            return None
        if error is None:
            self._say("finite differences of its forward depend on the step")
        return error

    def _say(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _logger.warning(f"the model's backward is not proven at this step: {why}")

    def _gradients(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        factors: torch.Tensor,
        named: Mapping[str, torch.nn.Parameter],
    ) -> Any:
        return _Gradients(policy, sequences, factors, named, self._config, entropies=self._entropies)

    def _distribution(self, policy: Policy) -> Distribution:
        config = self._config
        if policy.rules is None:
            return Distribution(Sampling(config.completion_limit, temperature=config.temperature))
        found = policy.rules.distribution
        return replace(found, sampling=replace(found.sampling, temperature=config.temperature))


class _Gradients:
    """A context in which the trained tensors hold the gradients of the drawn sum, as the trainer computes them."""

    def __init__(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        factors: torch.Tensor,
        named: Mapping[str, torch.nn.Parameter],
        config: OnlineConfig,
        *,
        entropies: bool,
    ) -> None:
        self._policy, self._sequences, self._factors = policy, sequences, factors
        self._named, self._config, self._entropies = named, config, entropies

    def __enter__(self) -> None:
        lengths = [s.length for s in self._sequences]
        parts = dict(zip((s.name for s in self._sequences), self._factors.split(lengths, 1), strict=True))
        for pack in self._policy.packs(self._sequences, self._config):
            scores = self._policy.score(pack, self._config, entropy_gradient=self._entropies)
            # A pack may have another order.
            factors = torch.cat([parts[s.name] for s in pack.sequences], 1).to(scores.logps.device, scores.logps.dtype)
            total = (scores.logps * factors[0]).sum()
            if self._entropies:
                total = total + (scores.entropies * factors[1]).sum()
            if scores.values is not None:
                total = total + (scores.values * factors[2]).sum()
            total.backward()

    def __exit__(self, *error: object) -> None:
        for parameter in self._named.values():
            parameter.grad = None


def _pair(sequences: Sequence[TrainingSequence], draws: np.random.Generator) -> list[TrainingSequence]:
    """A drawn sequence, and others of the same prompt if there are any: they share its positions in a pack."""
    first = sequences[int(draws.integers(len(sequences)))]
    same = [s for s in sequences if s is not first and np.array_equal(s.prompt_ids, first.prompt_ids)]
    return [first, *same[: _COMPLETIONS - 1]]


def _cut(sequence: TrainingSequence) -> TrainingSequence:
    """The end of the prompt and the beginning of the completion, with at least one sampled id."""
    places = places_of(sequence.sampled, len(sequence.completion_ids))
    size = max(_IDS, int(places[0]) + 1)
    kept = int((places < size).sum())
    return TrainingSequence(
        sequence.name,
        sequence.prompt_ids[-_PROMPT:],
        sequence.completion_ids[:size],
        sequence.behaviour_logps[:kept],
        sampled=None if sequence.sampled is None else sequence.sampled[:size],
        kept_ids=None if sequence.kept_ids is None else sequence.kept_ids.part(0, kept),
    )


def _completion(sequence: TrainingSequence) -> Completion:
    count = len(sequence.completion_ids)
    return Completion(
        RequestKey(sequence.name, 0),
        sequence.prompt_ids,
        sequence.completion_ids,
        filled(0.0, count),
        whole_numbers([0] * count),
        "length",
        sequence.sampled,
        sequence.kept_ids,
    )
