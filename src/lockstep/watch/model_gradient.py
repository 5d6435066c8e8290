"""The trainer's own gradients, which `watch/finite_differences.py` compares with a plain forward.

A drawn sum of scores goes through the model before a step's first forward. A drawn part of a step itself is compared in
float32, and where it is over a part of its limit, other comparisons decide. Neither weights nor random numbers nor
gradients are changed.

In half precision the gradient of a log-prob says little where the policy is nearly certain of its token: 1 − p is
then as small as its rounding. So sums are drawn there over ids that were not sampled, and a part in doubt is compared
with itself, computed again.

Proof `model_gradient`.
Shows: the trainer's backward, from log-probs, entropies and values to every trained tensor, gives the slopes of a
plain forward in float32, in doubt in float64: over a whole completion with its prompt, in a pack of the step, on every
rank; from a critic's values alone too; and for what a drawn part of the step adds to `.grad`, through all hooks and
before the clip (docs/internals/proof.md#the-models-own-backward).
Does not show: other sequences than the drawn ones; a fault of less than 0.05 of the gradient, such as one tensor of
400; in half precision, less than 0.4 that happens under autocast only, or beyond half a pack's positions; pictures, and
more than parts of completions with them; sharded models, 4-bit weights and DoRA, where the receipt counts the checks
that were not made.
When: a whole completion at the first step of a run or a resume, and at every 50th step, so at the latest after 50
steps; a critic also as soon as it is not 0; a part of the step at every tenth step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.config.run import OnlineConfig
from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.devices import on_host
from lockstep.errors import LockstepError, ProofError
from lockstep.learn.pack import Pack, units_of
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.models.quantised import is_quantised
from lockstep.shards.model import sharded
from lockstep.tokens.arrays import filled, whole_numbers
from lockstep.watch.drawn_sums import Drawn, Gradients, Used, budget, parts, whole
from lockstep.watch.finite_differences import (
    Added,
    Directions,
    DrawnSum,
    check_added,
    check_computed_gradient,
    check_model_gradient,
    check_repeated,
)
from lockstep.watch.tolerances import gradient_limit

_logger = logging.getLogger(__name__)

# A part of the step itself is checked at one step in so many.
EVERY = 10
# A drawn sum is checked at the first step, and at one step in so many.
EVERY_SUM = 50
# The part of a limit over which a comparison in float32 is made again in float64. In half precision a common factor
# of all gradients is off by some hundredths. In single precision rounding falls with the root of the number of tensors.
_DOUBT_HALF, _DOUBT_SINGLE, _TENSORS = 0.25, 0.125, 20
# The names of the critic's tensors begin so.
_HEAD = "value_head."
# Drawn sums, if the gradient of the first one in half precision is over the limit.
_DRAWS = 5


class Checked(NamedTuple):
    """What one call has found: figures to log, and why a check that was due could not be made (empty: it was made)."""

    figures: dict[str, float]
    unproven: str = ""


class ModelGradient:
    """The checks of one run, on one rank.

    Args:
        trained: gives the modules that the optimizer changes.
        entropies: whether the method's loss has a gradient through entropies.
        rank: of this process; ranks draw other completions.

    Attributes:
        part: the part of the current step whose gradient is checked; None: none is.
    """

    def __init__(
        self,
        trained: Callable[[], list[torch.nn.Module]],
        config: OnlineConfig,
        rank: int,
        *,
        entropies: bool,
    ) -> None:
        self._trained, self._config, self._rank, self._entropies = trained, config, rank, entropies
        self._told: set[str] = set()
        self.part: CheckedPart | None = None
        self.forget()

    def forget(self) -> None:
        """Start again: the next step is a first one."""
        self._is_first, self._values_wait, self.part, self._unproven = True, True, None, ""

    def is_due(self, step: int) -> bool:
        """Whether a part of the step after `step` steps is checked. All ranks give the same answer."""
        return (step + self._config.seed) % EVERY == 0

    def begin(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        learned: Sequence[Sequence[TrainingSequence]],
        step: int,
    ) -> Checked:
        """Before a step's first forward: check the first step, and draw the part of a step that is checked.

        Args:
            sequences: those of the step, over all ranks.
            learned: those with a gradient, in the micro-batches of this rank; empty if scores are not all that has a
                gradient.
            step: number of steps before this one.
        """
        self.part = None
        due, of_values = self.is_due(step), policy.critic is not None and self._values_wait
        if not sequences or not (self._is_first or due or of_values):
            return Checked({})
        named = self._named()
        if why := _not_provable(policy, named):
            self._is_first = self._values_wait = False
            return Checked({}, self._say(why))
        # Another proof (`accumulation`) must find a gradient that is left from an earlier step.
        if any(map(bool, on_host([p.grad.any() for p in named.values() if p.grad is not None]))):
            return Checked({})
        seed = (self._config.seed, step, self._rank)
        if due and (part := draw_part(learned, np.random.default_rng((*seed, 1)))):
            names = frozenset(s.name for s in part)
            self.part = CheckedPart(names, named, self._distribution(policy), (*seed, 2))
        of_all = self._is_first or (
            due and (self.part is None or (step + self._config.seed) % EVERY_SUM == 0)
        )
        self._is_first = False
        found = self._sum_checked(policy, sequences, named, step) if of_all else Checked({})
        if policy.critic is not None and (of_all or of_values):
            found = _both(found, self._values_checked(policy, sequences, named, step))
        return found

    def finish(self, policy: Policy, sequences: Sequence[TrainingSequence], step: int) -> Checked:
        """After a step's last backward, before gradients are clipped: check what the drawn part has added to them."""
        part, self.part = self.part, None
        if part is None:
            return Checked({})
        named, found = self._named(), part.gradient(policy.model, policy.critic)
        limit, is_coarse = self._limit(policy)
        if found is not None:
            added, drawn_sum = found
            distance = self._computed(lambda: added.distance(drawn_sum))
            doubt = _DOUBT_HALF if is_coarse else _DOUBT_SINGLE * min(1.0, math.sqrt(_TENSORS / len(named)))
            if distance is not None and distance <= doubt * limit:
                return Checked({"checked/step_gradient_error": distance})
        # In doubt, and where the part has no gradient at all, a drawn sum goes through the model: over parts of
        # completions, which cost less.
        with _set_aside(named):
            checked = self._sum_checked(policy, sequences, named, step, in_parts=True)
            if found is None:
                return checked
            if is_coarse:
                error = self._checked_again(policy, part.sequences, added, drawn_sum, limit)
            else:
                error = self._computed(lambda: check_added(added, drawn_sum, limit))
        if error is None:
            return Checked(checked.figures, self._unproven)
        # A part that was compared with nothing but itself shows no plain forward: the drawn sum is the whole proof.
        alone = is_coarse and self._autocast(policy) is None
        figures = checked.figures | {"checked/step_gradient_error": error}
        return Checked(figures, checked.unproven if alone else "")

    def _checked_again(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        added: Added,
        drawn_sum: DrawnSum,
        limit: float,
    ) -> float | None:
        """How far what a part has added is from the same gradient, computed again. No trained tensor may have one.

        Under autocast the part is also computed without it, and compared with the slope of the plain forward.
        """
        drawn = Drawn(sequences, sequences, drawn_sum.coefficients)
        with self._gradients(policy, drawn):
            error = check_repeated(added, added.read_again(), drawn_sum, _DOUBT_HALF * limit)
        if self._autocast(policy) is not None:
            exactly = replace(policy, autocast=nullcontext)
            with self._gradients(exactly, drawn):
                exact = added.read_again()
            if self._computed(lambda: check_added(exact, drawn_sum, gradient_limit(torch.float32))) is None:
                return None
        return error

    def _limit(self, policy: Policy) -> tuple[float, bool]:
        """The limit for gradients, and whether the trainer's rounding may be as large as the gradient of a log-prob."""
        limit = gradient_limit(self._config.precision.dtype_of(policy.model))
        return limit, limit > gradient_limit(torch.float64)

    def _autocast(self, policy: Policy) -> torch.dtype | None:
        """The dtype of autocast over float32 weights, whose gradients exist without it too; None: no such autocast."""
        return self._config.precision.autocast if policy.model.dtype == torch.float32 else None

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return {
            f"{_HEAD}{name}" if i else name: p
            for i, module in enumerate(self._trained())
            for name, p in module.named_parameters()
            if p.requires_grad
        }

    def _sum_checked(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        named: Mapping[str, torch.nn.Parameter],
        step: int,
        *,
        in_parts: bool = False,
    ) -> Checked:
        """Check the gradient of a drawn sum of scores. No trained tensor may hold a gradient."""
        seed, used = (
            (self._config.seed, step, self._rank),
            Used(True, self._entropies, policy.critic is not None),
        )
        error = self._error(policy, sequences, named, seed, used, in_parts=in_parts)
        if error is None:
            return Checked({}, self._unproven)
        return Checked({"checked/model_gradient_error": error})

    def _values_checked(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        named: Mapping[str, torch.nn.Parameter],
        step: int,
    ) -> Checked:
        """Check the gradient of the critic's values in the tensors of the model, as soon as the head is not 0.

        It may be small beside that of log-probs, so it has a sum of its own.
        """
        assert policy.critic is not None
        self._values_wait = not _size(policy.critic)
        if self._values_wait:
            return Checked({})
        trunk = {n: p for n, p in named.items() if not n.startswith(_HEAD)}
        seed = (self._config.seed, step, self._rank, 3)
        error = self._error(policy, sequences, trunk, seed, Used(logps=False, values=True))
        if error is None:
            return Checked({}, self._unproven)
        return Checked({"checked/value_gradient_error": error})

    def _error(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        named: Mapping[str, torch.nn.Parameter],
        seed: tuple[int, ...],
        used: Used,
        *,
        in_parts: bool = False,
    ) -> float | None:
        # The limit is narrow without autocast. Then the gradient with autocast is compared with the one without it.
        autocast = self._autocast(policy)
        most = budget(self._config)
        texts = [] if in_parts else [i for i, s in enumerate(sequences) if not s.pictures]
        if autocast is None:
            drawing = self._drawing(policy, sequences, used, texts, most)
            return self._exact_error(policy, drawing, named, seed, self._limit(policy)[0])[0]
        exactly, limit = replace(policy, autocast=nullcontext), gradient_limit(torch.float32)
        narrow = [i for i in texts if len(sequences[i].path) <= most // 2]
        drawing = self._drawing(policy, sequences, used, narrow, most // 2)
        error, drawn, exact = self._exact_error(exactly, drawing, named, seed, limit)
        # Under autocast, rounding may send a token to another expert, which then gets its gradient.
        if any(".experts." in name for name in named):
            return error
        limit, distances = gradient_limit(autocast), [self._distance(policy, drawn, exact)]
        for number in range(1, _DRAWS) if limit < distances[0] < math.inf else ():
            again = (*seed, number)
            drawn = drawing(again)
            with self._gradients(exactly, drawn):
                exact = Directions(named, again)
            distances.append(self._distance(policy, drawn, exact))
        check_computed_gradient(distances, limit)
        if longer := [i for i in texts if i not in narrow]:
            # What has no room without autocast is compared with it, in the wide limit.
            drawing = self._drawing(policy, sequences, used, longer, most)
            self._exact_error(policy, drawing, named, (*seed, _DRAWS), limit)
        return error

    def _exact_error(
        self,
        policy: Policy,
        drawing: Callable[[tuple[int, ...]], Drawn],
        named: Mapping[str, torch.nn.Parameter],
        seed: tuple[int, ...],
        limit: float,
    ) -> tuple[float | None, Drawn, Directions]:
        """The error of a drawn sum, the sum, and its gradient.

        Rounding may now and then add up in the gradients of a few tensors, in float32 too (SmolLM2-135M after 250
        steps: 0.05 in one of some 30 sums, 0.003 to 0.02 in the others). A fault is there in most sums. So the
        majority of five is judged; a gradient that is not finite is refused at once.
        """
        failed: list[ProofError] = []
        error: float | None = None
        for number in range(_DRAWS):
            again = (*seed, number) if number else seed
            drawn = drawing(again)
            completions = [completion_of(s) for s in drawn.chosen]
            drawn_sum = DrawnSum(
                policy.model, policy.critic, completions, drawn.factors, self._distribution(policy)
            )
            with self._gradients(policy, drawn):
                exact = Directions(named, again)
                # The place of a fault costs as much as the check, and only the last failure is told.
                last = len(failed) == _DRAWS // 2
                check = partial(check_model_gradient, drawn_sum, named, again, limit, place=last)
                try:
                    error = self._computed(check)
                except ProofError as found:
                    failed.append(found)
            if failed and (len(failed) > _DRAWS // 2 or not exact.is_finite):
                raise failed[-1]
            if not failed or number + 1 - len(failed) > _DRAWS // 2:
                break
        return error, drawn, exact

    def _drawing(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        used: Used,
        places: Sequence[int],
        most: int,
    ) -> Callable[[tuple[int, ...]], Drawn]:
        """What draws the sums of one check, by a seed.

        Args:
            places: of the sequences that may be chosen whole; empty: parts of any of them are.
            most: number of positions for which there is room.
        """
        # Ids of pictures stand for their pixels, which other texts do not have.
        texts = [s for s in sequences if not s.pictures]
        size = _size(policy.critic) if policy.critic is not None and not used.logps else 1.0

        def draw(seed: tuple[int, ...]) -> Drawn:
            draws = np.random.default_rng(seed)
            packed, chosen = whole(sequences, places, most, draws) if places else parts(sequences, draws)
            drawn = Drawn.over(packed, chosen, used, size, draws)
            if self._limit(policy)[1] and self._distribution(policy).is_tempered_only:
                own = texts or chosen
                ids = np.unique(np.concatenate([i for s in own for i in (s.prompt_ids, s.completion_ids)]))
                drawn = drawn.with_other_ids(ids, draws)
            return drawn

        return draw

    def _distance(self, policy: Policy, drawn: Drawn, exact: Directions) -> float:
        """How far the gradient of a drawn sum is from the exact one, in sizes of the exact one."""
        with self._gradients(policy, drawn):
            return exact.distance()

    def _computed(self, compute: Callable[[], float | None]) -> float | None:
        """What is computed. None: it says nothing, or an operation refuses a wide dtype (`_unproven` says why)."""
        self._unproven = ""
        try:
            found = compute()
        except ProofError:
            raise
        except Exception as error:
            trouble = error.__cause__ if isinstance(error.__cause__, Exception) else error
            if not refuses_a_dtype(trouble):
                raise
            what = f"{type(trouble).__name__}: {str(trouble)[:200]}"
            self._unproven = self._say(f"a forward in float64 fails ({what})")
            return None
        if found is None:
            self._unproven = self._say("finite differences of its forward depend on the step")
        return found

    def _say(self, why: str) -> str:
        if why not in self._told:
            self._told.add(why)
            _logger.warning(f"the model's backward is not proven at this step: {why}")
        return why

    def _gradients(self, policy: Policy, drawn: Drawn) -> Gradients:
        return Gradients(policy, drawn, self._named(), self._config, entropies=self._entropies)

    def _distribution(self, policy: Policy) -> Distribution:
        config = self._config
        if policy.rules is None:
            return Distribution(Sampling(config.completion_limit, temperature=config.temperature))
        found = policy.rules.distribution
        return replace(found, sampling=replace(found.sampling, temperature=config.temperature))


def _size(critic: torch.nn.Module) -> float:
    """The size of a value head's matrix: a head that is near 0 gives values near 0."""
    return float(torch.stack([p.detach().norm() for p in critic.parameters() if p.ndim > 1]).norm())


def _both(one: Checked, other: Checked) -> Checked:
    return Checked(one.figures | other.figures, one.unproven or other.unproven)


def _not_provable(policy: Policy, named: Mapping[str, torch.nn.Parameter]) -> str:
    """Why the backward of a policy is never proven; empty if it is."""
    if sharded(policy.model) is not None:
        return "a sharded model has no float64 copy on one rank"
    if any(is_quantised(p) for p in policy.model.parameters()):
        return "with 4-bit weights the kernels of a library compute, in few digits"
    if any("lora_magnitude_vector" in name for name in named):
        return "DoRA's backward takes a norm of the weights as constant, on purpose, so it is not the true gradient"
    return ""


def refuses_a_dtype(trouble: Exception) -> bool:
    """Whether a kernel refuses a dtype, as each library does in its own way. A fault of a device is another."""
    if isinstance(trouble, NotImplementedError) or type(trouble).__module__.startswith("triton"):
        return True
    if isinstance(trouble, KeyError):
        # vLLM's batch-invariant products have a table by dtype.
        return isinstance(trouble.args[0] if trouble.args else None, torch.dtype)
    text = str(trouble).lower()
    words = ("device", "cuda", "out of memory", "allocate memory", "enough memory")
    if isinstance(trouble, LockstepError) or any(word in text for word in words):
        return False
    return isinstance(trouble, (RuntimeError, TypeError, ValueError))


@contextmanager
def _set_aside(named: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """A context in which no tensor holds a gradient. At its end every tensor has its own again."""
    kept = {name: p.grad for name, p in named.items()}
    for parameter in named.values():
        parameter.grad = None
    try:
        yield
    finally:
        for name, parameter in named.items():
            parameter.grad = kept[name]


# Among so many drawn units of sequences, the shortest one is the part.
_AMONG = 4


class CheckedPart:
    """The part of one step, on one rank: named sequences that have a gradient and stay in one pack."""

    def __init__(
        self,
        names: frozenset[str],
        named: Mapping[str, torch.nn.Parameter],
        distribution: Distribution,
        seed: tuple[int, ...],
    ) -> None:
        self._names, self._named, self._distribution, self._seed = names, named, distribution, seed
        self._pack: tuple[TrainingSequence, ...] = ()
        self._flows: list[torch.Tensor] = []
        self._added: Added | None = None

    def split(self, sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
        """The sequences of a micro-batch: those of the part, and the others. Empty lists are left out."""
        own = [s for s in sequences if s.name in self._names]
        others = [s for s in sequences if s.name not in self._names]
        return [some for some in (own, others) if some]

    @property
    def sequences(self) -> Sequence[TrainingSequence]:
        """The sequences of the part, in the order of their pack."""
        return self._pack

    @contextmanager
    def watch(self, pack: Pack, scores: TokenScores) -> Iterator[None]:
        """A context for the loss of a pack and its backward, which keeps what the part's pack adds to the gradients."""
        if pack.sequences[0].name not in self._names:
            yield
            return
        self._pack = pack.sequences
        for tensor in (scores.logps, scores.entropies, scores.values):
            flow = torch.zeros(len(scores.logps), dtype=torch.float64, device=scores.logps.device)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(partial(_keep, flow))
            self._flows.append(flow)
        self._added = Added(self._named, self._seed)
        yield
        self._added.read()

    def gradient(
        self, model: PreTrainedModel, critic: torch.nn.Module | None
    ) -> tuple[Added, DrawnSum] | None:
        """What the part has added to the gradients, and its sum of scores, divided by the size of the coefficients.

        None if the loss has no gradient at the part's tokens.
        """
        if self._added is None:
            return None
        coefficients = torch.stack(self._flows)
        size = float(coefficients.norm())
        if not size:
            return None
        completions = [completion_of(s) for s in self._pack]
        drawn_sum = DrawnSum(model, critic, completions, coefficients / size, self._distribution)
        return self._added.scaled(1 / size), drawn_sum


def _keep(flow: torch.Tensor, gradient: torch.Tensor) -> None:
    flow += gradient.detach()


def draw_part(
    batches: Sequence[Sequence[TrainingSequence]], draws: np.random.Generator
) -> list[TrainingSequence]:
    """The shortest of some drawn units of sequences with a gradient and no pictures; empty if there is none."""
    units = [unit for batch in batches for unit in units_of(batch) if not any(s.pictures for s in unit)]
    if not units:
        return []
    chosen = draws.permutation(len(units))[:_AMONG].tolist()
    return min((units[i] for i in chosen), key=lambda unit: sum(len(s.path) for s in unit))


def completion_of(sequence: TrainingSequence) -> Completion:
    """A sequence as an engine would have answered it. Its log-probs and versions are not those of an engine."""
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
