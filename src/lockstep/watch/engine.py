"""The watch of an engine: the proofs of its pushes and answers, and the receipt that all proofs leave.

| when | proofs |
|------|--------|
| start, before anything is sampled (an evaluation too) | one push with a probe of every module, and the canary |
| every push | those of `watch/push.py` |
| every answer | `settings`, `limits`, `ends` |
| every rollout | `turns` |
| every generation | `placeholder`, `samples`, `limits`, `interruption` |
| every generation, with `max_staleness` | `staleness`; drawn tokens are asked again, and compared ahead (`watch/ahead.py`) |
| every optimizer step, before the optimizer; every evaluation | `gap`, `draws`, `kept_ids` (the mean) |

With `max_staleness`, some tokens are older than the trainer's weights. The gap is then over the tokens that are not.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.run import OnlineConfig
from lockstep.contract.protocol import Completion, Engine, GenerationRequest
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import InputError
from lockstep.learn.filters import IdRules
from lockstep.learn.generation import Generation, branches_of
from lockstep.progress import busy
from lockstep.report.alarms import LINE, Alarm, Alarms
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ahead import GenerationsAhead
from lockstep.rollouts.driver import Start, decoding
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.recovery import Recovery
from lockstep.watch.ahead import ProofsAhead, check_staleness
from lockstep.watch.custody import check_placeholders
from lockstep.watch.draws import DrawEvidence, DrawStats, draw_metrics
from lockstep.watch.gap import (
    GapSlope,
    GapStats,
    GapTail,
    JudgedGap,
    PooledGap,
    PooledSlope,
    check_count,
    over_limits,
)
from lockstep.watch.gap_explained import ExplainedGap
from lockstep.watch.kept_sets import KeptSetStats
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.optimizer_settings import Change
from lockstep.watch.plain_forward import sampled_logps
from lockstep.watch.push import ProvenPusher, PushWatch, push_extension
from lockstep.watch.receipt import RECEIPT, Receipt
from lockstep.watch.receipt_lines import figures, start_line, step_line
from lockstep.watch.samples import Ends, Seeds, check_samples
from lockstep.watch.settings import SettingsProof
from lockstep.watch.tolerances import Tolerance, tolerance
from lockstep.weights.push import SyncRecord, drop_record

# What a watcher shows during the first proof.
_PROVING = "proving every module of the engine"


class Proofs:
    """All checks between an engine's answers and an optimizer step.

    Args:
        clock: counts pushes under `sync` and proofs under `verify`.
        settings: what the user has asked for. Another setting in `sampling`, the distribution of every request, is a
            `ProofError`.
        recovery: repeats work that lost its engine.
        send: sends the weights as a version, and tells this watch of it.
        bets: whether the draws proof bets on the tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        config: OnlineConfig,
        tokenizer: PreTrainedTokenizerBase,
        clock: PhaseClock,
        settings: SettingsProof,
        sampling: Sampling,
        recovery: Recovery,
        send: Callable[[int], None],
        *,
        bets: bool,
    ) -> None:
        self._model, self._engine, self._config, self._clock, self._bets = model, engine, config, clock, bets
        self.engine_dtype, self.precision = config.engine_torch_dtype, config.precision
        self.push = PushWatch(
            model,
            engine,
            self.engine_dtype,
            self.precision,
            seed=config.seed,
            extension=push_extension(config),
            phase=clock.phase,
        )
        self.recovery, self._send, self._is_whole_due = recovery, send, False
        self._begun: GenerationsAhead | None = None
        self._limit_ahead = 0.0
        self._receipt: Receipt | None = None
        # The gaps of generations, and those of evaluations.
        self.pool, self._evaluated_pool = PooledGap(), PooledGap()
        self.tail = GapTail(self.limit)
        # Of this generation, and of the last one whose means were judged.
        self.judged_now = self._last_judged = JudgedGap(GapStats(), self.limit)
        rules = IdRules.of_run(sampling, model, tokenizer)
        self.distribution = rules.distribution
        self.ahead = ProofsAhead(model, engine, self.distribution, self.precision, config.seed)
        self.explained = ExplainedGap(
            model,
            engine,
            self.distribution,
            self.precision,
            lambda: self.push.probes,
            stale_by_design=config.max_staleness > 0,
        )
        self._settings, self._ends = settings, Ends(rules.end_ids, decoding(tokenizer, special=True))
        settings.check_sampling(rules.sampling, "the distribution that the trainer scores")
        self.kept_sets = KeptSetStats()
        self._draws, self._last_draws = DrawEvidence(), DrawStats()
        self.slopes = PooledSlope()
        self._bet_version = self._judged_version = self._slope_version = -1
        # Of the evaluations of this process.
        self._evaluated = DrawEvidence()

    @property
    def limit(self) -> Tolerance:
        """The limits on the gap of the canary. Those of an extension may be known after the first canary."""
        return self.push.limit

    @property
    def limit_of_tokens(self) -> Tolerance:
        """The limits on the mean gap of sampled tokens."""
        return self.push.limit_of_tokens

    @property
    def probe(self) -> ModuleProbe:
        """The probe of the engine's modules."""
        return self.push.module_probe

    def distrust(self) -> None:
        """Probe every module after the next push, because the engine was lost and may be another one now."""
        self.push.distrust()
        self.ahead.forget()

    def forget_evidence(self) -> None:
        """Forget the tokens of earlier steps and evaluations, so that they do not count in later judgements."""
        self.pool, self._evaluated_pool, self.tail = PooledGap(), PooledGap(), GapTail(self.limit)
        self._draws, self._bet_version, self._judged_version = DrawEvidence(), -1, -1
        self._evaluated, self.slopes = DrawEvidence(), PooledSlope()
        self.ahead.forget_tokens()

    def start(self, folder: Path, step: int, inputs: Mapping[str, Any]) -> None:
        """Open the receipt, and prove the engine before it samples the first rollout. `inputs` are for the receipt."""
        folder.mkdir(parents=True, exist_ok=True)
        self._receipt = Receipt(folder / RECEIPT, step)
        self.tail, self.pool = GapTail(self.limit), PooledGap()
        self.ahead.forget_tokens()
        self._draws, self._bet_version, self._judged_version = DrawEvidence(), -1, -1
        self.slopes, self._slope_version = PooledSlope(), -1
        for entry in self._receipt.entries:
            if "draws" in entry:
                self._draws = DrawEvidence.of(entry["draws"])
                self.pool = PooledGap(GapStats(**entry.get("waiting", {})))
            sums = {name: entry.get(name, 0.0) for name in ("sum_cubes", "sum_fourths")}
            self.tail.add(GapStats(max_abs=entry.get("max_abs_gap", 0.0), **sums))
        self.prove_engine(step)
        servers = {"servers": list(self._engine.members)} if isinstance(self._engine, VLLMServer) else {}
        more = {
            "trainer": {"compute": str(self.precision.dtype_of(self._model))},
            "temperature": self._config.temperature,
            "inputs": inputs,
            **servers,
        }
        self._receipt.append(start_line(step, self.push, self._engine.settings(), more))

    def samples_ahead(self, begun: GenerationsAhead, limit: float) -> None:
        """The engine will sample generations ahead. A request may wait `limit` seconds behind earlier generations."""
        self._begun, self._limit_ahead = begun, limit

    def prove_engine(self, version: int) -> None:
        """Push the weights, probe every module and score the canary, before the engine samples anything."""
        self.push.distrust()
        self._is_whole_due = True
        self._send(version)

    def prove_joining(self, engine: Engine, version: int) -> None:
        """Prove another engine as `prove_engine` proves the run's own, before its servers join."""
        config, dtypes = self._config, (self.engine_dtype, self.precision)
        extension = push_extension(config)
        pusher = ProvenPusher(self._model, engine, *dtypes, seed=config.seed, extension=extension)
        try:
            pusher.push(version, canary=True)
        finally:
            drop_record(engine)

    def note_servers(self, step: int, changes: Mapping[str, Any]) -> None:
        """Write into the receipt which servers have joined, have left or were refused."""
        if self._receipt is not None:
            self._receipt.append({"kind": "servers", "step": step, **changes})

    def note_optimizer(
        self, step: int, given: Sequence[Mapping[str, Any]] | None, changes: Sequence[Change]
    ) -> None:
        """Write into the receipt the settings of a user's optimizer, and changes of settings that were taken."""
        assert self._receipt is not None
        groups = {} if given is None else {"given": list(given)}
        lines = [change.line() for change in changes]
        self._receipt.append({"kind": "optimizer", "step": step, **groups, "changes": lines})

    def note_unproven(self, step: int, proof: str, why: str) -> None:
        """Write into the receipt that a proof could not be made at a step, and why."""
        if self._receipt is not None:
            self._receipt.append({"kind": "unproven", "step": step, "proof": proof, "why": why})

    def note_taken(self, step: int, taken: Sequence[str]) -> None:
        """Write into the receipt which hooks and functions of the user's stand in the way of the model's backward."""
        if self._receipt is not None:
            self._receipt.append({"kind": "hooks", "step": step, "taken": list(taken)})

    def note_change(self, step: int, field: str, value: Any, settings: dict[str, Any]) -> None:
        """Write into the receipt that the user has changed a field. Before the first line, `settings` get the value."""
        if self._receipt is None:
            settings[field] = value
        else:
            self._receipt.append({"kind": "change", "step": step, "field": field, "value": value})

    def keep_alarms(self, alarms: Alarms, step: Callable[[], int]) -> None:
        """Continue the receipt's alarms, and write new ones into it. `step` gives the number of steps so far."""
        receipt = self._receipt
        assert receipt is not None

        def write(alarm: Alarm) -> None:
            receipt.append({"kind": LINE, "step": step(), **asdict(alarm)})

        alarms.go_on(receipt.entries, write)

    def note_evaluation(self, line: Mapping[str, Any]) -> None:
        """Write into the receipt what an evaluation before training has measured."""
        assert self._receipt is not None
        self._receipt.append(dict(line))

    def note_checkpoint(self, step: int, digests: str) -> None:
        """Write a checkpoint's digest into the receipt: a receipt that is cut or rewritten no longer fits it."""
        assert self._receipt is not None
        # A checkpoint that is on the disk needs its line there too.
        self._receipt.append({"kind": "checkpoint", "step": step, "digests": digests}, durable=True)

    def pushed(self, record: SyncRecord) -> None:
        """Weights were pushed."""
        # An engine that slept has new memory: the canary asks it as a whole, before it samples.
        self.push.canary = self._is_whole_due or self._config.engine_sleeps
        self.push.pushed(record)
        if self._is_whole_due:
            self.push.extension.sample_canary(self.distribution, record.version)
            self.tail.outer = self.push.limit_of_tokens
        self._is_whole_due = False

    @property
    def canary_is_due(self) -> bool:
        """Whether the engine was asked for the canary and its answer was not checked yet."""
        return self.ahead.is_due

    def ask_again(self, completions: Sequence[Completion], version: int, limit: float) -> None:
        """Ask the engine to score the canary and drawn completions with its weights, while the trainer goes on.

        The answer may take `limit` seconds, with the requests that the engine works on first.
        """
        self.ahead.ask(completions, version, limit)

    def check_asked_again(self, version: int) -> None:
        """Wait for the answer to `ask_again` and check it, before the policy changes. Raises `EngineLost` too."""
        with self._clock.phase("verify"):
            self.ahead.check_answer(version, self.limit)

    def check_begun(self, begun: Mapping[int, Sequence[Completion]], version: int) -> None:
        """Check the gap of drawn completions of later generations, by number, while the trainer has their weights."""
        with self._clock.phase("verify"):
            for gap, completions in self.ahead.check_begun(begun, version, self.tail.limit):
                self._check_limits(gap, completions, version)

    def check_answer(self, request: GenerationRequest, answer: Completion) -> None:
        """Check one request against the user's settings, and that its answer ended where the request says."""
        self._settings.check_request(request)
        self._ends.check(request, answer)

    def check_completions(self, completions: Sequence[Completion]) -> None:
        """Check length and interruption of finished completions of one turn."""
        with self._clock.phase("verify"):
            context = self._engine.settings().max_model_len
            for completion in completions:
                self._settings.check_completion(completion, context)

    def check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Check the samples of a whole generation: no copies, no placeholders of pictures."""
        with self._clock.phase("verify"):
            check_placeholders(branches_of(groups), self._settings.banned)
            check_samples([[r.branches for r in group.rollouts] for group in groups])

    def token_gaps(self, completion: Completion) -> list[float]:
        """(S,) parity gap of each sampled token under the weights that the policy has now, for reports."""
        own = sampled_logps(self._model, completion, self.distribution, self.precision)
        return (torch.from_numpy(completion.sampled_logprobs.copy()) - own).tolist()

    def check_gap(
        self,
        gap: GapStats,
        kept_sets: KeptSetStats,
        sampled: int,
        completions: Sequence[Completion],
        version: int,
    ) -> None:
        """Check the parity gap before the optimizer step.

        Args:
            gap: over all tokens that the policy scored.
            kept_sets: over drawn tokens.
            sampled: how many tokens the weights of `version` sampled, without those that are left aside.
            completions: the sampled completions; a failure is explained with some of them.
        """
        with self._clock.phase("verify"):
            check_count(gap, sampled, version)
            if gap.tokens:
                self.measure_limits(completions, version)
            limit = self.tail.limit
            pools = self._config.max_staleness or limit.is_coarse
            # Some generations are judged twice, with the same tokens. They count once in the pool and in the sets.
            again, self._judged_version = version == self._judged_version, version
            pool = PooledGap() if again else self.pool
            judged = pool.add(gap, limit) if pools else gap
            self._check_limits(judged, completions, version)
            if not again:
                self.judged_now = JudgedGap(judged, self.tail.limit)
                self._last_judged = self.judged_now if judged.tokens else self._last_judged
            if kept_sets.tokens or not again:
                self.kept_sets = kept_sets
            kept_sets.check_mean(self.distribution.sampling, self.tail.limit)

    def check_evaluation(
        self,
        gap: GapStats,
        draws: DrawStats,
        kept_sets: KeptSetStats,
        completions: Sequence[Completion],
        version: int,
    ) -> None:
        """Check the drawn completions of an evaluation."""
        with self._clock.phase("verify"):
            check_count(gap, sum(len(c.sampled_places) for c in completions), version)
            limit = self.tail.limit
            judged = self._evaluated_pool.add(gap, limit) if limit.is_coarse else gap
            self._check_limits(judged, completions, version)
            kept_sets.check_mean(self.distribution.sampling, limit)
            if self._bets:
                self._evaluated.add(draws)
                self._evaluated.check(version, draws)

    @property
    def judged(self) -> Mapping[str, float]:
        """The figures of the last gap whose means were judged, with their limits (`JudgedGap.figures`)."""
        return self._last_judged.figures()

    def _check_limits(self, gap: GapStats, completions: Sequence[Completion], version: int) -> None:
        if over_limits(gap, self.tail.limit):
            # The limits of an extension are those of other tokens, unless these tokens were measured.
            worst_first = sorted(completions, key=lambda c: str(c.key) != gap.worst)
            self.measure_limits(worst_first, version, always=True)
        limit = self.tail.limit
        if over_limits(gap, limit):
            raise self.explained.error(gap, limit, completions, version)

    def measure_limits(
        self, completions: Sequence[Completion], version: int, *, always: bool = False
    ) -> None:
        """Let the extension measure on these tokens, if it is due or `always`, and set the limits that follow."""
        self.push.extension.measure(completions, version, self.distribution, always=always)
        self.tail.outer = self.push.limit_of_tokens

    def check_draws(self, draws: DrawStats, version: int) -> None:
        """Bet on a generation's tokens. Further calls for the same version do nothing."""
        if self._bets and version != self._bet_version:
            self._last_draws, self._bet_version = draws, version
            self._draws.add(draws)
            self._draws.check(version, draws)

    def check_slope(self, slope: GapSlope, version: int) -> None:
        """Check the slope of the signed gap. Further calls for the same version do nothing."""
        if version != self._slope_version:
            self._slope_version = version
            self.slopes.check(slope, self.tail.limit, version)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last push, and of the last generation's proofs."""
        kept = self.kept_sets.metrics() if self.distribution.sampling.is_filtered else {}
        pushed = {} if self.push.proof is None else self.push.proof.push.metrics()
        pushed |= self.push.extension.metrics()
        judged = self.judged_now.metrics()
        return pushed | kept | judged | self.ahead.metrics() | draw_metrics(self._draws, self._last_draws)

    def check(
        self,
        gap: GapStats,
        draws: DrawStats,
        kept_sets: KeptSetStats,
        slope: GapSlope,
        generation: Generation,
        step: int,
        *,
        record: bool = True,
    ) -> None:
        """Check the parity gap of a whole generation and its draws, and write them to the receipt.

        Args:
            gap: over all tokens of the generation but those that are left aside.
            draws: over all tokens of its drawn rollouts. They count once per generation, at the first call.
            kept_sets: over drawn tokens.
            slope: of the signed gap, over tokens that this forward has scored.
            record: write the receipt's line; there is one per generation.
        """
        version = generation.version
        if (begun := self._begun) is not None:
            if not record:
                # The gap is checked once per generation, with the canary, and the policy does not change before that.
                self.check_draws(draws, version)
                return
            self.recovery.run(lambda: self._prove_ahead(begun, generation))
        self.check_gap(gap, kept_sets, generation.due_tokens, generation.completions, version)
        self.check_slope(slope, version)
        self.check_draws(draws, version)
        if record:
            self.write(gap, generation.sampled_tokens, generation.aside_tokens, step, version)

    def _prove_ahead(self, begun: GenerationsAhead, generation: Generation) -> None:
        """The proofs of a run with tokens of older weights, before the policy changes."""
        version = generation.version
        if not self.canary_is_due:
            # The engine was lost after it was asked.
            self._send(version)
            self.ask_again(generation.completions, version, self._limit_ahead)
        self.check_asked_again(version)
        finished = begun.finished().items()
        self.check_begun({n: [c for r in found for c in r.branches] for n, found in finished}, version)

    def write(self, gap: GapStats, sampled: int, aside: int, step: int, version: int) -> None:
        """Write the receipt's line of a step whose proofs have passed.

        Args:
            gap: over the tokens that the weights of `version` sampled, except the tokens that are left aside.
            sampled: how many tokens the engine sampled in all.
            aside: how many of them are left aside, because nothing is learned from them and their group was not drawn.
        """
        assert self._receipt is not None
        more = {
            "sampled_tokens": sampled,
            "aside_tokens": aside,
            **self._of_staleness(sampled - aside - gap.tokens),
            "draws": {**self._draws.data(), "z": self._last_draws.z, "tokens": self._last_draws.tokens},
        }
        judged = self.tail.limit, self.judged_now, self.pool.waiting
        self._receipt.append(step_line(step, version, self.push, gap, *judged, more))
        self.tail.add(gap)

    def _of_staleness(self, stale: int) -> dict[str, Any]:
        """The receipt's fields about stale tokens; empty for a run that has none."""
        found = self.ahead.figures()
        return {"stale_tokens": stale, **{name: figures(*of) for name, of in found.items()}} if found else {}


class EngineWatch:
    """The proofs of the engine on one rank, before they are needed and where another rank holds the engine.

    Attributes:
        decode: gives the text of ids, without special tokens.
        searches_top_p: whether the engine searches the edge of top-p (`FilterBounds`). Every rank proves the sets of
            its own tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: OnlineConfig,
        tokenizer: PreTrainedTokenizerBase,
        clock: PhaseClock,
        ranks: Ranks,
        settings: SettingsProof,
        sampling: Sampling,
        *,
        bets: bool,
    ) -> None:
        self.model, self._config, self._tokenizer = model, config, tokenizer
        self._clock, self._ranks = clock, ranks
        self._settings, self._sampling, self._bets = settings, sampling, bets
        self.decode = decoding(tokenizer)
        self.searches_top_p, self._proven, self._seeds = False, False, Seeds()
        self._limit = tolerance(config.engine_torch_dtype, config.precision.dtype_of(model))
        self._proofs: Proofs | None = None

    def opened(self, engine: Engine, recovery: Recovery, send: Callable[[int], None]) -> Proofs:
        """There is an engine on this rank. The arguments are those of `Proofs`."""
        self._proofs = Proofs(
            self.model,
            engine,
            self._config,
            self._tokenizer,
            self._clock,
            self._settings,
            self._sampling,
            recovery,
            send,
            bets=self._bets,
        )
        return self._proofs

    @property
    def proofs(self) -> Proofs:
        """The proofs. Raises `InputError` if another rank holds the engine."""
        if self._proofs is None:
            raise InputError(f"rank {self._ranks.rank} holds no engine")
        return self._proofs

    @property
    def limit(self) -> Tolerance:
        """The limits on the gap of sampled tokens; on a rank without the engine, those of the dtypes."""
        return self._limit if self._proofs is None else self._proofs.limit_of_tokens

    def start(self, folder: Path, step: int, inputs: Mapping[str, Any]) -> None:
        """Open the receipt, and prove the engine before it samples the first rollout. `inputs` stand in the receipt."""
        self._prove("start", lambda: self.proofs.start(folder, step, inputs))

    def prove_first(self, version: int) -> None:
        """Prove the engine before it samples for the first time, if `start` has not done so. Every rank calls."""
        if not self._proven:
            self._prove("prove", lambda: self.proofs.prove_engine(version))

    def _prove(self, name: str, prove: Callable[[], object]) -> None:
        with busy(_PROVING, self._clock.progress):
            self._ranks.on_owner(name, lambda: self.proofs.recovery.run(prove))
        self._proven = True

    def pushing(self) -> None:
        """Weights will be pushed."""
        self.proofs.push.pushing()

    def pushed(self, record: SyncRecord) -> None:
        """Weights were pushed."""
        self.proofs.pushed(record)

    def asked(self, starts: Sequence[Start], version: int) -> None:
        """Requests will be sent. No two of them may have one seed."""
        self._seeds.check({start.key: start.seed for start in starts}, version)

    def sampled(self, groups: Sequence[RolloutGroup], *, one_turn: bool) -> None:
        """The engine has answered all requests of these groups. `one_turn`: a completion is one answer."""
        self.proofs.check_groups(groups)
        if one_turn:
            self.proofs.check_completions(branches_of(groups))

    def taken_ahead(
        self, groups: Sequence[RolloutGroup], version: int, *, one_turn: bool, limit: float
    ) -> None:
        """Groups were taken whose tokens may be older than `version`. A further answer may take `limit` seconds."""
        completions = branches_of(groups)
        check_staleness(completions, version, self._config.max_staleness)
        self.sampled(groups, one_turn=one_turn)
        self.proofs.ask_again(completions, version, limit)

    def note_unproven(self, step: int, proof: str, why: str) -> None:
        """Write into the receipt that a proof could not be made at a step. Ranks without the engine write nothing."""
        if self._proofs is not None:
            self._proofs.note_unproven(step, proof, why)

    def metrics(self) -> dict[str, float]:
        """Metrics of the proofs on the current generation; empty on a rank without the engine."""
        return self.proofs.metrics() if self._ranks.owner else {}
