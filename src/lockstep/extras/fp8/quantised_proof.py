"""What an engine in 8 bits changes, measured by the trainer itself, and the limits that follow.

A gap of such an engine has two parts. The trainer computes the first part alone: it scores the same tokens twice, by
its own plain forward, and by a forward whose linear layers quantise weights and inputs by the scheme's formula
(`quantisation.py`). The difference is the quantisation error. The second part is what is left: the rounding of the
dtypes, and rounding that grows, because a code that is rounded to its other neighbour changes the next layers too.

The quantisation error is numerics, and the importance weights of the loss correct for it. The limits on the gap are
those of the dtypes, plus a multiple of the error that was measured on tokens of the run (`widened`). So a gap that
quantisation does not explain is refused like any other. The module probe proves that the engine quantises the right
weights.

The second half proves such an engine while its layers leave their inputs as they are: both sides use the values of the
same codes (`whole_inputs`). Then no code of an input can be rounded to its other neighbour, and the gap is that of the
dtypes. What stands between the layers, and what the engine does with the logits, is proven as exactly as with an
engine that is not in 8 bits. An engine that runs a compiled program cannot change its layers. Then these proofs are
left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.extras.fp8.quantisation import quantised_linear, quantised_rows
from lockstep.models.adapters import causal_model
from lockstep.models.arithmetic import Precision, autocast_dtype
from lockstep.tokens.arrays import whole_numbers
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.gap_explained import check_gap
from lockstep.watch.plain_forward import casting_once, completion_logps, sampled_logps
from lockstep.watch.push import canary_gap, check_canary
from lockstep.watch.tolerances import Tolerance
from lockstep.weights.push import weights_of
from lockstep.weights.source import PlainSource

# How many times the quantisation error a mean gap may have beyond the limit of the dtypes. The gaps measured in
# docs/internals/proof.md are 0.86 to 1.05 times the error.
_ROOM = 1.5
# Tokens that one measurement scores, the completions in which a regular one looks for them, and the share of a run's
# time that regular measurements after the first may take.
_TOKENS, _COMPLETIONS, _SHARE = 256, 32, 0.01


@dataclass(frozen=True, slots=True)
class QuantisedGap:
    """The gap of some tokens and its parts.

    Attributes:
        error: trainer in 8 bits − trainer: the quantisation error.
        rest: engine − trainer in 8 bits.
    """

    error: GapStats = field(default_factory=GapStats)
    rest: GapStats = field(default_factory=GapStats)

    def __add__(self, other: QuantisedGap) -> QuantisedGap:
        return QuantisedGap(self.error + other.error, self.rest + other.rest)


def widened(limit: Tolerance, error: GapStats) -> Tolerance:
    """The limits on the gap of an engine in 8 bits, from those of the dtypes and the error of some tokens."""
    # The scale of an exponential tail, from its moments (`watch/gap.py`).
    tail = error.sum_fourths / (4 * error.sum_cubes) if error.sum_cubes > 0 else 0.0
    return replace(
        limit,
        mean=limit.mean + _ROOM * error.mean_abs,
        tail=limit.tail + tail,
        k3=limit.k3 + _ROOM**2 * error.k3,
        # Errors of 8 bits flatten distributions too.
        slope=1.0,
    )


class QuantisationError:
    """Measures the quantisation error of a run.

    Args:
        model: the trained model; it is only read.
        dtype: the dtype in which the engine computes what it does not quantise.
        precision: how the trainer computes a forward.
        tensors: gives the checkpoint names of the weights that the engine holds in 8 bits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        precision: Precision,
        tensors: Callable[[], Sequence[str]],
    ) -> None:
        self.model, self._dtype, self.precision, self._tensors = model, dtype, precision, tensors
        self.canary = GapStats()
        # The gaps of the canary and of samples with whole inputs; None: the engine cannot leave them so.
        self.with_whole_inputs: GapStats | None = None
        self.sampled_with_whole_inputs: GapStats | None = None
        # The tokens of the last measurement, and of all regular ones.
        self._last: QuantisedGap | None = None
        self._of_run = QuantisedGap()
        self._version = -1
        self._spent, self._began = 0.0, time.perf_counter()

    @property
    def of_tokens(self) -> GapStats:
        """The quantisation error of sampled tokens: of the last measurement or of the run, whichever is larger.

        Before any tokens were sampled, it is that of the canary.
        """
        if self._last is None:
            return self.canary
        return max(self._last.error, self._of_run.error, key=lambda gap: gap.mean_abs)

    def measure_canary(self, sequences: Mapping[str, tuple[int, ...]]) -> None:
        """Measure the error on the canary's tokens, at temperature 1."""
        with self.in_8_bits():
            coarse = {
                name: completion_logps(self.model, ids[:1], ids[1:], Sampling(1), self.precision)
                for name, ids in sequences.items()
            }
        self.canary = canary_gap(self.model, sequences, coarse, self.precision)

    def in_8_bits(self, *, inputs_too: bool = True) -> AbstractContextManager[None]:
        """In this context, forwards of the model are in 8 bits. `inputs_too` as in `computing_in_8_bits`."""
        return computing_in_8_bits(self.model, self._tensors(), self._dtype, inputs_too=inputs_too)

    def is_due(self, version: int) -> bool:
        """Whether to measure tokens of this version: a run's first ones, then as often as 1 % of its time allows."""
        return version != self._version and self._spent <= _SHARE * (time.perf_counter() - self._began)

    def measure(
        self,
        completions: Sequence[Completion],
        version: int,
        distribution: Distribution,
        *,
        regular: bool = True,
    ) -> None:
        """Measure the error on the tokens that the current weights have sampled, of a few completions.

        Args:
            regular: whether this is one of the run's regular measurements, which `is_due` asks for.
        """
        start = time.perf_counter()
        fresh = [c for c in completions if (c.sampled_versions == version).all() and len(c.sampled_places)]
        chosen = _few(fresh, _COMPLETIONS if regular else len(fresh))
        if not chosen:
            return

        def scores() -> list[torch.Tensor]:
            with casting_once(self.model, self.precision):
                return [sampled_logps(self.model, c, distribution, self.precision).cpu() for c in chosen]

        plain = scores()
        with self.in_8_bits():
            coarse = scores()
        found = QuantisedGap()
        for c, own, in_8_bits in zip(chosen, plain, coarse, strict=True):
            finite = own.isfinite() & in_8_bits.isfinite()
            engine, name, size = (
                torch.from_numpy(c.sampled_logprobs.copy())[finite],
                [str(c.key)],
                [int(finite.sum())],
            )
            found += QuantisedGap(
                measure_gap(in_8_bits[finite], own[finite], name, size),
                measure_gap(engine, in_8_bits[finite], name, size),
            )
        self._last = found
        if regular:
            self._of_run, self._version = self._of_run + found, version
            self._spent += time.perf_counter() - start

    def figures(self) -> dict[str, float]:
        """In nats, the mean of the last measured error and of what it leaves of the gap; and the number of tokens.

        Before any tokens were sampled, they are those of the canary.
        """
        if self._last is None:
            return {"error": self.canary.mean_abs, "tokens": self.canary.tokens}
        error, rest = self._last.error, self._last.rest
        return {"error": error.mean_abs, "tokens": error.tokens, "rest": rest.mean_abs}

    def metrics(self) -> dict[str, float]:
        """The means of `figures` as metrics of a run."""
        return {f"parity/quantisation_{name}": v for name, v in self.figures().items() if name != "tokens"}


@contextmanager
def computing_in_8_bits(
    model: PreTrainedModel, tensors: Sequence[str], dtype: torch.dtype, *, inputs_too: bool = True
) -> Iterator[None]:
    """In this context, forwards of the model compute its linear layers as an engine in 8 bits does.

    The weights are only read.

    Args:
        tensors: checkpoint names of the weights in 8 bits.
        dtype: the engine's dtype. The engine quantises what it has cast to it.
        inputs_too: whether the layers quantise their inputs; otherwise they multiply them with the values of the codes.
    """
    source, layers = weights_of(model), dict[torch.nn.Module, torch.nn.Module]()
    for layer in causal_model(model).modules():
        # PEFT's layer comes before the original one, and the source's weights already contain the adapter.
        layers.setdefault(getattr(layer, "base_layer", layer), layer)
    changed: list[torch.nn.Module] = []
    try:
        with torch.no_grad():
            for name in tensors:
                owner = source.owning_module(name)
                layers[owner].forward = _linear(source, name, isinstance(owner, Conv1D), dtype, inputs_too)
                changed.append(layers[owner])
        yield
    finally:
        for layer in changed:
            # The forward of the class is in use again.
            del layer.forward


def _linear(
    source: PlainSource, name: str, transposed: bool, dtype: torch.dtype, inputs_too: bool
) -> Callable[..., torch.Tensor]:
    """A forward of the layer that owns a weight, in 8 bits. Its output has the dtype of the layer's own forward."""
    weight, beside = source.tensor(name), name.removesuffix("weight") + "bias"
    bias = source.tensor(beside).to(dtype) if beside in source.names else None
    held = quantised_rows((weight.T if transposed else weight).to(dtype))
    values = None if inputs_too else held.values().to(dtype)

    def forward(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, rows = inputs.device.type, inputs.to(dtype)
        own = autocast_dtype(device, inputs.dtype)
        with torch.autocast(device, enabled=False):
            found = quantised_linear(rows, held, bias) if values is None else linear(rows, values, bias)
            return found.to(dtype).to(own)

    return forward


def _few(completions: Sequence[Completion], most: int) -> list[Completion]:
    """The first completions, at most `most`, until they have as many tokens as one measurement scores."""
    found: list[Completion] = []
    tokens = 0
    for c in completions[:most]:
        if found and tokens >= _TOKENS:
            break
        found.append(c)
        tokens += len(c.sampled_places)
    return found


# Completions per canary sequence, and the largest number of their tokens.
_SAMPLES, _TOKENS_OF_SAMPLE = 2, 12


def score_with_whole_inputs(
    engine: Engine,
    error: QuantisationError,
    sequences: Mapping[str, tuple[int, ...]],
    limit: Tolerance,
    version: int,
) -> GapStats | None:
    """Score the canary's sequences. Returns its gap, or None if the engine cannot leave its inputs as they are.

    Args:
        error: computes the trainer's side.
        limit: the limits of the dtypes.

    Raises:
        ProofError: the gap is over a limit, or the engine keeps what it has computed in this way.
    """
    scores: Mapping[str, tuple[float, ...]] = {}
    with whole_inputs(engine, version) as are_whole:
        if are_whole:
            scores = engine.score(sequences)
    if not scores:
        return None
    with error.in_8_bits(inputs_too=False):
        gap = canary_gap(error.model, sequences, scores, error.precision)
    check_canary(gap, limit, version)
    return gap


def sample_with_whole_inputs(
    engine: Engine,
    error: QuantisationError,
    sequences: Mapping[str, tuple[int, ...]],
    distribution: Distribution,
    limit: Tolerance,
    version: int,
) -> GapStats | None:
    """The gap of completions of the canary's sequences, sampled from the run's distribution, without quantised inputs.

    None if the engine cannot leave its inputs as they are.

    Raises:
        ProofError: the gap is over a limit, or the engine keeps what it has computed in this way.
    """
    requests = _requests(sequences, distribution, engine.settings().max_model_len, version)
    answers: Mapping[RequestKey, Completion] = {}
    with whole_inputs(engine, version) as are_whole:
        if are_whole:
            answers = engine.generate(requests)
    if not answers:
        return None
    gap = GapStats()
    with error.in_8_bits(inputs_too=False):
        for key, answer in answers.items():
            own = sampled_logps(error.model, answer, distribution, error.precision).cpu()
            # An id that rounding alone puts outside the trainer's own filters.
            kept = (
                own.isfinite()
                if distribution.sampling.is_filtered
                else torch.ones(len(own), dtype=torch.bool)
            )
            behaviour = torch.from_numpy(answer.sampled_logprobs.copy())
            gap += measure_gap(behaviour[kept], own[kept], [str(key)], [int(kept.sum())])
    check_gap(
        gap,
        limit,
        version,
        "with inputs that are not quantised, the engine scores the canary as the trainer does, and reports "
        "other log-probs for "
        "tokens that it samples: another temperature, other filters, or log-probs of another token",
        "start the engine with logprobs_mode=processed_logprobs and without sampling settings of its own",
    )
    return gap


@contextmanager
def whole_inputs(engine: Engine, version: int) -> Iterator[bool]:
    """In this context the engine's layers leave their inputs as they are, if the value is true.

    Keys and values that were computed in the other way are dropped at the beginning and at the end.

    Raises:
        ProofError: the engine keeps them.
    """
    if not quantise_inputs(engine, False):
        yield False
        return
    try:
        _drop_caches(engine, version)
        yield True
    finally:
        quantise_inputs(engine, True)
    _drop_caches(engine, version)


def quantise_inputs(engine: Engine, wanted: bool) -> bool:
    """Set whether the modules in 8 bits quantise their inputs, or multiply them with the values of their codes.

    Returns False if nothing has changed: the engine runs a compiled program, or has no module in 8 bits.
    """
    answers = engine.ask_workers("quantise_inputs", lambda server: [wanted])
    return bool(answers) and all(found for workers in answers.values() for found in workers)


def _drop_caches(engine: Engine, version: int) -> None:
    if not engine.reset_caches():
        raise ProofError(
            "caches",
            f"the engine did not confirm the reset of its caches at a proof of version {version}",
            "requests are still running in the engine, so keys and values that were computed with inputs in "
            "8 bits, or without, stay in use",
            "finish or abort every request before proving an engine",
        )


def _requests(
    sequences: Mapping[str, tuple[int, ...]], distribution: Distribution, context: int, version: int
) -> list[GenerationRequest]:
    wanted = distribution.sampling
    tokens = min(wanted.max_tokens, _TOKENS_OF_SAMPLE, context - 1)
    sampling = replace(wanted, max_tokens=tokens, min_tokens=min(wanted.min_tokens, tokens))
    keys = [
        (RequestKey(f"canary/{name}", i), ids[: context - tokens])
        for name, ids in sequences.items()
        for i in range(_SAMPLES)
    ]
    return [
        GenerationRequest(key, whole_numbers(ids), sampling, request_seed(0, version, key))
        for key, ids in keys
    ]
