"""The trainer's log-probs of given tokens, one plain sequence at a time: no packing, no shared prefixes.

It is a second way to compute the same numbers, for proofs that must not depend on the fast path: the canary, the
decomposition of a gap, and `lockstep verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.contract.sampling import Sampling
from lockstep.errors import LockstepError, foreign_errors
from lockstep.images.pictures import PromptPictures, model_inputs
from lockstep.models.adapters import causal_model, head_name
from lockstep.models.autocast import Precision, head_dtype
from lockstep.models.logits import transformed_logits
from lockstep.models.policy import fp32_head_product
from lockstep.shards.model import sharded
from lockstep.sync.push import weights_of
from lockstep.to_device import sent
from lockstep.tokens.arrays import Ids, small_ids, whole_numbers
from lockstep.tokens.kept_ids import KeptIds, joined_kept_ids

# Largest size of one tensor of float32 logits, in bytes. Up to three such tensors exist at the same time.
LOGITS_BYTES = 64 * 2**20

# The weights' own dtype, without autocast.
OWN_DTYPE = Precision()


@torch.no_grad()
def sequence_logits(model: PreTrainedModel, ids: Sequence[int], precision: Precision = OWN_DTYPE) -> torch.Tensor:
    """(len(ids), V) float32 logits of one sequence, in evaluation mode. They are in one tensor, without a limit on its size."""
    return torch.cat(list(logit_chunks(model, ids, 0, precision)))


@foreign_errors("the trainer could not score a completion")
@torch.no_grad()
def completion_logps(
    model: PreTrainedModel,
    prompt_ids: Sequence[int] | Ids,
    token_ids: Sequence[int] | Ids,
    sampling: Sampling | Distribution,
    precision: Precision = OWN_DTYPE,
    kept: KeptIds | None = None,
    pictures: PromptPictures | None = None,
) -> torch.Tensor:
    """(len(token_ids),) log-probs of a completion under the distribution that `sampling` describes.

    The log-prob is −inf for a token that the sampling settings exclude. No tensor of logits is larger than `LOGITS_BYTES`, for
    any length of the completion.

    Args:
        sampling: a `Distribution` if the settings have a grammar or `min_tokens`.
        kept: one set of ids for each token, among which the token is scored; None: the filters are applied again.
        pictures: the pictures of the prompt and the completion. The model's own forward computes them and the positions.

    Raises:
        ProofError: the completion does not follow the grammar.
        LockstepError: `sampling` is a `Sampling`, and its settings need more than itself.
    """
    if isinstance(sampling, Sampling) and (sampling.grammar is not None or sampling.min_tokens):
        raise LockstepError(
            "a grammar or min_tokens is scored under a Distribution, which knows the grammar and end ids"
        )
    distribution = sampling if isinstance(sampling, Distribution) else Distribution(sampling)
    prompt, tokens = np.asarray(prompt_ids).tolist(), np.asarray(token_ids).tolist()
    if distribution.is_tempered_only and kept is None:
        return _tempered(model, prompt, tokens, distribution.sampling.temperature, precision, pictures)
    masks = distribution.masks(tokens)
    scores: list[torch.Tensor] = []
    for logits in logit_chunks(model, [*prompt, *tokens[:-1]], len(prompt) - 1, precision, pictures):
        for row in logits.cpu():
            position = len(scores)
            logps = distribution.logprobs(row, prompt, tokens[:position], masks, kept)
            # This is a copy, because a view would keep the whole row in memory.
            scores.append(logps[tokens[position]].clone())
    return torch.stack(scores)


def _tempered(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    temperature: float,
    precision: Precision,
    pictures: PromptPictures | None,
) -> torch.Tensor:
    """`completion_logps` where nothing but the temperature shapes the logits: many rows at a time, on the model's device."""
    targets, scores = torch.tensor(tokens), []
    for logits in logit_chunks(model, [*prompt, *tokens[:-1]], len(prompt) - 1, precision, pictures):
        own, targets = sent(targets[: len(logits)], logits.device), targets[len(logits) :]
        scores.append((logits / temperature).log_softmax(-1).gather(1, own[:, None])[:, 0])
    return torch.cat(scores).cpu()


def sampled_logps(
    model: PreTrainedModel,
    completion: Completion,
    distribution: Distribution,
    precision: Precision,
    *,
    kept: bool = True,
) -> torch.Tensor:
    """The trainer's log-probs of a completion's sampled tokens.

    Args:
        kept: whether to score them among the engine's kept ids, if there are any.
    """
    sets, places = sets_of_all(completion) if kept else None, completion.sampled_places
    if not len(places):
        # A rollout may have ended before its first sampled token.
        return torch.zeros(0)
    # Nothing reads the ids after the last sampled one, and `Completion.pictures` has no pictures of them.
    count = int(places[-1]) + 1
    sets = None if sets is None else sets.part(0, count)
    ids = completion.token_ids[:count]
    logps = completion_logps(model, completion.prompt_ids, ids, distribution, precision, sets, completion.pictures)
    return logps[torch.tensor(places)]


def sets_of_all(completion: Completion) -> KeptIds | None:
    """One set for each id of a completion. Inserted ids, whose log-probs nobody reads, get the id itself as their set."""
    kept = completion.kept_ids
    if kept is None or completion.sampled is None:
        return kept
    sets, places = [], iter(range(len(kept)))
    for token, sampled in zip(completion.token_ids, completion.sampled, strict=True):
        place = next(places) if sampled else 0
        sets.append(kept.part(place, place + 1) if sampled else KeptIds(small_ids([token]), whole_numbers([1])))
    return joined_kept_ids(sets)


def logit_chunks(
    model: PreTrainedModel,
    ids: Sequence[int],
    first: int,
    precision: Precision,
    pictures: PromptPictures | None = None,
) -> Iterator[torch.Tensor]:
    """(rows, V) float32 logits of all positions from one on, a few rows at a time.

    Args:
        first: the first position.
    """
    inner = causal_model(model)
    row = sent(torch.tensor([list(ids)]), inner.device)
    was_training, shards = model.training, sharded(model)
    model.eval()
    try:
        with nullcontext() if shards is None else shards.looking():
            with in_precision(inner, precision):
                shown = {} if pictures is None else model_inputs([pictures], row)
                hidden = inner.base_model(input_ids=row, use_cache=False, **shown).last_hidden_state[0]
                hidden = hidden[first:]
            product = _head_product(model, precision)
            vocabulary = inner.get_output_embeddings().weight.shape[0]
            for rows in hidden.split(max(1, LOGITS_BYTES // (4 * vocabulary))):
                with in_precision(inner, precision):
                    logits = product(rows)
                yield transformed_logits(inner.config.get_text_config(), logits).float()
    finally:
        model.train(was_training)


def casting_once(model: PreTrainedModel, precision: Precision) -> AbstractContextManager[Any]:
    """A context in which forwards without gradient share one cast of each weight. The weights may not change in it."""
    return in_precision(causal_model(model), precision)


def in_precision(model: PreTrainedModel, precision: Precision) -> AbstractContextManager[Any]:
    """A context in which forwards of the model, without its output head, compute in a precision."""
    return torch.autocast(model.device.type, precision.autocast) if precision.autocast else nullcontext()


def _head_product(model: PreTrainedModel, precision: Precision) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that computes (rows, V) logits from (rows, width) hidden states."""
    head = causal_model(model).get_output_embeddings()
    if precision.head is None:
        return lambda hidden: head(hidden.to(head_dtype(head, hidden.dtype)))
    if sharded(model) is not None:
        # The head is whole here, and a source would gather it on the owner only.
        return partial(fp32_head_product, head)
    source, name = weights_of(model), head_name(model)
    weight, beside = source.tensor(name).to(precision.head), name.removesuffix("weight") + "bias"
    bias = source.tensor(beside).to(precision.head) if beside in source.names else None

    def product(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)

    return product
