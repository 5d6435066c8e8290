"""Where a trainer's rollouts come from: the engine that one rank holds, brought to the policy's weights, sampled and proven.

Comes from: the trainer, on every rank alike. Gives back: scored groups, the same on every rank. The rank that holds the engine
works for all of them; reward functions run on every rank, each on its share of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from lockstep.rollouts.wire import groups_from_wire, groups_to_wire, scores_from_wire, scores_to_wire
from lockstep.training.config.interruption import interruption_of
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.sampling import sampling_of
from lockstep.training.generate.engine import shake_hands, start_engine
from lockstep.training.generate.metrics import interruption_metrics, rollout_metrics, staleness_metrics
from lockstep.training.generate.proofs import Proofs
from lockstep.training.generate.recovery import Recovery
from lockstep.training.generate.scorer import Scorer
from lockstep.training.step.distributed import share_of
from lockstep.training.step.generation import Generation

# Completions that an evaluation asks an engine for in one call.
_EVALUATION_PART = 2048


class RolloutSource:
    """An engine, the proofs on it, and the rewards of what it samples.

    Args:
        policy: the trained model; only read.
        scorer: gives groups their rewards.
        given: a running engine that stays the caller's, or None to start one.
        max_model_len: the context that an engine is started with.
        longest: prompt and completion together, at most.

    Raises:
        InputError: the engine cannot be started or found; several ranks with an engine in this process that cannot serve them.
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
        self._ranks.on_owner("engine", lambda: self._open(model_path, max_model_len, longest, compute_dtype))

    def _open(self, model_path: str, max_model_len: int, longest: int, compute_dtype: torch.dtype) -> None:
        config = self._config
        engine = self._engine or start_engine(config, model_path, self._tokenizer, max_model_len, self._ranks.count)
        self._engine = engine
        try:
            shake_hands(engine, self._policy, model_path, config.engine_torch_dtype, longest, config.engine_head_dtype)
            self._proofs = Proofs(self._policy, engine, config, compute_dtype, self._clock)
            if config.max_staleness:
                # The config allows it in server mode alone; a given engine may be another.
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
        """What repeats work that lost its engine."""
        assert self._recovery is not None
        return self._recovery

    @property
    def losses(self) -> int:
        """How often the engine was lost; 0 on ranks that do not hold it."""
        return self._recovery.losses if self._recovery is not None else 0

    @property
    def _limit_ahead(self) -> float:
        """Seconds for what waits in the engine behind generations that were begun before it."""
        return self._config.vllm_server_timeout * (self._config.generations_ahead + 1)

    def _distrust(self) -> None:
        self.proofs.distrust()
        if self._ahead is not None:
            self._ahead.forget_unfinished()

    def start(self, folder: Path, step: int) -> None:
        """Open the receipt, and prove the engine before the first rollout is paid for."""
        self._ranks.on_owner("start", lambda: self.recovery.run(lambda: self.proofs.start(folder, step)))
        self._proven = True

    def sync(self, version: int) -> None:
        """Push the policy's weights as `version`.

        Always, even where the version would not change: a version does not see weights that were set by hand, and the reset of
        caches makes every generation start alike, in a run that goes on too.
        """
        self._ranks.on_owner("sync", lambda: self._push(version))

    def _push(self, version: int) -> None:
        with self._ahead.held() if self._ahead is not None else nullcontext():
            self.proofs.sync(version)

    def rollout(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        state: Any,
        upcoming: Sequence[tuple[int, Sequence[Prompt]]] = (),
    ) -> list[RolloutGroup]:
        """Sample and score completions of prompts with the policy as it is now.

        Args:
            state: the trainer's; its step is the version, and reward functions get it.
            upcoming: generations by number, with their prompts, that are to be under way from now on; the first is this one,
                and its tokens may be `max_staleness` versions old. Without, all tokens are the policy's own as it is now.

        Raises:
            ProofError: trainer and engine do not agree.
            LockstepError: the engine was lost and did not come back in time.
        """
        version = state.global_step
        if not self._proven:
            # An evaluation before training: its tokens are the first, and they are shown to be the policy's too.
            self._ranks.on_owner("prove", lambda: self.recovery.run(lambda: self.proofs.prove_engine(version)))
            self._proven = True
        if self._config.overlap_rewards:
            return self._scorer.finish(self.recovery.run(lambda: self._sample_scored(prompts, num_generations, state)))
        groups = self._ranks.from_owner(
            "sample",
            lambda: self.recovery.run(
                lambda: (
                    self._sample_ahead(upcoming, num_generations, version)
                    if upcoming
                    else self._sample(prompts, num_generations, version)
                )
            ),
            groups_to_wire,
            lambda data: groups_from_wire(data, prompts),
        )
        with self._clock.phase("rewards"):
            return self._scorer.finish(self._scored(groups, state))

    def _scored(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Every group with its scores, each rank scoring its share."""
        if self._ranks.count == 1:
            return self._scorer.score(groups, state, self._reward_log)

        def part() -> dict[str, Any]:
            # Reward functions need not know what to do with nothing.
            own, log = share_of(groups, self._ranks), RewardLog()
            return {
                "scores": scores_to_wire(self._scorer.score(own, state, log) if own else []),
                "metrics": log.values(),
            }

        parts = self._ranks.share("rewards", part)
        for found in parts:
            self._reward_log.add(found["metrics"])
        return scores_from_wire([found["scores"] for found in parts], groups)

    def rollout_in_parts(self, prompts: Sequence[Prompt], num_generations: int, state: Any) -> list[RolloutGroup]:
        """`rollout` of many prompts, since one call to an engine has a time limit."""
        size = max(_EVALUATION_PART // num_generations, 1)
        parts = range(0, len(prompts), size)
        return [
            group for start in parts for group in self.rollout(prompts[start : start + size], num_generations, state)
        ]

    def _sample_scored(self, prompts: Sequence[Prompt], num_generations: int, state: Any) -> list[RolloutGroup]:
        """Sample, and score each group while others are sampled; what is scored is taken only once all of it is checked."""

        def score(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
            return self._scorer.score(groups, state, log)

        with EarlyScores(prompts, num_generations, self._tokenizer, score) as early:
            groups = self._sample(prompts, num_generations, state.global_step, early.answered)
            with self._clock.phase("rewards"):
                return early.take(groups, self._reward_log)

    def _sample(
        self, prompts: Sequence[Prompt], num_generations: int, version: int, on_answer: OnAnswer | None = None
    ) -> list[RolloutGroup]:
        self._push(version)
        with self._clock.phase("generate"):
            groups = collect(
                prompts,
                self.engine,
                self._tokenizer,
                sampling_of(self._config),
                num_generations=num_generations,
                run_seed=self._config.seed,
                version=version,
                on_answer=on_answer,
                interruption=self._interruption,
                generate=self._ahead.at_once if self._ahead is not None else None,
            )
        self.proofs.check_groups(groups)
        return groups

    def _sample_ahead(
        self, upcoming: Sequence[tuple[int, Sequence[Prompt]]], num_generations: int, version: int
    ) -> list[RolloutGroup]:
        """The first of these generations; it was begun some steps ago, the last is begun now."""
        ahead = self._push_and_ask(version)
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
            # Of the generation itself, since several may be begun at one version.
            version=number * self._config.steps_a_generation,
        )
        if self._interruption is not None:
            check_whole(requests, ahead.engine)
        ahead.begin(number, lambda generate: answers_to(requests, generate, self._tokenizer, self._interruption))

    def _push_and_ask(self, version: int) -> GenerationsAhead:
        assert self._ahead is not None
        self._push(version)
        self.proofs.start_canary(self._ahead.engine, self._limit_ahead)
        return self._ahead

    def _finish_canary(self, version: int) -> None:
        if not self.proofs.canary_is_due:
            # The engine was lost after it was asked.
            self._push_and_ask(version)
        self.proofs.check_canary_scores(version)

    def prove(self, gap: GapStats, generation: Generation, step: int, *, record: bool = True) -> None:
        """Pass or stop on the gap of a whole generation, and write it down. On the rank that holds the engine.

        Args:
            record: write the receipt's line; there is one a generation.

        Raises:
            ProofError: tokens are missing, or the gap is over a limit.
        """
        version = generation.version
        if self._ahead is not None:
            if not record:
                # Once a generation, with the canary, is enough: nothing moves before.
                return
            self.recovery.run(lambda: self._finish_canary(version))
        sampled, fresh = generation.sampled_tokens, generation.fresh_tokens
        self.proofs.check_gap(gap, fresh, generation.completions, version)
        if record:
            self.proofs.write(gap, sampled, sampled - fresh, step, version)

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """What is logged of scored groups, with what reward functions have logged since this was last asked."""
        metrics = rollout_metrics(groups)
        if self._config.max_staleness:
            metrics |= staleness_metrics(groups, version)
        if self._interruption is not None:
            metrics |= interruption_metrics(groups)
        return metrics | self._reward_log.take(own=metrics)

    def abandon_pending(self) -> None:
        """Give up what is under way; it is begun anew where it is needed."""
        if self._ahead is not None:
            self._ahead.forget()

    def remember_receipt(self, checkpoint: Path) -> None:
        """Leave the receipt's head in a checkpoint."""
        if self._ranks.owner:
            self.proofs.remember_receipt(checkpoint)

    def close(self) -> None:
        """Release the engine, if it was started here, and what it was asked for ahead in any case."""
        self.abandon_pending()
        if self._owns_engine and self._engine is not None:
            self._engine.close()
