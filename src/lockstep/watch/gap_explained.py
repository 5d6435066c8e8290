"""The error of a parity gap that is over a limit: where the gap comes from, and which server's answers have it.

The error ends the run. The trainer scores a few completions again in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, Engine, ProbedEngine
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import InputError, ProofError
from lockstep.learn.experts import chosen_experts, experts_per_token, has_routers
from lockstep.models.adapters import causal_model
from lockstep.models.arithmetic import Precision
from lockstep.watch.gap import GapStats, gap_error, measure_gap, over_limits
from lockstep.watch.held_weights import HeldRecord, HeldWeights, cause_of
from lockstep.watch.modules import ModuleProbe, ProbeRecord
from lockstep.watch.plain_forward import in_precision, sampled_logps
from lockstep.watch.tolerances import Tolerance

# How many completions, and tokens, a failed gap is explained with.
_EXPLAINED = 3
_EXPLAINED_TOKENS = 2048


class ExplainedGap:
    """Explains a gap that is over a limit. `stale_by_design`: tokens may be older than the trainer's weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        distribution: Distribution,
        precision: Precision,
        probes: Callable[[], tuple[ModuleProbe, HeldWeights]],
        *,
        stale_by_design: bool,
    ) -> None:
        self._model, self._engine, self._probes = model, engine, probes
        self._distribution, self._precision = distribution, precision
        self._stale_by_design = stale_by_design

    def error(
        self, gap: GapStats, limit: Tolerance, completions: Sequence[Completion], version: int
    ) -> ProofError:
        """The error of a gap that is over a limit. The worst completion is scored again, and up to two others."""
        chosen = _short_enough(sorted(completions, key=lambda c: str(c.key) != gap.worst)[:_EXPLAINED])
        try:
            found = decompose(
                self._model,
                self._engine,
                chosen,
                self._distribution,
                self._precision,
                self._probes(),
                version,
                limit,
                stale_by_design=self._stale_by_design,
                packed=gap,
            )
        except (RuntimeError, MemoryError) as error:
            # Most often out of memory. The gap must be reported even where it cannot be explained.
            why = f"its parts could not be computed ({type(error).__name__}: {str(error)[:200]})"
            return gap_error(
                gap, limit, version, why, "not known", "run 'lockstep verify' on this model and engine"
            )
        cause = found.cause + self._servers_at_fault(completions, limit, version)
        return gap_error(gap, limit, version, str(found.parts), cause, found.fix)

    def _servers_at_fault(self, completions: Sequence[Completion], limit: Tolerance, version: int) -> str:
        """The servers whose answers have a gap, to end a sentence; empty if all have one, or there is one server."""
        if not isinstance(self._engine, VLLMServer):
            return ""
        by_server: dict[str, list[Completion]] = {}
        for c in completions:
            if (c.sampled_versions == version).all():
                by_server.setdefault(self._engine.server_of(c.key), []).append(c)
        wrong = [url for url, answers in by_server.items() if over_limits(self._plain_gap(answers), limit)]
        if not wrong or len(wrong) == len(by_server):
            return ""
        return f"; only the answers of {', '.join(wrong)} differ, those of the other servers agree"

    def _plain_gap(self, completions: Sequence[Completion]) -> GapStats:
        """The gap of a few completions, by the plain forward."""
        found = GapStats()
        for c in _short_enough(completions[:_EXPLAINED]):
            own = sampled_logps(self._model, c, self._distribution, self._precision)
            found += measure_gap(torch.from_numpy(c.sampled_logprobs.copy()), own, [str(c.key)], [len(own)])
        return found


def _short_enough(completions: Sequence[Completion]) -> list[Completion]:
    """The first completion, and as many more as stay within the token limit."""
    kept: list[Completion] = []
    tokens = 0
    for c in completions:
        tokens += len(c.prompt_ids) + len(c.token_ids)
        if kept and tokens > _EXPLAINED_TOKENS:
            break
        kept.append(c)
    return kept


# An explanation counts only if it leaves less than this share of the gap.
_EXPLAINS = 0.5
# The cause and the fix if only the packed forward differs.
_PACKED = (
    "the trainer's own packed forward: one sequence at a time, by the plain forward, the trainer agrees with the "
    "engine. The pack holds other tokens or another context than were sampled, or its attention or positions are wrong",
    "this is a defect of Lockstep or of the model's attention in packs: report it with this message and the "
    "model's config; another attn_implementation may work until then",
)

# What is added where each token alone is within the limit of half precision.
_ROUNDED = (
    "; or rounding: no single token is over its limit, and the plain forward may round as the engine did by chance",
    "; set bf16=false to see whether it is rounding: the gap is then gone",
)

# What is added to the cause and the fix where the routers of a mixture of experts may be the cause too.
_ROUTED = (
    "; or routing: rounding to half precision alone sends {:.1%} of these tokens, counted per layer, to "
    "other experts in the trainer's own forward, and the engine rounds otherwise",
    "; set bf16=false to see whether it is routing: the gap is then gone",
)


@dataclass(frozen=True, slots=True)
class GapParts:
    """The parts of a mean |g|, in nats. They add up to `total`.

    Attributes:
        semantics: vanishes if the trainer scores another distribution (raw instead of processed, or without a filter).
        numerics: vanishes if the trainer computes in another dtype, or lies within the dtypes' limit on the mean.
        staleness: of tokens that were sampled at another version.
        defect: nothing explains it.
    """

    total: float
    semantics: float
    numerics: float
    staleness: float
    defect: float

    def metrics(self) -> dict[str, float]:
        """The parts as columns of the metrics."""
        names = ("semantics", "numerics", "staleness", "defect")
        return {f"parity/gap_{name}": getattr(self, name) for name in names}

    def __str__(self) -> str:
        return (
            f"mean |g| {self.total:.3g} = semantics {self.semantics:.3g} + numerics {self.numerics:.3g} "
            f"+ staleness {self.staleness:.3g} + defect {self.defect:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Decomposition:
    """An explained gap: its parts, the layers that the full probes found, the likely cause, and what to do."""

    parts: GapParts
    layers: tuple[str, ...]
    cause: str
    fix: str


def split_gap(
    fresh: float,
    stale: float,
    limit: Tolerance,
    *,
    raw: float | None = None,
    other_dtype: float | None = None,
) -> GapParts:
    """Split a mean gap, over `fresh` tokens of the current version and `stale` ones of others, into its parts.

    Args:
        raw: mean gap of the fresh tokens against the raw distribution; None if it equals the sampled one.
        other_dtype: smallest mean gap of the fresh tokens if the trainer computes in another dtype.
    """
    semantics = fresh - raw if raw is not None and raw < _EXPLAINS * fresh else 0.0
    rest = fresh - semantics
    numerics = min(rest, limit.mean)
    if other_dtype is not None and other_dtype < _EXPLAINS * rest:
        numerics = max(numerics, rest - other_dtype)
    return GapParts(fresh + stale, semantics, numerics, stale, rest - numerics)


def check_gap(gap: GapStats, limit: Tolerance, version: int, cause: str, fix: str) -> None:
    """Check a gap whose cause is known beforehand, because its tokens prove one thing only."""
    if over_limits(gap, limit):
        raise gap_error(gap, limit, version, str(split_gap(gap.mean_abs, 0.0, limit)), cause, fix)


def decompose(
    model: PreTrainedModel,
    engine: ProbedEngine,
    completions: Sequence[Completion],
    distribution: Distribution,
    precision: Precision,
    probes: tuple[ModuleProbe, HeldWeights],
    version: int,
    limit: Tolerance,
    *,
    stale_by_design: bool = False,
    packed: GapStats | None = None,
) -> Decomposition:
    """Explain the gap of a few completions. A handful is enough: each way of scoring is one forward per completion.

    Args:
        distribution, precision: those with which the trainer computed the gap.
        version: the current weight version, which the engine still holds.
        stale_by_design: whether tokens of older weights are expected; then only the gap of the other tokens is
            explained.
        packed: the gap that failed, from the trainer's packed forward. Here the plain forward scores one sequence at a
            time. If the worst request has no such gap there, the packed forward is the cause.
    """
    behaviour = torch.from_numpy(np.concatenate([c.sampled_logprobs for c in completions]))
    fresh = torch.from_numpy(np.concatenate([c.sampled_versions == version for c in completions]))

    def mean_gap(other: torch.Tensor, among: torch.Tensor) -> float:
        gap = (behaviour - other).abs()
        return float(gap[among].sum()) / max(int(fresh.sum()) if stale_by_design else len(gap), 1)

    def scores(how: Precision) -> torch.Tensor:
        return torch.cat([sampled_logps(model, c, distribution, how) for c in completions])

    def other_scores(other: Distribution) -> torch.Tensor:
        # The kept ids are those of the filters, so that other filters mean other ids.
        same = _filters(other) == _filters(distribution)
        return torch.cat([sampled_logps(model, c, other, precision, kept=same) for c in completions])

    own = scores(precision)
    if packed is not None and _only_packed(packed, completions, behaviour - own, fresh):
        parts = split_gap(mean_gap(own, fresh), 0.0 if stale_by_design else mean_gap(own, ~fresh), limit)
        cause, fix = _PACKED
        if limit.is_coarse and packed.max_abs <= limit.largest(packed.tokens):
            cause, fix = cause + _ROUNDED[0], fix + _ROUNDED[1]
        return Decomposition(parts, (), cause, fix)
    others = {name: mean_gap(other_scores(other), fresh) for name, other in distribution.others().items()}
    likeliest = min(others, key=lambda name: others[name], default="")
    raw = others.get(likeliest)
    probed, held = probes[0].measure(version, every=True), probes[1].compare(version, every=True)
    layers = tuple(probed.failed) or held.differing
    gap, stale = mean_gap(own, fresh), 0.0 if stale_by_design else mean_gap(own, ~fresh)
    explained = raw is not None and raw < _EXPLAINS * gap
    again = None if layers or explained else _answers_again(model, engine, completions, precision)
    agrees = again is not None and again <= limit.mean and again < _EXPLAINS * gap
    # Another dtype can be the cause only if no layer differs, or in fp32 only the output head. And the engine would
    # compute in it again. In half precision the numbers of a head are the same in any dtype.
    weights = len(layers) > (0 if limit.is_coarse else 1)
    dtypes = {} if explained or weights or agrees else _other_precisions(precision)
    gaps = {name: mean_gap(scores(how), fresh) for name, how in dtypes.items()}
    nearest = min(gaps, key=lambda name: gaps[name], default="")
    parts = split_gap(gap, stale, limit, raw=raw, other_dtype=gaps.get(nearest))
    shown = any(c.pictures for c in completions)
    cause, fix = _reading(parts, nearest, likeliest, (probed, held), again, limit, pictures=shown)
    if not layers and not explained and parts.staleness <= max(parts.numerics, parts.defect):
        routed = routing_differences(model, completions, precision)
        cause, fix = (cause + _ROUTED[0].format(routed), fix + _ROUTED[1]) if routed else (cause, fix)
    return Decomposition(parts, layers, cause, fix)


def _only_packed(
    packed: GapStats, completions: Sequence[Completion], gaps: torch.Tensor, fresh: torch.Tensor
) -> bool:
    """Whether the worst request is here, and the plain forward leaves less than half of its packed gap."""
    sizes = [len(c.sampled_places) for c in completions]
    for c, own, among in zip(completions, gaps.abs().split(sizes), fresh.split(sizes), strict=True):
        if str(c.key) == packed.worst and bool(among.any()):
            return float(own[among].max()) < _EXPLAINS * packed.max_abs
    return False


def _other_precisions(precision: Precision) -> dict[str, Precision]:
    """Precisions that differ from `precision` in one respect, named by what each would mean for the engine."""
    half, single = torch.bfloat16, torch.float32
    others = {
        "everything in bfloat16": Precision(autocast=half),
        "everything in the weights' dtype": Precision(),
        "its output head in bfloat16": Precision(precision.autocast, half),
        "its output head in float32": Precision(precision.autocast, single),
    }
    return {name: how for name, how in others.items() if how != precision}


def _answers_again(
    model: PreTrainedModel, engine: ProbedEngine, completions: Sequence[Completion], precision: Precision
) -> float | None:
    """Mean gap if the engine scores the same tokens again at temperature 1.

    None: there is no room for another token, or there are pictures, which `Engine.score` does not take.
    """
    if any(c.pictures for c in completions):
        return None
    try:
        paths = {str(c.key): (*c.prompt_ids.tolist(), *c.token_ids.tolist()) for c in completions}
        found = engine.score(paths)
    except InputError:
        return None
    gaps = []
    for c in completions:
        own = sampled_logps(model, c, Distribution(Sampling(max_tokens=1)), precision, kept=False)
        behind = found[str(c.key)][-len(c.token_ids) :]
        gaps.append((torch.tensor(behind)[torch.tensor(c.sampled_places)] - own).abs())
    return float(torch.cat(gaps).mean())


def _filters(distribution: Distribution) -> tuple[int, float, float]:
    sampling = distribution.sampling
    return sampling.top_k, sampling.top_p, sampling.min_p


def _reading(
    parts: GapParts,
    nearest: str,
    other: str,
    found: tuple[ProbeRecord, HeldRecord],
    again: float | None,
    limit: Tolerance,
    *,
    pictures: bool = False,
) -> tuple[str, str]:
    """The cause and the fix for the largest part."""
    if parts.numerics > limit.mean:
        return (
            f"trainer and engine compute in different dtypes: the engine seems to compute {nearest}",
            "set engine_dtype and bf16 so that both sides agree, and leave dtypes of single layers alone",
        )
    if parts.semantics > max(parts.staleness, parts.defect):
        return (
            f"the engine's log-probs are those of {other}, but the run asks for another one",
            "start the engine with logprobs_mode=processed_logprobs and without sampling settings of its own",
        )
    probed, held = found
    again_pushed = (
        "push the weights again; if it happens again, report the model, this layer and the engine's version"
    )
    if probed.failed and held.older is None:
        where = f" at {', '.join(probed.servers)}" if probed.servers else ""
        return (
            f"the engine{where} computes with other weights than the trainer in {len(probed.failed)} places, "
            f"{probed.failed[0]} worst",
            again_pushed,
        )
    if held.differing:
        return cause_of(held), again_pushed
    if parts.staleness > parts.defect:
        return (
            "tokens were sampled by older weights than the policy's",
            "push the weights before every generation, or score old tokens with the weights that sampled them",
        )
    if again is not None and again <= limit.mean:
        return (
            "the engine's weights are right, and asked again it agrees with the trainer: the answers were "
            "computed from caches of older weights, or belong to other requests or settings",
            "reset the engine's caches at every push, and look up answers by request; report this if Lockstep did both",
        )
    return (
        "weights agree layer by layer but whole sequences do not: positions, attention mask, a part that no "
        "probe reaches, "
        f"{'pictures that one side did not see or kept from older weights, ' if pictures else ''}or the "
        f"trainer's own forward",
        "run 'lockstep verify' on this model; attention implementation and context extension (rope) are the "
        "usual suspects",
    )


def routing_differences(
    model: PreTrainedModel, completions: Sequence[Completion], precision: Precision
) -> float | None:
    """The share of (position, layer) pairs that autocast routes to other experts.

    None if the model has no routers, if both forwards compute in the same dtype, or if there are pictures.
    """
    inner = causal_model(model)
    same = precision.dtype_of(model) == inner.dtype
    if same or not has_routers(inner) or any(c.pictures for c in completions):
        return None
    differing = pairs = 0
    for c in completions:
        ids = np.concatenate([c.prompt_ids, c.token_ids])[:-1]
        one, other = (experts_of(inner, ids.tolist(), how) for how in (precision, Precision()))
        differing += int((one != other).any(-1).sum())
        pairs += one.shape[0] * one.shape[1]
    return differing / max(pairs, 1)


@torch.no_grad()
def experts_of(model: PreTrainedModel, ids: Sequence[int], precision: Precision) -> torch.Tensor:
    """(L, T, K) ids of the experts to which the plain forward of one sequence routes its T positions."""
    row, was_training = torch.tensor([list(ids)], device=model.device), model.training
    model.eval()
    try:
        with in_precision(model, precision):
            outputs = model.base_model(input_ids=row, use_cache=False, output_router_logits=True)
    finally:
        model.train(was_training)
    return chosen_experts(outputs.router_logits, experts_per_token(model))
