"""The engine of a run with its proofs and rewards: push weights, sample completions, score them.

Comes from: `training/loop.py`, which calls it on every rank. Gives back: scored groups, the same on every rank. One rank holds the
engine and samples for all ranks. Reward functions run on every rank, each on its share of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.engines.protocol import Engine, OnAnswer
from lockstep.engines.vllm_server import VLLMServer
from lockstep.errors import InputError
from lockstep.parity.gap import GapStats
from lockstep.parity.staleness import check_staleness
from lockstep.parity.tolerances import tolerance
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ahead import GenerationsAhead
from lockstep.rollouts.collect import answers_to, check_whole, collect, groups_from, requests_for
from lockstep.rollouts.early_scores import EarlyScores
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.reward_log import RewardLog
from lockstep.rollouts.rewards import Scorer
from lockstep.rollouts.wire import groups_from_wire, groups_to_wire, scores_from_wire, scores_to_wire
from lockstep.training.config.interruption import interruption_of
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.sampling import sampling_of
from lockstep.training.generate.engine import shake_hands, start_engine
from lockstep.training.generate.metrics import interruption_metrics, rollout_metrics, staleness_metrics
from lockstep.training.generate.proofs import Proofs
from lockstep.training.generate.recovery import Recovery
from lockstep.training.step.distributed import share_of
from lockstep.training.step.generation import Generation


class RolloutSource:
    """An engine, its proofs, and the rewards of its rollouts.

    Args:
        policy: the trained model; it is only read.
        scorer: gives groups their rewards.
        given: a running engine, which the caller closes; None starts one.
        max_model_len: context length, in tokens, of an engine that is started here.
        longest: length, in tokens, of the longest prompt and completion together.

    Raises:
        InputError: the engine cannot be started or found, or an engine in this process cannot serve several ranks.
        ProofError: the engine's settings are not what training assumes.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        config: OnlineConfig,
        clock: PhaseClock,
        ranks: Ranks,
        given: Engine | None,
        model_path: str,
        max_model_len: int,
        longest: int,
    ) -> None:
        self._scorer, self._tokenizer = scorer, tokenizer
        self._config, self._clock, self._ranks = config, clock, ranks
        self._policy = policy
        self._interruption = interruption_of(config, tokenizer)
        self._reward_log = RewardLog()
        # bf16 autocast, or the dtype that the weights were loaded in.
        compute_dtype = torch.bfloat16 if config.bf16 else policy.dtype
        self.limit = tolerance(config.engine_torch_dtype, compute_dtype)
        self._owns_engine = given is None
        self._proven = False
        self._engine: Engine | None = given
        self._proofs: Proofs | None = None
        self._recovery: Recovery | None = None
        self._ahead: GenerationsAhead | None = None
        # A group of the last metrics, for the live view.
        self.shown_group: RolloutGroup | None = None
        self._ranks.on_owner("engine", lambda: self._open(model_path, max_model_len, longest))

    def _open(self, model_path: str, max_model_len: int, longest: int) -> None:
        config = self._config
        engine = self._engine or start_engine(config, model_path, self._tokenizer, max_model_len, self._ranks.count)
        self._engine = engine
        try:
            shake_hands(engine, self._policy, model_path, config.engine_torch_dtype, longest, config.engine_head_dtype)
            self._proofs = Proofs(self._policy, engine, config, self._clock)
            if config.max_staleness:
                # The config allows max_staleness in server mode only, but an engine that the caller gave may be no server.
                if not isinstance(engine, VLLMServer):
                    raise InputError(
                        "max_staleness needs a server (vllm_mode: server); the engine that was given is none"
                    )
                if not engine.scores_first:
                    raise InputError(
                        "max_staleness needs a server that answers a proof before what waits to be generated: start it with "
                        "'lockstep serve MODEL', or with --scheduling-policy priority"
                    )
                self._ahead = GenerationsAhead(engine, self._limit_ahead)
            self._recovery = Recovery(self._distrust)
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            InputError: another rank holds it.
        """
        if self._engine is None:
            raise InputError(f"rank {self._ranks.rank} holds no engine")
        return self._engine

    @property
    def proofs(self) -> Proofs:
        """The proofs.

        Raises:
            InputError: another rank holds the engine.
        """
        if self._proofs is None:
            raise InputError(f"rank {self._ranks.rank} holds no engine")
        return self._proofs

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
    def _limit_ahead(self) -> float:
        """Time limit, in seconds, of work that waits in the engine behind generations that began earlier."""
        return self._config.vllm_server_timeout * (self._config.generations_ahead + 1)

    def _distrust(self) -> None:
        self.proofs.distrust()
        if self._ahead is not None:
            self._ahead.forget_unfinished()

    def start(self, folder: Path, step: int) -> None:
        """Open the receipt, and prove the engine before it samples the first rollout."""
        self._ranks.on_owner("start", lambda: self.recovery.run(lambda: self.proofs.start(folder, step)))
        self._proven = True

    def prove_first(self, version: int) -> None:
        """Prove the engine before it samples for the first time, if `start` has not done so. Every rank calls."""
        if not self._proven:
            self._ranks.on_owner("prove", lambda: self.recovery.run(lambda: self.proofs.prove_engine(version)))
            self._proven = True

    def on_every_rank(self, work: Callable[[], list[RolloutGroup]], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Groups that the rank with the engine makes, on every rank. Every rank calls.

        Args:
            work: done by the rank that holds the engine; done again from its start where the engine is lost meanwhile.
            prompts: of the groups.

        Raises:
            LockstepError: the engine was lost and did not come back in time.
        """
        if self._ranks.count == 1:
            return self.recovery.run(work)
        return self._ranks.from_owner(
            "sample", lambda: self.recovery.run(work), groups_to_wire, lambda data: groups_from_wire(data, prompts)
        )

    # ---- push and sample: on the rank that holds the engine ---------------------------------------------------------

    def push(self, version: int) -> None:
        """Push the policy's weights as `version`, and prove the push.

        Every generation begins with a push, also where the version stays the same: weights may have been set by hand, and the
        reset of the engine's caches makes a resumed run start a generation as the first run did.
        """
        with self._ahead.held() if self._ahead is not None else nullcontext():
            self.proofs.sync(version)

    def sample(
        self, prompts: Sequence[Prompt], num_generations: int, version: int, on_answer: OnAnswer | None = None
    ) -> list[RolloutGroup]:
        """Sample completions of prompts with the weights that were pushed as `version`."""
        with self._clock.phase("generate"):
            groups = collect(
                prompts,
                self.engine,
                self._tokenizer,
                sampling_of(self._config),
                num_generations=num_generations,
                run_seed=self._config.seed,
                version=version,
                on_answer=self._clock.counted(len(prompts) * num_generations, on_answer),
                interruption=self._interruption,
                generate=self._ahead.at_once if self._ahead is not None else None,
            )
        self.proofs.check_groups(groups)
        return groups

    def sample_ahead(
        self, upcoming: Sequence[tuple[int, Sequence[Prompt]]], num_generations: int, version: int
    ) -> list[RolloutGroup]:
        """The first of these generations. The engine began it some steps ago, and begins the last one now."""
        ahead = self._start_canary()
        for number, prompts in upcoming:
            if number not in ahead:
                self._begin(ahead, number, prompts, num_generations)
        number, prompts = upcoming[0]
        with self._clock.phase("generate"):
            answers = ahead.take(number)
        groups = groups_from(prompts, answers, num_generations, self._tokenizer)
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        check_staleness(completions, version, self._config.max_staleness)
        self.proofs.check_groups(groups)
        return groups

    def _begin(self, ahead: GenerationsAhead, number: int, prompts: Sequence[Prompt], num_generations: int) -> None:
        requests = requests_for(
            prompts,
            sampling_of(self._config),
            num_generations=num_generations,
            run_seed=self._config.seed,
            # Not the version at hand: several generations may begin at the same version, and each needs seeds of its own.
            version=number * self._config.steps_a_generation,
        )
        if self._interruption is not None:
            check_whole(requests, ahead.engine)
        ahead.begin(number, lambda generate: answers_to(requests, generate, self._tokenizer, self._interruption))

    def _start_canary(self) -> GenerationsAhead:
        assert self._ahead is not None
        self.proofs.start_canary(self._ahead.engine, self._limit_ahead)
        return self._ahead

    def _finish_canary(self, version: int) -> None:
        if not self.proofs.canary_is_due:
            # The engine was lost after it was asked.
            self.push(version)
            self._start_canary()
        self.proofs.check_canary_scores(version)

    # ---- score: on every rank ---------------------------------------------------------------------------------------

    def score(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Groups with their rewards; each rank scores its share. Every rank calls."""
        with self._clock.phase("rewards"):
            return self._scorer.finish(self._scored(groups, state))

    def _scored(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        if self._ranks.count == 1:
            return self._scorer.score(groups, state, self._reward_log)

        def part() -> dict[str, Any]:
            # A rank without groups does not call the reward functions.
            own, log = share_of(groups, self._ranks), RewardLog()
            return {
                "scores": scores_to_wire(self._scorer.score(own, state, log) if own else []),
                "metrics": log.values(),
            }

        parts = self._ranks.share("rewards", part)
        for found in parts:
            self._reward_log.add(found["metrics"])
        return scores_from_wire([found["scores"] for found in parts], groups)

    def sample_and_score(self, prompts: Sequence[Prompt], num_generations: int, state: Any) -> list[RolloutGroup]:
        """Push, sample, and score each group while the engine samples others. Scores count only after all answers are checked."""

        def work() -> list[RolloutGroup]:
            self.push(state.global_step)
            return self._sample_scored(prompts, num_generations, state)

        return self._scorer.finish(self.recovery.run(work))

    def _sample_scored(self, prompts: Sequence[Prompt], num_generations: int, state: Any) -> list[RolloutGroup]:

        def score(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
            return self._scorer.score(groups, state, log)

        with EarlyScores(prompts, num_generations, self._tokenizer, score) as early:
            groups = self.sample(prompts, num_generations, state.global_step, early.answered)
            with self._clock.phase("rewards"):
                return early.take(groups, self._reward_log)

    # ---- prove and log ---------------------------------------------------------------------------------------------

    def prove(self, gap: GapStats, generation: Generation, step: int, *, record: bool = True) -> None:
        """Check the parity gap of a whole generation and write it to the receipt. Called on the rank that holds the engine.

        Args:
            record: write the receipt's line; there is one per generation.

        Raises:
            ProofError: tokens are missing, or the gap is over a limit.
        """
        version = generation.version
        if self._ahead is not None:
            if not record:
                # The gap is checked once per generation, together with the canary. The policy does not change before that.
                return
            self.recovery.run(lambda: self._finish_canary(version))
        sampled, fresh = generation.sampled_tokens, generation.fresh_tokens
        self.proofs.check_gap(gap, fresh, generation.completions, version)
        if record:
            self.proofs.write(gap, sampled, sampled - fresh, step, version)

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """Metrics of scored groups, with the metrics that reward functions logged since the last call."""
        metrics, self.shown_group = rollout_metrics(groups), groups[0]
        if self._config.max_staleness:
            metrics |= staleness_metrics(groups, version)
        if self._interruption is not None:
            metrics |= interruption_metrics(groups)
        return metrics | self._reward_log.take(own=metrics)

    def abandon_pending(self) -> None:
        """Abandon the generations that the engine is sampling ahead. They are sampled again where they are needed."""
        if self._ahead is not None:
            self._ahead.forget()

    def remember_receipt(self, checkpoint: Path) -> None:
        """Write the hash of the receipt's last line into a checkpoint."""
        if self._ranks.owner:
            self.proofs.remember_receipt(checkpoint)

    def close(self) -> None:
        """Abandon what the engine samples ahead, and close the engine if it was started here."""
        self.abandon_pending()
        if self._owns_engine and self._engine is not None:
            self._engine.close()
