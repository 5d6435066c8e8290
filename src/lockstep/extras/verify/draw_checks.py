"""The draws proof on a stage: more tokens than a few steps sample (`lockstep verify`, and its self-test)."""

from __future__ import annotations

import itertools
import math

from lockstep.errors import ProofError
from lockstep.extras.verify.rows import Row
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.driver import collect
from lockstep.tokens.end import end_ids
from lockstep.training.config.sampling import sampling_of
from lockstep.training.step.generation import sequences_of
from lockstep.training.step.score_all import score_all
from lockstep.watch.draws import FALSE_ALARM, DrawEvidence
from lockstep.watch.turns import Record

# Tokens of `lockstep verify`: enough for coarse faults. Tokens of the self-test: enough for a temperature of 1.05, even if the
# model prefers few tokens.
_TOKENS, _SELF_TEST_TOKENS = 512, 65_536
_SAMPLES = 32


def draws(stage: Stage) -> list[Row]:
    """Some hundred sampled tokens are draws from the distributions that the trainer computes for them."""
    return [_row(stage, _TOKENS)]


def many_draws(stage: Stage) -> list[Row]:
    """The same with the tokens of a small run, or fewer if the proof stops before."""
    return [_row(stage, _SELF_TEST_TOKENS)]


def _row(stage: Stage, most: int) -> Row:
    evidence, tokens, alarm = DrawEvidence(), 0, ""
    sampling = sampling_of(stage.config, stage.tokenizer, end_ids(stage.model, stage.tokenizer))
    for turn in itertools.count():
        if tokens >= most or alarm:
            break
        groups = collect(
            stage.prompts,
            stage.engine,
            stage.tokenizer,
            sampling,
            Record,
            num_generations=_SAMPLES,
            run_seed=turn,
            version=stage.version,
        )
        evidence_of_turn = stage.trainer.watch.evidence()
        score_all(stage.trainer.loop.policy(), sequences_of(groups, stage.version), stage.config, evidence_of_turn)
        stats = evidence_of_turn.draws
        tokens += stats.tokens
        evidence.add(stats)
        try:
            evidence.check(stage.version, stats)
        except ProofError as error:
            alarm = error.cause
    return Row(
        "draws",
        f"evidence against fair draws {math.exp(evidence.log_evidence):.1e}, {tokens} tokens",
        f"{1 / FALSE_ALARM:.0e}",
        not alarm,
        alarm,
    )
