"""The proof that an evaluation is one of the evaluation set, and the completions of it that the policy scores again.

`run/loop.py` calls it. The gap and the draws of the drawn completions are judged by `training/generate/proofs/proofs.py`, as
in training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.watch.inputs import data_digest

_logger = logging.getLogger(__name__)

# One completion in this many is scored again, and at least this many completions.
_ONE_IN, _AT_LEAST = 4, 64


def check_evaluated(groups: Sequence[RolloutGroup], digest: str, num_generations: int) -> None:
    """Check that groups are those of the evaluation set: every row once, in its order, with all of its completions.

    Args:
        digest: of the evaluation set's prompts (`data_digest`), from when the trainer was made.

    Raises:
        ProofError: rows are missing, were changed, or are of other data; or a row has another number of completions.
    """
    odd = [g.prompt.prompt_id for g in groups if len(g.rollouts) != num_generations]
    if odd:
        raise _wrong(f"row {odd[0]} was evaluated with another number of completions than {num_generations}")
    if data_digest(group.prompt for group in groups) != digest:
        names = ", ".join(group.prompt.prompt_id for group in groups[:3])
        raise _wrong(f"the {len(groups)} rows that were evaluated ({names}, …) are not those of the evaluation set")


def drawn_sequences(sequences: Sequence[TrainingSequence], version: int, seed: int) -> list[TrainingSequence]:
    """The completions of an evaluation that the policy scores again, in their order.

    Args:
        version: weight version that sampled them; it and the seed draw the completions.
    """
    count = min(len(sequences), max(_AT_LEAST, len(sequences) // _ONE_IN))
    drawn = np.random.default_rng((seed, version)).choice(len(sequences), count, replace=False)
    return [sequences[i] for i in np.sort(drawn)]


def count_seen(train: Sequence[Prompt], evaluation: Sequence[Prompt], *, tell: bool) -> int:
    """The number of evaluation prompts whose token ids and pictures are those of a training prompt.

    Args:
        tell: whether to print a warning if there are some.
    """
    known = {_content(prompt) for prompt in train}
    seen = [prompt.prompt_id for prompt in evaluation if _content(prompt) in known]
    if seen and tell:
        _logger.warning(
            f"{len(seen)} of {len(evaluation)} evaluation prompts are training prompts too ({seen[0]} first), "
            "so the evaluation is not held out: remove them from one of the two datasets"
        )
    return len(seen)


def _content(prompt: Prompt) -> tuple[bytes, tuple[str, ...]]:
    """What two prompts have in common if a model cannot tell them apart."""
    return prompt.ids.tobytes(), () if prompt.pictures is None else prompt.pictures.digests


def _wrong(found: str) -> ProofError:
    return ProofError(
        "evaluation",
        found,
        "the evaluation set was changed after the trainer was made, or something replaced its rows or its completions",
        "give the evaluation set as eval_dataset when the trainer is made, and let nothing replace it; otherwise this is a defect "
        "of Lockstep: report it",
    )
