"""The engine of a run with its proofs and rewards: push weights, sample completions, score them.

Scored groups are the same on every rank. One rank holds the engine and samples for all ranks. Reward functions run on
every rank, each on its share of the groups; every rank gets all scores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedModel

from lockstep.config.run import OnlineConfig
from lockstep.config.sampling import interruption_of, sampling_of
from lockstep.contract.protocol import Engine
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, foreign_errors
from lockstep.images.prompts import PromptReader
from lockstep.learn.ranks import share_of
from lockstep.models.adapters import causal_model
from lockstep.report.alarms import Alarms
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ahead import GenerationsAhead
from lockstep.rollouts.conversation import Program, single_turn
from lockstep.rollouts.driver import Driver, Start, groups_from, sampled_now, starts_for
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.programs.interruptions import interrupted
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.recovery import Recovery
from lockstep.rollouts.rewards import RewardLog, Scorer
from lockstep.rollouts.wire import groups_from_wire, groups_to_wire, scores_from_wire, scores_to_wire
from lockstep.run.engine import (
    ServerChanges,
    check_directory,
    generations_ahead,
    server_changes,
    shake_hands,
    start_engine,
)
from lockstep.run.metrics import interruption_metrics, rollout_metrics, staleness_metrics
from lockstep.run.programs import Acting, RolloutFunction
from lockstep.tokens.chat import end_ids
from lockstep.watch.custody import Record
from lockstep.watch.engine import EngineWatch, Proofs
from lockstep.watch.push import NOT_PUSHED
from lockstep.watch.settings import SettingsProof
from lockstep.weights.push import let_sleep, push_weights

_logger = logging.getLogger(__name__)

# Seconds of a generation that tools and environments may hold the engine before it is said.
_LONG = 20.0
# Seconds beyond the limits of the reward functions in which they must have ended in another thread.
_ENDING = 60.0


class RolloutSource:
    """An engine, its proofs, and the rewards of its rollouts.

    Args:
        policy: the trained model; it is only read.
        scorer: gives groups their rewards.
        reader: the reader of the prompts.
        given: a running engine, which the caller closes; None starts one.
        max_model_len: context length, in tokens, of an engine that is started here.
        longest: length, in tokens, of the longest prompt and completion together.
        settings: what the user has asked for.
        tools: the tools and environments of the rollouts, or their agents; None: there are none.
        function: makes the rollouts instead of the driver; None: the driver makes them.
        alarms: of the run.

    Raises:
        InputError: the engine cannot be started or found, or an engine in this process cannot serve several ranks.
        ProofError: the engine's settings are not what training assumes.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        scorer: Scorer,
        reader: PromptReader,
        config: OnlineConfig,
        clock: PhaseClock,
        ranks: Ranks,
        given: Engine | None,
        model_path: str,
        max_model_len: int,
        longest: int,
        settings: SettingsProof,
        *,
        tools: Acting | None = None,
        function: RolloutFunction | None = None,
        alarms: Alarms,
    ) -> None:
        self._tokenizer = tokenizer = reader.tokenizer
        self._config, self._clock, self._ranks = config, clock, ranks
        self.policy, self.reader = policy, reader
        self._end_ids = end_ids(causal_model(policy), tokenizer)
        interruption = interruption_of(config, tokenizer)
        self._one_turn: Program = (
            single_turn if interruption is None else interrupted(interruption, self.sampling)
        )
        # The program that makes every rollout.
        self.program = self._one_turn
        self._tools, self.rollout_function = tools, function
        self.alarms = alarms
        self._rewards = GroupRewards(scorer, ranks, tools, alarms)
        self._owns_engine = given is None
        # A rollout_func may choose between samples, so its tokens are not bet on.
        bets = function is None
        self.watch = EngineWatch(policy, config, tokenizer, clock, ranks, settings, self.sampling, bets=bets)
        self._engine: Engine | None = given
        self._recovery: Recovery | None = None
        self._driver: Driver | None = None
        self._ahead: GenerationsAhead | None = None
        self._server_changes: ServerChanges | None = None
        # A group of the last metrics, for the live view.
        self.shown_group: RolloutGroup | None = None
        self.watch.searches_top_p = self._ranks.from_owner(
            "engine", lambda: self._open(model_path, max_model_len, longest), bool, bool
        )

    def _open(self, model_path: str, max_model_len: int, longest: int) -> bool:
        """Start the engine, and make what works with it. Returns whether the engine searches the edge of top-p."""
        config = self._config
        engine = self._engine or start_engine(
            config, model_path, self._tokenizer, max_model_len, self.policy, self._ranks.count
        )
        self._engine = engine

        def shake(other: Engine) -> None:
            dtypes, shown = (config.engine_torch_dtype, config.engine_head_dtype), self.reader.shows_pictures
            shake_hands(
                other,
                self.policy,
                model_path,
                dtypes[0],
                longest,
                dtypes[1],
                self.sampling,
                pictures=shown,
                scores_first=bool(config.max_staleness),
                quantization=config.vllm_quantization,
            )
            if other.settings().engine == "vllm":
                check_directory(model_path, self._tokenizer, self.sampling)

        try:
            if config.engine_sleeps and not getattr(engine, "can_sleep", False):
                raise InputError("vllm_enable_sleep_mode is set, and the engine that was given cannot sleep")
            shake(engine)
            self._recovery = Recovery(self._distrust)
            proofs = self.watch.opened(engine, self._recovery, self.send)
            if self._tools is not None:
                self.program = self._tools.start()
            calls = self._tools.calls if self._tools is not None else None
            self._driver = Driver(engine, self._tokenizer, Record, calls, proofs.check_answer)
            self._server_changes = server_changes(engine, config, shake, proofs)
            if config.max_staleness:
                self._ahead = generations_ahead(engine, self._driver, self._limit_ahead)
                proofs.samples_ahead(self._ahead, self._limit_ahead)
            return engine.settings().searches_top_p
        except BaseException:
            self.close()
            raise

    @property
    def sampling(self) -> Sampling:
        """The distribution that the engine samples from."""
        return sampling_of(self._config, self._tokenizer, self._end_ids, self.reader.banned_ids)

    @property
    def engine(self) -> Engine:
        """The engine."""
        if self._engine is None:
            raise InputError(f"rank {self._ranks.rank} holds no engine")
        return self._engine

    @property
    def proofs(self) -> Proofs:
        """The proofs."""
        return self.watch.proofs

    @property
    def recovery(self) -> Recovery:
        """Repeats work that lost its engine."""
        assert self._recovery is not None
        return self._recovery

    @property
    def losses(self) -> int:
        """How often the engine was lost; 0 on ranks without the engine."""
        return self._recovery.losses if self._recovery is not None else 0

    @property
    def servers(self) -> int:
        """Number of servers of the engine; 0 for another engine, and on ranks without the engine."""
        return self._server_changes.count if self._server_changes is not None else 0

    @property
    def _limit_ahead(self) -> float:
        """Time limit, in seconds, of work that waits in the engine behind generations that began earlier."""
        return self._config.generation_timeout * (self._config.generations_ahead + 1)

    def _distrust(self) -> None:
        self.proofs.distrust()
        if self._ahead is not None:
            self._ahead.forget_unfinished()

    def on_every_rank(
        self, work: Callable[[], list[RolloutGroup]], prompts: Sequence[Prompt]
    ) -> list[RolloutGroup]:
        """Groups that the rank with the engine makes by `work`, on every rank. Every rank calls.

        The work is done again from its start where the engine is lost meanwhile. `prompts` are those of the groups.
        """
        if self._ranks.count == 1:
            return self._at_work(work)
        return self._ranks.from_owner(
            "sample",
            lambda: self._at_work(work),
            groups_to_wire,
            lambda data: groups_from_wire(data, prompts),
        )

    def _at_work(self, work: Callable[[], list[RolloutGroup]]) -> list[RolloutGroup]:
        """Do work of the engine. Afterwards the engine sleeps until the next push, if the user wants it."""
        groups = self.recovery.run(work)
        if isinstance(self._engine, VLLMInProcess) and self._config.engine_sleeps:
            with self._clock.phase("sync"):
                let_sleep(self._engine)
        return groups

    # ---- push and sample: on the rank that holds the engine ---------------------------------------------------------

    def push(self, version: int) -> None:
        """Push the policy's weights as `version`. Servers leave before the push and join after it.

        Every generation begins with a push, even if the version stays the same: weights may have been set by hand,
        and the reset of the engine's caches makes a resumed run start a generation as the first run did.
        """
        changes = self._server_changes
        if changes is not None:
            changes.before_push()
        self.send(version)
        if changes is not None:
            changes.after_push(version)

    def send(self, version: int) -> None:
        """Send the policy's weights to the engine as `version`, in the way that the options ask for."""
        with self._ahead.held() if self._ahead is not None else nullcontext():
            self.watch.pushing()
            with self._clock.phase("sync"), foreign_errors(NOT_PUSHED):
                own = self.proofs.push.extension.push
                record = push_weights(self.policy, self.engine, version) if own is None else own(version)
            self.watch.pushed(record)

    def sample(self, prompts: Sequence[Prompt], num_generations: int, version: int) -> list[RolloutGroup]:
        """Sample rollouts of prompts with the weights that were pushed as `version`."""
        assert self._driver is not None
        if self.rollout_function is not None:
            with self._clock.phase("generate"):
                groups = self.rollout_function.groups(prompts, num_generations, version)
            self.watch.sampled(groups, one_turn=False)
            return groups
        starts = self._starts(prompts, num_generations, version)
        with self._clock.phase("generate"), self._noting_waits():
            groups = sampled_now(
                self._driver,
                prompts,
                starts,
                version,
                program=self.program,
                on_rollout=self._clock.counted(len(starts)),
                # In the engine the requests wait behind the generations that were begun before.
                limit=self._limit_ahead if self._ahead is not None else None,
            )
        self.watch.sampled(groups, one_turn=self.program is self._one_turn)
        return groups

    @contextmanager
    def _noting_waits(self) -> Iterator[None]:
        """Raise an alarm if the engine stood still for tools and environments for most of the block."""
        calls, began = self._tools.calls if self._tools is not None else None, time.monotonic()
        before = calls.errands.seconds if calls is not None else 0.0
        yield
        if calls is not None:
            seconds, whole = calls.errands.seconds - before, time.monotonic() - began
            if seconds > max(_LONG, whole / 2):
                self.alarms.tell("tools_in_turn", "tools", seconds=seconds, whole=whole)

    def sample_ahead(
        self, upcoming: Sequence[tuple[int, Sequence[Prompt]]], num_generations: int, version: int
    ) -> list[RolloutGroup]:
        """The first of these generations. The engine began it some steps ago, and begins the last one now."""
        assert self._ahead is not None
        with self._clock.phase("generate"):
            for number, prompts in upcoming:
                if number not in self._ahead:
                    # Not the current version: several generations may begin at the same version, and each needs seeds
                    # of its own.
                    starts = self._starts(
                        prompts, num_generations, number * self._config.optimizer_steps_per_generation
                    )
                    self._ahead.begin(number, starts, self.program)
            number, prompts = upcoming[0]
            groups = groups_from(prompts, self._ahead.take(number))
        one_turn = self.program is self._one_turn
        self.watch.taken_ahead(groups, version, one_turn=one_turn, limit=self._limit_ahead)
        return groups

    def _starts(self, prompts: Sequence[Prompt], num_generations: int, version: int) -> list[Start]:
        seed = self._config.seed
        starts = starts_for(
            prompts, self.sampling, num_generations=num_generations, run_seed=seed, version=version
        )
        self.watch.asked(starts, version)
        return starts

    # ---- score: on every rank ---------------------------------------------------------------------------------------

    def score(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Groups with their rewards; each rank scores its share. Every rank calls."""
        with self._clock.phase("rewards"):
            return self._rewards.score(groups, state)

    # ---- log -------------------------------------------------------------------------------------------------------

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """Metrics of scored groups, with the metrics that reward functions logged since the last call."""
        metrics, self.shown_group = rollout_metrics(groups), groups[0]
        if self._config.max_staleness:
            metrics |= staleness_metrics(groups, version)
        if self._config.max_thinking_length is not None:
            metrics |= interruption_metrics(groups)
        return self._rewards.metrics(groups, metrics)

    def abandon_pending(self) -> None:
        """Abandon the generations that the engine is sampling ahead. They are sampled again where they are needed."""
        if self._ahead is not None:
            self._ahead.forget()
        if self._tools is not None and self._ranks.owner:
            self._tools.release_all()

    def close(self) -> None:
        """Abandon what the engine samples ahead, and close the engine if it was started here."""
        self.abandon_pending()
        if self._driver is not None:
            self._driver.close()
        if self._tools is not None:
            self._tools.close()
        if self._owns_engine and self._engine is not None:
            self._engine.close()


class GroupRewards:
    """The rewards of groups. Tools keep what reward functions may ask for until the rollouts are scored."""

    def __init__(self, scorer: Scorer, ranks: Ranks, tools: Acting | None, alarms: Alarms) -> None:
        self._scorer, self._ranks, self._tools, self._alarms = scorer, ranks, tools, alarms
        self.log = RewardLog()

    def score(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Groups with their rewards. Every rank calls. Reward functions may ask for the trainer's `state`."""
        return self._finish(self._on_ranks(groups, state))

    def _finish(self, scored: list[RolloutGroup]) -> list[RolloutGroup]:
        """What the scorer computes over the whole generation; then tools let go of what they kept for the rewards."""
        scored = self._scorer.finish(scored)
        for reason in (rollout.failed for group in scored for rollout in group.rollouts):
            if reason is not None:
                self._alarms.tell("rollout_failed", reason)
        if self._tools is not None and self._ranks.owner:
            for name, calls, error in (
                self._tools.calls.failing.take() if self._tools.calls is not None else ()
            ):
                self._alarms.tell("tool_fails", name, calls=calls, error=error)
            self._tools.release(rollout for group in scored for rollout in group.rollouts)
        return scored

    def _scored(self, groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        """Groups with their scores. Functions that read environments run in the environments' thread."""
        if self._tools is None:
            return self._scorer.score(groups, state, log)
        limit = self._scorer.timeout * (len(getattr(self._scorer, "functions", ())) + 1) + _ENDING
        return self._tools.beside_environments(lambda: self._scorer.score(groups, state, log), limit)

    def _on_ranks(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        if self._ranks.count == 1:
            return self._scored(groups, state, self.log)

        def part() -> dict[str, Any]:
            # A rank without groups does not call the reward functions. Environments are on one rank, which then
            # scores all groups.
            here = self._tools is not None and self._tools.has_environments
            own: Sequence[RolloutGroup] = share_of(groups, self._ranks)
            if here:
                own = groups if self._ranks.owner else []
            log = RewardLog()
            return {
                "scores": scores_to_wire(self._scored(own, state, log) if own else []),
                "metrics": log.values(),
            }

        parts = self._ranks.share("rewards", part)
        for found in parts:
            self.log.add(found["metrics"])
        return scores_from_wire([found["scores"] for found in parts], groups)

    def metrics(self, groups: Sequence[RolloutGroup], so_far: Mapping[str, float]) -> dict[str, float]:
        """Metrics of tools, and those that reward functions have logged since the last call.

        Reward functions may not use the names of `so_far`, metrics of the same generation.
        """
        own = dict(so_far)
        if self._tools is not None:
            own |= self._tools.metrics(groups)
        return own | self.log.take(own=own)
