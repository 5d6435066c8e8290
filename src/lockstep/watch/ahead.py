"""Proofs of tokens that are older than the weights that learn from them (`max_staleness`).

The weights that sampled most of these tokens are gone at their own step. So a minimum of tokens of every generation is
compared at two other times: when they are used, with the canary, and before the weights that sampled them change.

Proof `staleness`.
Shows: no token is more than `max_staleness` versions older than the policy.
When: every generation.

Proof asked again (`gap`).
Shows: the engine, asked again with the current weights and without its caches, gives drawn completions of the
generation the log-probs of the trainer's plain forward.
Does not show: that the log-probs reported at sampling were right (the completions compared ahead show this).
When: with `max_staleness`, every generation: 256 tokens, or all.

Proof compared ahead (`gap`).
Shows: drawn completions of later generations have the log-probs that the engine reported, under the weights that have
sampled them.
Does not show: a wrong token that is not drawn; with a server, completions that end between the last comparison and
the next push.
When: with `max_staleness`, before every change of the policy: 256 tokens per generation, or all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, Engine
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import ProofError
from lockstep.models.arithmetic import Precision
from lockstep.threads import Pending
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.chat import embedding_rows
from lockstep.watch.gap import GapStats, PooledGap, measure_gap
from lockstep.watch.gap_explained import check_gap
from lockstep.watch.plain_forward import completion_logps, sampled_logps
from lockstep.watch.push import canary_gap, canary_sequences, check_canary
from lockstep.watch.tolerances import Tolerance

Sequences = dict[str, tuple[int, ...]]
# So many sampled tokens of a generation are compared, if it has as many: a mean over them is steady.
LEAST = PooledGap.enough


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the engine was asked to score, by the names of sequences, and its pending answer."""

    canary: Sequences
    completions: dict[str, Completion]
    answer: Pending[Any, dict[str, tuple[float, ...]]]


@dataclass(slots=True)
class ProofsAhead:
    """The proofs of one run. `distribution` is what every request asks for; `seed` draws the completions."""

    model: PreTrainedModel
    engine: Engine
    distribution: Distribution
    precision: Precision
    seed: int
    _asked: _Asked | None = field(default=None, init=False)
    _found: dict[str, GapStats] = field(default_factory=dict, init=False)
    _limits: dict[str, Tolerance] = field(default_factory=dict, init=False)
    # With few tokens per generation, only the largest gap is checked at once.
    pools: dict[str, PooledGap] = field(default_factory=dict, init=False)
    # Tokens of each later generation that were compared so far.
    _compared: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.forget_tokens()

    @property
    def is_due(self) -> bool:
        """Whether the engine was asked and its answer was not checked yet."""
        return self._asked is not None

    def forget(self) -> None:
        """Forget what the engine was asked, because it was lost."""
        self._asked = None

    def forget_tokens(self) -> None:
        """Forget the tokens that were compared so far."""
        self.pools = {name: PooledGap() for name in ("asked_again", "sampled_ahead")}
        self._compared.clear()

    def ask(self, completions: Sequence[Completion], version: int, limit: float) -> None:
        """Ask the engine to score the canary and drawn completions; the answer may take `limit` seconds."""
        context = self.engine.settings().max_model_len
        canary = canary_sequences(embedding_rows(self.model), context)
        chosen = _chosen(completions, LEAST, (self.seed, version))
        asked = {f"again/{c.key}": c for c in chosen if _fits(c, context)}
        sequences = canary | {name: tuple(_path(c, context).tolist()) for name, c in asked.items()}
        if isinstance(self.engine, VLLMServer):
            answer = self.engine.submit_scores(sequences, limit=limit)
        else:
            done: Future[dict[str, tuple[float, ...]]] = Future()
            done.set_result(self.engine.score(sequences))
            answer = Pending(done, lambda scores: scores)
        self._asked = _Asked(canary, asked, answer)

    def check_answer(self, version: int, limit: Tolerance) -> None:
        """Wait for the engine's answer and compare it with plain forwards. Raises `EngineLost` too."""
        assert self._asked is not None
        scores = self._asked.answer.result()
        asked, self._asked = self._asked, None
        self._found["canary"] = canary_gap(self.model, asked.canary, scores, self.precision)
        check_canary(self._found["canary"], limit, version)
        gap = GapStats()
        for name, completion in asked.completions.items():
            gap = gap + self._again(completion, scores[name])
        self._found["asked_again"] = gap
        self._limits |= dict.fromkeys(("canary", "asked_again"), limit)
        check_gap(
            self.pools["asked_again"].add(gap, limit),
            limit,
            version,
            "the engine, asked again without its caches, gives completions of this generation other log-probs than the "
            "trainer does with the same weights",
            "look at which request is worst; 'lockstep verify' compares both sides on other tokens",
        )

    def _again(self, completion: Completion, scores: tuple[float, ...]) -> GapStats:
        """The gap of a completion's sampled tokens at temperature 1: the engine's scores against a plain forward."""
        before = len(completion.prompt_ids)
        ids = _path(completion, len(scores) + 2)
        places = torch.from_numpy(completion.sampled_places[completion.sampled_places < len(ids) - before])
        own = completion_logps(self.model, ids[:before], ids[before:], Sampling(1), self.precision)[places]
        theirs = torch.tensor(scores)[before - 1 + places]
        return measure_gap(theirs, own.cpu(), [str(completion.key)], [len(own)])

    def check_begun(
        self, begun: Mapping[int, Sequence[Completion]], version: int, limit: Tolerance
    ) -> Iterator[tuple[GapStats, Sequence[Completion]]]:
        """Yield the gap of each later generation with new tokens, and the completions with them. The caller checks.

        Args:
            begun: the finished completions of each generation, by its number.
            version: of the weights that both sides hold. Only tokens that they have sampled are compared.
        """
        self._found["sampled_ahead"], self._limits["sampled_ahead"] = GapStats(), limit
        self._compared = {number: self._compared.get(number, 0) for number in begun}
        for number, completions in begun.items():
            now = [c for c in completions if bool((c.sampled_versions == version).any())]
            chosen = _chosen(now, LEAST - self._compared[number], (self.seed, number, version))
            if not chosen:
                continue
            gap = GapStats()
            for completion in chosen:
                fresh = torch.from_numpy(completion.sampled_versions == version)
                own = sampled_logps(self.model, completion, self.distribution, self.precision).cpu()[fresh]
                theirs = torch.tensor(completion.sampled_logprobs)[fresh]
                gap = gap + measure_gap(theirs, own, [str(completion.key)], [len(own)])
            self._compared[number] += gap.tokens
            self._found["sampled_ahead"] += gap
            yield self.pools["sampled_ahead"].add(gap, limit), chosen

    def figures(self) -> dict[str, tuple[GapStats, Tolerance]]:
        """What the last generation's proofs have found, by their names, with its limits; empty if there were none."""
        return {name: (gap, self._limits[name]) for name, gap in self._found.items()}

    def metrics(self) -> dict[str, float]:
        """The numbers of tokens that were compared, as metrics."""
        names = {"asked_again": "staleness/asked_again", "sampled_ahead": "staleness/compared_ahead"}
        return {name: float(self._found[kind].tokens) for kind, name in names.items() if kind in self._found}


def _chosen(completions: Sequence[Completion], least: int, seed: tuple[int, ...]) -> list[Completion]:
    """As few drawn completions as possible that have at least this many sampled tokens together."""
    found: list[Completion] = []
    tokens = 0
    for place in np.random.default_rng(seed).permutation(len(completions)).tolist():
        if tokens >= least:
            break
        if len(completions[place].sampled_places):
            found.append(completions[place])
            tokens += len(completions[place].sampled_places)
    return found


def _path(completion: Completion, context: int) -> Ids:
    """The ids of a completion up to its last sampled one, as far as an engine can score them."""
    last = int(completion.sampled_places[-1])
    return joined([completion.prompt_ids, completion.token_ids[: last + 1]])[: context - 1]


def _fits(completion: Completion, context: int) -> bool:
    """Whether the engine can score the first sampled token of a completion."""
    return len(completion.prompt_ids) + int(completion.sampled_places[0]) < context - 1


def check_staleness(completions: Iterable[Completion], version: int, most: int) -> None:
    """Check that no token is newer than `version`, which learns from it first, or older than it by more than `most`."""
    for completion in completions:
        if not len(completion.token_ids):
            continue
        oldest, newest = int(completion.weight_versions.min()), int(completion.weight_versions.max())
        if oldest < version - most or newest > version:
            raise ProofError(
                "staleness",
                f"request {completion.key} has tokens of versions {oldest} to {newest}, at version "
                f"{version} with a staleness of at most {most}",
                "generations were not used in order, or the engine delayed a request over too many pushes",
                "report it with this message; max_staleness=0 runs without generations ahead",
            )
