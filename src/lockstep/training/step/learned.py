"""Gives the proof of what is learned (`watch/custody.py`) the seals of a generation, and the tensors of each pack.

`run/loop.py` makes the proof when a generation has been scored. `training/step/update.py` compares each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.seal import row_of, words_of
from lockstep.to_device import on_host
from lockstep.tokens.digest import digest_of
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.objective import Scores, TokenBatch
from lockstep.watch.custody import Entering, Sampled, SampledTokens, words_error


def sampled_tokens(
    groups: Sequence[RolloutGroup], old_logps: Scores | None, size: int, *, own_forward: bool
) -> SampledTokens:
    """The proof of a generation, from the seals of its scored rollouts.

    Args:
        old_logps: log-probs of the policy before the first step, by name of the branch; None: nothing was scored then.
        size: completions per micro-batch.
        own_forward: as in `SampledTokens`.

    Raises:
        ProofError: a rollout has no seal, or its text or its row is not the one that it was sealed with.
    """
    sampled: dict[str, Sampled] = {}
    names: list[list[str]] = []
    for group in groups:
        row = row_of(group.prompt)
        for rollout in group.rollouts:
            prompt, sample = rollout.key.prompt_id, rollout.key.sample
            if rollout.seal is None:
                raise words_error(prompt, sample, "was not sampled by this run: it has no seal")
            if rollout.seal.words != words_of(rollout.key, rollout.text, row):
                raise words_error(
                    prompt,
                    sample,
                    "was scored with another text or row than its own, or a reward function has changed its row",
                )
            for name, (ids, logps) in rollout.seal.tokens.items():
                old = None if old_logps is None else digest_of(name, old_logps[name])
                sampled[name] = Sampled((prompt, sample), ids, logps, old)
            names.append(list(rollout.seal.tokens))
    parts = [[name for own in names[start : start + size] for name in own] for start in range(0, len(names), size)]
    return SampledTokens(sampled, parts, own_forward=own_forward)


def check_entering(proof: SampledTokens, batch: TokenBatch) -> None:
    """Compare a pack just before its loss.

    Raises:
        ProofError: as in `SampledTokens.check`.
    """
    pack = batch.pack
    logps = batch.behaviour_logps, batch.old_logps, batch.logps
    ids = pack.input_ids, pack.predictors, pack.targets, pack.position_ids
    input_ids, predictors, targets, positions, behaviour, old_logps, own_logps = (
        tensor.numpy() for tensor in on_host((*ids, *logps))
    )
    proof.check(
        Entering(
            names=[s.name for s in batch.sequences],
            lengths=[s.length for s in batch.sequences],
            input_ids=input_ids,
            # The positions of a picture's parts are not places in the sequence; the gap proves them.
            position_ids=positions if pack.pictures is None else None,
            ends=None if pack.ends is None else pack.ends.numpy(),
            predictors=predictors,
            targets=targets,
            behaviour=behaviour,
            old_logps=old_logps,
            logps=own_logps,
        )
    )


def check_aside(proof: SampledTokens, sequences: Sequence[TrainingSequence]) -> None:
    """Compare sequences that were scored before the first step and have no gradient.

    Raises:
        ProofError: as in `SampledTokens.check`.
    """
    for s in sequences:
        places = np.arange(len(s.path), dtype=np.int64)
        ids = digest_of(s.name, s.path, places, s.predictors, s.sampled_ids)
        proof.check_aside(s.name, ids, digest_of(s.name, s.behaviour_logps), s.old_logps)
