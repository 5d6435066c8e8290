"""What the proofs keep of a step's tokens: sums over packs and ranks, and whole rows of logits at drawn tokens.

The tokens are those of an optimizer step, or of a forward without gradient. The hidden states of drawn tokens are kept
at each forward. When all packs of the micro-batch are through, the output head computes their logits once.
`watch/settings.py` compares the log-probs of the loss with what the user has asked for, and `watch/kept_sets.py` the
engine's kept ids with the filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.definitions.sampling import UserSettings, logprob
from lockstep.devices import on_host, sent
from lockstep.learn.events import Evidence
from lockstep.learn.id_classes import ClassValues
from lockstep.learn.methods.objective import Tally
from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence, column, flat
from lockstep.learn.update import Policy, Reals64, as_float64
from lockstep.models.adapters import causal_model
from lockstep.models.arithmetic import Precision, transformed_logits
from lockstep.models.policy import fp32_head_product
from lockstep.shards.model import sharded
from lockstep.tokens.arrays import SmallIds, cut
from lockstep.watch.draws import DrawStats, TokenDraws, measure_draws
from lockstep.watch.gap import GapSlope, GapStats, Logps, measure_gap, measure_slope
from lockstep.watch.gap_explained import split_gap
from lockstep.watch.kept_sets import KeptSetProof, KeptSetStats, KeptToken
from lockstep.watch.plain_forward import LOGITS_BYTES
from lockstep.watch.settings import SettingsProof
from lockstep.watch.tolerances import Tolerance

# So many tokens are drawn from each pack, and as many are compared per micro-batch, about the same number of each
# pack; more where kept ids are compared, because a mean over few sets shows little.
_DRAWN, _DRAWN_SETS = 8, 64
# A token so far into its completion is not compared with the filters, because all ids before it would be read.
LONGEST = 4096


@dataclass(frozen=True)
class _Row:
    """A drawn token: its completion, its index among the sampled tokens, and whether its kept ids are compared."""

    sequence: TrainingSequence
    place: int
    proves_set: bool

    @cached_property
    def end(self) -> int:
        """Number of ids of the completion before the token."""
        return int(self.sequence.predictors[self.place]) + 1 - len(self.sequence.prompt_ids)

    @cached_property
    def kept(self) -> SmallIds | None:
        """The ids that the engine kept; None: there were no filters."""
        sets = self.sequence.kept_ids
        return None if sets is None else sets.part(self.place, self.place + 1).ids


class DrawnRows:
    """The drawn tokens of a micro-batch. No `settings`: log-probs are not compared; no `kept_sets`: nor kept ids."""

    def __init__(
        self, settings: SettingsProof | None, kept_sets: KeptSetProof | None, precision: Precision
    ) -> None:
        self._settings, self._kept_sets, self._precision = settings, kept_sets, precision
        self._rows: list[_Row] = []
        self._hidden: list[torch.Tensor] = []
        # The log-probs of the rows, as the loss uses them.
        self._logps: list[torch.Tensor] = []

    def add(self, pack: Pack, logps: torch.Tensor, hidden: torch.Tensor, *, before_steps: bool) -> None:
        """Draw tokens of a pack after its forward.

        Args:
            logps: (N,) log-probs of the pack's tokens, as the loss uses them.
            hidden: (rows, length, width) last hidden states of the forward.
            before_steps: whether the policy has not changed since the tokens were sampled, except those that are not
                `fresh`. Only then kept ids are compared.
        """
        # Any seed is right that does not depend on the values.
        count = _DRAWN if self._kept_sets is None else _DRAWN_SETS
        tokens = np.sort(np.random.default_rng(len(logps)).permutation(len(logps))[:count])
        here = sent(torch.from_numpy(tokens), logps.device)
        ends = np.cumsum([s.length for s in pack.sequences])
        for token, owner in zip(tokens, np.searchsorted(ends, tokens, side="right"), strict=True):
            sequence = pack.sequences[owner]
            place = int(token - (ends[owner] - sequence.length))
            fresh = sequence.fresh is None or bool(sequence.fresh[place])
            self._rows.append(_Row(sequence, place, before_steps and fresh))
        self._logps.append(logps.detach()[here])
        self._hidden.append(hidden.flatten(0, 1)[pack.predictors[here]])

    def check(self, policy: Policy) -> KeptSetStats:
        """Check the drawn tokens with a policy whose weights are still those of their forwards, and forget them."""
        if not self._rows:
            return KeptSetStats()
        shards, model, precision = sharded(policy.model), policy.model, self._precision
        fp32_head = precision.head is not None
        single = fp32_head or (precision.autocast is None and model.dtype == torch.float32)
        with nullcontext() if shards is None else shards.whole_head():
            found = self.check_with(model, fp32_head=fp32_head, single=single)
        self._rows, self._hidden, self._logps = [], [], []
        return found

    @torch.no_grad()
    def check_with(self, model: PreTrainedModel, *, fp32_head: bool, single: bool) -> KeptSetStats:
        """Check the drawn tokens, when all packs of the micro-batch are through.

        The output head computes in the dtype of its weight: a cast of the whole weight would cost more.

        Args:
            fp32_head: whether the output head computes in float32 instead.
            single: whether the head of the forward computes in float32, for whatever reason.
        """
        if not self._rows:
            return KeptSetStats()
        inner, (rows, logps, hidden) = causal_model(model), self._chosen()
        head, config = inner.get_output_embeddings(), inner.config.get_text_config()
        dtype = head.weight.dtype
        due, found, start = [], KeptSetStats(), 0
        for part in hidden.split(max(1, LOGITS_BYTES // (4 * head.weight.shape[0]))):
            product = fp32_head_product(head, part) if fp32_head else _product(head, part.to(dtype))
            logits = transformed_logits(config, product).float().cpu()
            own, start = rows[start : start + len(part)], start + len(part)
            if self._kept_sets is not None:
                found += self._kept_sets.check(_kept_tokens(own, logits, self._kept_sets))
            if self._settings is not None:
                logits[:, list(self._settings.banned)] = -torch.inf
                wanted = self._settings.wanted
                of_rows = zip(logits.numpy(), own, logps[start - len(part) : start], strict=True)
                defined = [one for one in of_rows if _is_defined(wanted, one[1])]
                due += [(x, _logprob(wanted, values, row)) for values, row, x in defined]
        if self._settings is not None:
            self._settings.check_logps(*np.array(due).reshape(-1, 2).T, single=single)
        return found

    def _chosen(self) -> tuple[list[_Row], list[float], torch.Tensor]:
        """The rows that are checked, their log-probs and hidden states: about the same number from each pack."""
        rows, hidden = self._rows, torch.cat(self._hidden)
        logps: list[float] = torch.cat(self._logps).tolist()
        most = max(_DRAWN if self._kept_sets is None else _DRAWN_SETS, len(self._hidden))
        if len(rows) > most:
            # The rows of a pack follow each other.
            chosen = np.linspace(0, len(rows) - 1, most).round().astype(int)
            rows, logps = [rows[i] for i in chosen], [logps[i] for i in chosen]
            hidden = hidden[sent(torch.from_numpy(chosen), hidden.device)]
        return rows, logps, hidden


def _product(head: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """(n, V) result of an output head for a few rows."""
    if type(head) is not torch.nn.Linear or rows.device.type != "cpu":
        return head(rows)
    # On a CPU this order is twice as fast, for 8 rows of 576 numbers and 49,152 tokens in float32.
    found = (head.weight @ rows.T).T
    return found if head.bias is None else found + head.bias


def _kept_tokens(rows: Sequence[_Row], logits: torch.Tensor, proof: KeptSetProof) -> Iterator[KeptToken]:
    """The tokens that have sets, of n rows with their (n, V) logits."""
    for row, own in zip(rows, logits, strict=True):
        if row.kept is None or row.end + len(row.sequence.prompt_ids) >= LONGEST:
            continue
        ids = row.sequence.completion_ids[: row.end + 1].tolist()
        yield KeptToken(
            request=row.sequence.name,
            place=row.place,
            logits=own,
            prompt_ids=row.sequence.prompt_ids.tolist(),
            output_ids=ids[:-1],
            masks=proof.distribution.masks(ids),
            kept=row.kept,
            is_current=row.proves_set,
        )


def _is_defined(wanted: UserSettings, row: _Row) -> bool:
    """Whether `_logprob` knows a token's distribution. Without kept ids, only the trainer knows what is banned."""
    bans = wanted.bad_words or wanted.numbers["min_tokens"] or wanted.grammar is not None
    return row.kept is not None or not bans


def _logprob(wanted: UserSettings, logits: np.ndarray, row: _Row) -> float:
    """The log-prob of a drawn token."""
    sequence, end = row.sequence, row.end
    earlier = sequence.completion_ids[:end]
    marks = np.ones(end, np.bool_) if sequence.sampled is None else sequence.sampled[:end]
    return logprob(
        logits,
        int(sequence.sampled_ids[row.place]),
        wanted.temperature,
        kept=None if row.kept is None else row.kept.tolist(),
        allowed=wanted.allowed_token_ids,
        bias=wanted.logit_bias,
        repetition=wanted.numbers["repetition_penalty"],
        presence=wanted.numbers["presence_penalty"],
        frequency=wanted.numbers["frequency_penalty"],
        # Inserted ids are context, as a prompt is.
        prompt=[*sequence.prompt_ids.tolist(), *earlier[~marks].tolist()],
        before=earlier[marks].tolist(),
    )


@dataclass(slots=True)
class TokenEvidence:
    """What the proofs keep of a step's tokens: sums over packs and ranks.

    Attributes:
        kept_rows: collects drawn tokens of a micro-batch; None: nothing is compared with their rows of logits.
        gap: between the engine and the policy that it held, over tokens that were sampled by these same weights.
        difference: the same over all tokens.
        repeated: from the log-probs before the generation's first step to those of this step, where both exist.
        draws: over the tokens of the drawn rollouts.
        kept_sets: at drawn tokens.
        slope: of the signed gap, over the tokens of `gap`.
    """

    kept_rows: DrawnRows | None = None
    gap: GapStats = field(default_factory=GapStats)
    difference: GapStats = field(default_factory=GapStats)
    repeated: GapStats = field(default_factory=GapStats)
    draws: DrawStats = field(default_factory=DrawStats)
    kept_sets: KeptSetStats = field(default_factory=KeptSetStats)
    slope: GapSlope = field(default_factory=GapSlope)

    def rows(self, pack: Pack, logps: Any, hidden: Any, *, before_steps: bool) -> None:
        """Keep drawn rows of a pack (`Evidence.rows`)."""
        if self.kept_rows is not None:
            self.kept_rows.add(pack, logps, hidden, before_steps=before_steps)

    def rows_compared(self, policy: Policy) -> None:
        """Compare the rows that were kept (`Evidence.rows_compared`)."""
        if self.kept_rows is not None:
            self.kept_sets = self.kept_sets + self.kept_rows.check(policy)

    @torch.no_grad()
    def tokens(
        self,
        sequences: Sequence[TrainingSequence],
        behaviour: Logps,
        before: Logps,
        now: Logps | None = None,
        scores: Sequence[tuple[Sequence[TrainingSequence], TokenScores]] = (),
    ) -> None:
        """Add tokens (`Evidence.tokens`)."""
        if now is not None:
            names, lengths = [s.name for s in sequences], [s.length for s in sequences]
            self.repeated = self.repeated + measure_gap(before, now, names, lengths)
        gap, difference = gap_of(sequences, behaviour, before)
        self.gap, self.difference = self.gap + gap, self.difference + difference
        for (own, _), found in zip(scores, host_scores([one for _, one in scores]), strict=True):
            self.draws = self.draws + draws_of(own, found)
            if now is None:
                self.slope = self.slope + slope_of(own, found)

    def data(self) -> dict[str, Any]:
        """The sums, as JSON types."""
        return {name: asdict(getattr(self, name)) for name in _SUMS}

    def add(self, data: Mapping[str, Any]) -> None:
        """Add the `data` of another rank."""
        for name, kind in _SUMS.items():
            setattr(self, name, getattr(self, name) + kind(**data[name]))

    def figures(self, tally: Tally, aside: int, limit: Tolerance) -> dict[str, float]:
        """The figures to log of an optimizer step: the gap with its parts, and the difference under TRL's names.

        `tally` has how far the policy has moved since it sampled; `aside` counts the tokens that were left aside.
        """
        gap, difference, kept = self.gap, self.difference, self.kept_sets
        older = (difference.sum_abs - gap.sum_abs) / max(difference.tokens, 1)
        drift = tally.total("_drift") / max(tally.count("_drift"), 1)
        # Computed from the fresh tokens alone, so that a defect in a few of them is not diluted by older tokens.
        parts = split_gap(gap.mean_abs, older + drift, limit)
        return {
            "sampling/sampling_logp_difference/mean": difference.mean_abs,
            "sampling/sampling_logp_difference/max": difference.max_abs,
            "parity/mean_abs_gap": gap.mean_abs,
            "parity/max_abs_gap": gap.max_abs,
            "parity/k3": gap.k3,
            "parity/checked_tokens": gap.tokens,
            "parity/aside_tokens": aside,
            "sampling/tokens": difference.tokens + aside,
            **({"sampling/kept_mass": kept.mass / kept.measured} if kept.measured else {}),
            **parts.metrics(),
        }


_SUMS: dict[str, Any] = {
    "gap": GapStats,
    "difference": GapStats,
    "repeated": GapStats,
    "draws": DrawStats,
    "kept_sets": KeptSetStats,
    "slope": GapSlope,
}


def kept(evidence: Evidence) -> TokenEvidence:
    """The sums that this watch has made."""
    assert isinstance(evidence, TokenEvidence)
    return evidence


def gap_of(
    sequences: Sequence[TrainingSequence], behaviour: Logps, policy: Logps
) -> tuple[GapStats, GapStats]:
    """The parity gap, over tokens that these same weights sampled, and the difference over all tokens.

    `policy` has (N,) log-probs under the weights that the engine held in its last call.
    """
    names, lengths = [s.name for s in sequences], [s.length for s in sequences]
    every = measure_gap(behaviour, policy, names, lengths)
    if sequences[0].fresh is None:
        return every, every
    behaviour, policy = as_float64(behaviour, policy)
    fresh = flat(sequences, "fresh")
    counts = [int(np.count_nonzero(part)) for part in cut(fresh, lengths)]
    return measure_gap(behaviour[fresh], policy[fresh], names, counts), every


@dataclass(frozen=True, slots=True)
class HostScores:
    """The scores of a pack's N tokens, on the host.

    Attributes:
        logps, entropies: (N,) float64.
        draws: (3, N) float64 sums of the draws proof, in the order of `TokenDraws`; None: there are none.
        classes: the classes of ids of the tokens with such sums; None: nobody bets on them.
    """

    logps: Reals64
    entropies: Reals64
    draws: Reals64 | None
    classes: ClassValues | None


def host_scores(scores: Sequence[TokenScores]) -> list[HostScores]:
    """The scores of several packs, which are copied together."""
    columns: list[torch.Tensor] = []
    for one in scores:
        columns += [one.logps, one.entropies]
        if (sums := one.draws) is not None:
            columns += [sums.variances, sums.below, sums.upto]
            columns += [] if sums.classes is None else [sums.classes.masses]
    hosts = iter(on_host(columns))

    def column() -> Reals64:
        return next(hosts).double().numpy()

    return [
        HostScores(
            column(),
            column(),
            None if one.draws is None else np.stack([column() for _ in range(3)]),
            None if one.draws is None or one.draws.classes is None else one.draws.classes.values(next(hosts)),
        )
        for one in scores
    ]


def slope_of(sequences: Sequence[TrainingSequence], scores: HostScores) -> GapSlope:
    """The slope of the signed gap, over tokens that the weights of this forward have sampled."""
    behaviour = np.asarray(column(sequences, "behaviour_logps"), np.float64)
    fresh = np.ones(len(behaviour), np.bool_) if sequences[0].fresh is None else flat(sequences, "fresh")
    counts = [int(np.count_nonzero(part)) for part in cut(fresh, [s.length for s in sequences])]
    prompts = [s.name.rpartition("#")[0] for s in sequences]
    gap, surprise = behaviour - scores.logps, scores.logps + scores.entropies
    return measure_slope(gap[fresh], surprise[fresh], prompts, counts)


def draws_of(sequences: Sequence[TrainingSequence], scores: HostScores) -> DrawStats:
    """Statistics of the draws proof over the drawn rollouts; none if the forward gave no sums for it.

    Which tokens are bet on must not depend on the tokens. A rollout learns because of its reward, so those that are
    not drawn are left out, even if they went through the model.
    """
    if scores.draws is None:
        return DrawStats()
    values = np.stack([scores.logps, scores.entropies, *scores.draws])
    drawn = [s for s in sequences if s.picked]
    if len(drawn) < len(sequences):
        values = values[:, np.repeat([s.picked for s in sequences], [s.length for s in sequences])]
    fresh = None if sequences[0].fresh is None else flat(drawn, "fresh")
    lengths = [s.length for s in drawn]
    found = replace(TokenDraws(*values), classes=scores.classes)
    return measure_draws(found, column(drawn, "behaviour_logps"), lengths, fresh)
