"""Checks of the kept ids of a completion: they must fit the request and the tokens.

`engines/answers.py` makes these checks for every answer. They need no logits. The trainer has the logits and later compares the
sets with its own sets (`watch/kept_sets.py`).
"""

from __future__ import annotations

import numpy as np

from lockstep.engines.filters.distribution import Sampling
from lockstep.engines.protocol import Completion
from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import chosen
from lockstep.tokens.kept_ids import KeptIds

# Top-k keeps every id whose logit equals the k-th largest. In bfloat16 many logits are equal: at most so many, or this share of k.
_TIES, _SHARE_OF_TIES = 256, 0.25
# Rounding of a log-prob in float32.
_ROUNDING = 1e-3


def check_kept_ids(sampling: Sampling, answer: Completion, vocab_size: int | None) -> None:
    """Check that a completion has one set for each sampled token, and that the sets follow the rules of the filters.

    Args:
        vocab_size: number of logits of the model; None if the caller does not know it.

    Raises:
        ProofError: there are sets without a filter, or no sets with a filter; their number is wrong; the ids of a set are not
            ascending or not in the vocabulary; a sampled token is outside its set; a set is larger than the filters allow; a set
            has one id, and the log-prob of this id is not 0.
        InputError: a filter kept more ids than `max_kept_ids` for a token. The engine has then left the set empty.
    """
    kept = answer.kept_ids
    if kept is None:
        if sampling.is_filtered:
            raise _kept_ids_error(answer, "does not report which ids its top-k, top-p or min-p kept")
        return
    if not sampling.is_filtered:
        raise _kept_ids_error(answer, "has kept ids, but its sampling settings have no filter")
    if len(kept) != len(answer.sampled_places):
        raise _kept_ids_error(
            answer, f"has {len(answer.sampled_places)} sampled tokens and {len(kept)} sets of kept ids"
        )
    sizes = kept.sizes
    if not sizes.all() or sizes.max() > sampling.max_kept_ids:
        raise InputError(
            f"request {answer.key}: the filters kept more than max_kept_ids={sampling.max_kept_ids} ids for one token. Set top_k "
            "too, which bounds the sets, or raise max_kept_ids"
        )
    _check_ids(answer, kept, vocab_size)
    _check_rules(sampling, answer, kept)


def _check_ids(answer: Completion, kept: KeptIds, vocab_size: int | None) -> None:
    if kept.ids.min() < 0 or (vocab_size is not None and kept.ids.max() >= vocab_size):
        raise _kept_ids_error(answer, f"has kept ids from {kept.ids.min()} to {kept.ids.max()}, outside the vocabulary")
    is_ascending = np.diff(kept.ids) > 0
    is_ascending[kept.ends[:-1] - 1] = True
    if not is_ascending.all():
        raise _kept_ids_error(answer, "has a set of kept ids that are not ascending")
    own = kept.ids == np.repeat(chosen(answer.token_ids, answer.sampled), kept.sizes)
    outside = np.flatnonzero(~np.logical_or.reduceat(own, kept.ends - kept.sizes))
    if len(outside):
        raise _kept_ids_error(
            answer, f"has {len(outside)} tokens outside their own set of kept ids; the first one is token {outside[0]}"
        )


def _check_rules(sampling: Sampling, answer: Completion, kept: KeptIds) -> None:
    sizes, logprobs = kept.sizes, answer.sampled_logprobs.astype(np.float64)
    if sampling.top_k and sizes.max() > sampling.top_k + max(_TIES, _SHARE_OF_TIES * sampling.top_k):
        raise _kept_ids_error(answer, f"has a set of {sizes.max()} kept ids, with top_k={sampling.top_k}")
    if (np.abs(logprobs[sizes == 1]) > _ROUNDING).any():
        raise _kept_ids_error(answer, "has a set of one kept id, and the log-prob of that id is not 0")
    if sampling.min_p > 0 and (logprobs < np.log(sampling.min_p / sizes) - _ROUNDING).any():
        # The most probable of n kept ids has a probability of at least 1 / n.
        raise _kept_ids_error(answer, f"has a token that is less likely than min_p={sampling.min_p} allows")


def _kept_ids_error(answer: Completion, found: str) -> ProofError:
    return ProofError(
        "kept_ids",
        f"request {answer.key} {found}",
        "the engine did not apply the filters of the request, lost its record of the kept ids, or mixed up requests",
        "start the engine as Lockstep starts it, on vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0); if it was started so, "
        "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
    )
