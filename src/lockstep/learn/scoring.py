"""The policy's log-probs of sampled tokens, and the forwards that all ranks of a sharded model make together.

A whole (tokens × vocabulary) matrix is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.devices import sent
from lockstep.errors import InputError, LockstepError, foreign_errors
from lockstep.learn.attention.blocks import TreeAttention
from lockstep.learn.attention.flex import FLEX, block_mask
from lockstep.learn.attention.tree import TREE, no_mask, passes_trees_on
from lockstep.learn.experts import Routing, routing_of
from lockstep.learn.filters import IdRules, RowRules, moves_of_kept
from lockstep.learn.id_classes import Classes, TokenClasses
from lockstep.learn.pack import Pack, pack_rows, pack_sequences
from lockstep.learn.recomputation import layers_computed_twice, products_kept
from lockstep.learn.sequence import TrainingSequence, flat
from lockstep.learn.token_logps import DrawSums, Head, KeptSets, kept_logits, kept_logps, token_logps
from lockstep.models.adapters import causal_model
from lockstep.models.arithmetic import autocast_dtype, changes_logits, head_dtype, transformed_logits
from lockstep.models.policy import fp32_head_product, keeps_state
from lockstep.shards.model import ShardedModel
from lockstep.tokens.arrays import Ids, reals, whole_numbers


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of a pack's N tokens.

    Attributes:
        logps: (N,) float32 natural-log probabilities under the sampling distribution, with gradient.
        entropies: (N,) float32 entropy of that distribution in nats, with gradient only if it was requested.
        values: (N,) float32 the critic's value before each token, with gradient, if there is a critic.
        support: (N,) int64 number of ids that could be sampled as each token; None: the sampling distribution has no
            filter, no grammar and no ban.
        draws: sums over each token's distribution, on which the draws proof bets; None: they were not asked for.
        routing: how the routers distribute the pack's positions over experts; None: it was not asked for.
    """

    logps: torch.Tensor
    entropies: torch.Tensor
    values: torch.Tensor | None = None
    support: torch.Tensor | None = None
    draws: DrawSums | None = None
    routing: Routing | None = None


def check_scorable(model: PreTrainedModel) -> None:
    """Refuse models for which this module would compute wrong log-probs."""
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and (
        config._attn_implementation not in ("sdpa", TREE) or not model._supports_attention_backend
    ):
        raise InputError(
            f"the model's config has attn_logit_softcapping={cap}, and its attention "
            f"{config._attn_implementation!r} does not cap scores here; leave attn_implementation out"
        )
    attends_in_trees = not keeps_state(model.config) and model._supports_attention_backend
    if attends_in_trees and config._attn_implementation not in ("sdpa", TREE, FLEX):
        # The other implementations add a boolean mask to the scores, or cannot take a mask.
        raise InputError(
            f"attn_implementation is {config._attn_implementation!r}; packed batches need 'sdpa'"
        )


def why_plain_rows(model: PreTrainedModel, max_length: int) -> str | None:
    """The reason why a model cannot attend within a tree of tokens and gets one row per sequence. None: it can.

    A layer that uses a state instead of a mask, or that makes a mask itself, would see other branches.
    """
    config = model.config.get_text_config()
    if keeps_state(model.config):
        return "it keeps a state from token to token"
    if not model._supports_attention_backend:
        return f"transformers cannot give {type(model).__name__} another attention"
    if model.config._attn_implementation == TREE and not passes_trees_on(model):
        return f"the layers of {type(model).__name__} do not pass a pack's tree on to their attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of kind {', '.join(odd)}"
    window = getattr(config, "sliding_window", None)
    if (not kinds or "sliding_attention" in kinds) and window is not None and window < max_length:
        return f"it attends within {window} tokens, and sequences may have {max_length}"
    return None


def score_pack(
    model: PreTrainedModel,
    pack: Pack,
    temperature: float,
    chunk_size: int,
    *,
    entropy_gradient: bool = False,
    fp32_head: bool = False,
    critic: torch.nn.Module | None = None,
    rules: IdRules | None = None,
    draws: Classes | None = None,
    routing: bool = False,
) -> TokenScores:
    """Log-prob and entropy of every scored token of a pack, under the distribution that it was sampled from.

    Args:
        model: a causal language model, with or without an adapter. Its head computes only the positions that predict.
        temperature: of sampling. It divides the logits.
        chunk_size: rows of logits in memory at a time. Memory grows with it; results do not depend on it.
        entropy_gradient: whether entropies are part of the loss.
        fp32_head: whether the head computes in float32, outside autocast.
        critic: maps hidden states (rows, width) to values (rows, 1).
        rules: the run's sampling settings; None: only the temperature is set. If they have a filter that depends on the
            logits, the sequences must have kept ids.
        draws: the classes of ids that the draws proof asks for. With them, what that proof needs is computed for the
            tokens of the picked sequences.
        routing: whether to sum up how the routers distribute the positions.

    Raises:
        InputError: a layer adds a bias, a mask or dropout to its attention, or a rule cannot be used with inserted ids;
            or, with `routing`, no router of the model gets a gradient.
        ProofError: a sampled token is not among its kept ids, or its grammar does not allow it.
    """
    inner = causal_model(model)
    with products_kept(inner):
        outputs = _trunk(inner, pack, routing=routing)
    hidden = outputs.last_hidden_state.flatten(0, 1)
    config = inner.config.get_text_config()
    head = _Head(
        inner.get_output_embeddings(), config, fp32_head, temperature, chunk_size, entropy_gradient, draws
    )
    entering = hidden if fp32_head else hidden.to(head_dtype(head.module, hidden.dtype))
    if rules is not None and rules.sampling.is_filtered:
        scores = head.among_kept(entering, pack, rules)
    else:
        scores = head.of_rows(entering, pack, rules)
    if routing:
        scores = replace(scores, routing=routing_of(inner, outputs.router_logits, pack))
    if critic is None:
        return scores
    # Tokens of equal branches share a predictor. The critic computes each predictor once.
    rows, place = torch.unique(pack.predictors, return_inverse=True)
    return replace(scores, values=_values(critic, hidden[rows])[place])


@torch.no_grad()
def route_pack(model: PreTrainedModel, pack: Pack) -> Routing:
    """How the routers distribute a pack's positions over experts, without gradient and without the output head."""
    inner = causal_model(model)
    return routing_of(inner, _trunk(inner, pack, routing=True).router_logits, pack)


@foreign_errors("the trainer could not score a pack of sequences")
def _trunk(inner: PreTrainedModel, pack: Pack, *, routing: bool) -> Any:
    """What the layers of a model give for a pack, with the logits of the routers if they are asked for."""
    shown = pack.pictures.arguments(inner, pack.input_ids.device)
    shown |= {"output_router_logits": True} if routing else {}
    while True:
        known = layers_computed_twice()
        outputs = inner.base_model(
            input_ids=pack.input_ids, use_cache=False, **_who_sees_whom(inner, pack), **shown
        )
        # Such a layer has recorded its router's logits twice.
        if not routing or layers_computed_twice() == known:
            return outputs


@dataclass(frozen=True, slots=True)
class _Head:
    """An output head and how it is used; the other fields are arguments of `score_pack`."""

    module: torch.nn.Module
    config: PreTrainedConfig
    fp32: bool
    temperature: float
    chunk_size: int
    entropy_gradient: bool
    draws: Classes | None

    @property
    def product(self) -> Head:
        """The product with the head's weight, before the model's own change of the logits."""
        return partial(fp32_head_product, self.module) if self.fp32 else self.module

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, V) logits of (n, width) hidden states, as the model's own forward gives them."""
        logits = self.product(hidden)
        return transformed_logits(self.config, logits) if changes_logits(self.config) else logits

    def of_rows(self, hidden: torch.Tensor, pack: Pack, rules: IdRules | None) -> TokenScores:
        """Scores from whole rows of logits. Tokens of equal branches share a row, which the head computes once."""
        rows, place, of_rows = _rows(pack, rules)
        draws, there, support = self._sums(pack), sent(place, hidden.device), None
        logps, entropies = token_logps(
            self.logits,
            hidden[rows],
            place,
            pack.targets,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            entropy_gradient=self.entropy_gradient,
            rules=of_rows,
            draws=draws,
        )
        if of_rows is not None and of_rows.rules.bans_ids:
            support = sent(of_rows.support, hidden.device)[there]
        return TokenScores(logps, entropies[there], support=support, draws=draws)

    def among_kept(self, hidden: torch.Tensor, pack: Pack, rules: IdRules) -> TokenScores:
        """Scores among the kept ids. Each token has a set of its own, even if tokens share a predictor."""
        kept = KeptSets.of(pack.kept_ids(), flat(pack.sequences, "sampled_ids"), hidden.device)
        own, size = hidden[pack.predictors], self.chunk_size
        logits = kept_logits(self.module, self.product, own, kept, chunk_size=size, fp32_head=self.fp32)
        logits = transformed_logits(self.config, logits)
        if rules.moves_logits:
            logits = moves_of_kept(rules, pack.sequences, hidden.device).applied(logits, rules.sampling)
        draws = self._sums(pack)
        logps, entropies = kept_logps(
            logits, kept, self.temperature, entropy_gradient=self.entropy_gradient, draws=draws
        )
        return TokenScores(logps, entropies, support=kept.sizes, draws=draws)

    def _sums(self, pack: Pack) -> DrawSums | None:
        if self.draws is None:
            return None
        wanted = np.repeat([s.picked for s in pack.sequences], [s.length for s in pack.sequences])
        device, picked = pack.targets.device, [s for s in pack.sequences if s.picked]
        return DrawSums(torch.from_numpy(wanted), device, TokenClasses(self.draws, picked, device))


def _rows(pack: Pack, rules: IdRules | None) -> tuple[torch.Tensor, torch.Tensor, RowRules | None]:
    """The (R,) nodes that predict a token, the (N,) row of each token, on the host, and the rules of the rows.

    With rules that count sampled tokens, a node is one row for each length of the prompt.
    """
    if rules is None or rules.are_neutral:
        rows, place = torch.unique(pack.host_predictors, return_inverse=True)
        return sent(rows, pack.predictors.device), place, None
    owners, positions = _places(pack)
    nodes = pack.host_predictors.numpy()
    prompts = np.array([len(s.prompt_ids) for s in pack.sequences])[owners]
    _, first, place = np.unique(np.stack([nodes, prompts]), axis=1, return_index=True, return_inverse=True)
    device = pack.predictors.device
    found = RowRules(rules, pack.sequences, owners[first], positions[first])
    return sent(torch.from_numpy(nodes[first]), device), torch.from_numpy(place.reshape(-1)), found


def _places(pack: Pack) -> tuple[Ids, Ids]:
    """The (N,) sequence of each token, and the (N,) number of sampled ids before it in its sequence."""
    lengths = [s.length for s in pack.sequences]
    return np.repeat(np.arange(len(lengths)), lengths), np.concatenate([*map(np.arange, lengths)])


def _who_sees_whom(model: PreTrainedModel, pack: Pack) -> dict[str, Any]:
    """The arguments by which the model's layers know the structure of a pack."""
    if pack.ends is None:
        # Padding comes after the scored tokens, so causal attention hides it. Each row counts its own positions.
        positions = {"position_ids": pack.position_ids} if pack.pictures else {}
        return {"attention_mask": None, **positions}
    kind, device = model.config.get_text_config()._attn_implementation, pack.input_ids.device
    if kind not in (TREE, FLEX):
        raise LockstepError(
            f"attention is {kind!r}, which takes no tree: call adopt_tree_attention(model) first"
        )
    if kind == FLEX:
        tree: Any = block_mask(pack.ends, device)
    else:
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        tree = TreeAttention.of(pack.ends, device, model.dtype, _half(model, device), only_blocks=capped)
    return {"attention_mask": no_mask(device), "position_ids": pack.position_ids, "tree": tree}


def _half(model: PreTrainedModel, device: torch.device) -> torch.dtype | None:
    """The half precision in which a model multiplies, if it does."""
    dtype = autocast_dtype(device.type, model.dtype)
    return dtype if dtype.itemsize < torch.float32.itemsize else None


def _values(critic: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """One value per row. The critic computes in its own dtype, outside autocast, for any dtype of the model."""
    with torch.autocast(hidden.device.type, enabled=False):
        values = critic(hidden.to(next(critic.parameters()).dtype))[:, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_passes(shards: ShardedModel, compute: Callable[[], TokenScores]) -> TokenScores:
    """The scores that `compute` gives. With gradient, the caller is inside `ShardedModel.learning`."""
    if torch.is_grad_enabled():
        return shards.run(compute, _with_gradient)
    with shards.looking():
        return shards.run(compute, _with_gradient)


def plays_learning(
    model: PreTrainedModel,
    shards: ShardedModel,
    autocast: Callable[[], AbstractContextManager],
    *,
    plain_rows: bool,
) -> Callable[[], None]:
    """A function that plays the forward and backward of a pack: one token, whose loss is 0."""
    one = TrainingSequence("", whole_numbers([0]), whole_numbers([0]), reals([0.0]))
    (pack,) = (pack_rows if plain_rows else pack_sequences)([one], 1 << 10)

    def play() -> None:
        here, was_training = pack.to(model.device), model.training
        # Gradient checkpointing, and with it the order of gathers, is on in training mode only.
        model.train()
        try:
            with torch.enable_grad():
                with autocast():
                    scores = shards.run(lambda: score_pack(model, here, 1.0, 1), _with_gradient)
                (scores.logps.sum() * 0.0).backward()
        finally:
            model.train(was_training)

    return play


def _with_gradient(scores: TokenScores) -> list[torch.Tensor | None]:
    return [scores.logps, scores.entropies, scores.values]
