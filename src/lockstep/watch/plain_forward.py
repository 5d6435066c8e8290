"""Scores by a plain forward, in the model's dtype, in float32 or in float64, for proofs that need a second opinion.

It takes one plain sequence, or one padded row per completion, without packing, shared prefixes or recomputation: a
second way to compute the same numbers, which does not depend on the fast path.

In float64 or float32 the forward may run with weights that are moved a little. A weight is widened when an operation
reads it. So only a few wide weights exist at a time, and the model's own stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.contract.sampling import Sampling
from lockstep.devices import sent
from lockstep.errors import LockstepError, foreign_errors
from lockstep.images.packs import model_inputs
from lockstep.images.pictures import NO_PICTURES, PromptPictures
from lockstep.models.adapters import causal_model, head_name
from lockstep.models.arithmetic import Precision, head_dtype, transformed_logits
from lockstep.models.policy import fp32_head_product
from lockstep.shards.model import sharded
from lockstep.tokens.arrays import Ids, KeptIds, joined_kept_ids, small_ids, whole_numbers
from lockstep.weights.push import weights_of

# Largest size of one tensor of float32 logits, in bytes. Up to three such tensors exist at the same time.
LOGITS_BYTES = 64 * 2**20

# The weights' own dtype, without autocast.
OWN_DTYPE = Precision()


@torch.no_grad()
def sequence_logits(
    model: PreTrainedModel, ids: Sequence[int], precision: Precision = OWN_DTYPE
) -> torch.Tensor:
    """(len(ids), V) float32 logits of one sequence, in evaluation mode, in one tensor of any size."""
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
    pictures: PromptPictures = NO_PICTURES,
) -> torch.Tensor:
    """(len(token_ids),) log-probs of a completion under the distribution that `sampling` describes.

    The log-prob is −inf for a token that the sampling settings exclude. No tensor of logits is larger than
    `LOGITS_BYTES`, for any length of the completion.

    Args:
        sampling: a `Distribution` if the settings have a grammar or `min_tokens`.
        kept: one set of ids for each token, among which the token is scored; None: the filters are applied again.
        pictures: the pictures of the prompt and the completion. The model's own forward computes them and the
            positions.

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
    pictures: PromptPictures,
) -> torch.Tensor:
    """`completion_logps` where only the temperature shapes the logits: many rows at a time, on the model's device."""
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
    """The trainer's log-probs of a completion's sampled tokens, with `kept` among the engine's kept ids, if any."""
    sets, places = sets_of_all(completion) if kept else None, completion.sampled_places
    if not len(places):
        # A rollout may have ended before its first sampled token.
        return torch.zeros(0)
    # Nothing reads the ids after the last sampled one, and `Completion.pictures` has no pictures of them.
    count = int(places[-1]) + 1
    sets = None if sets is None else sets.part(0, count)
    ids = completion.token_ids[:count]
    logps = completion_logps(
        model, completion.prompt_ids, ids, distribution, precision, sets, completion.pictures
    )
    return logps[torch.tensor(places)]


def sets_of_all(completion: Completion) -> KeptIds | None:
    """One set for each id. Inserted ids, whose log-probs nobody reads, get the id itself as their set."""
    kept = completion.kept_ids
    if kept is None or completion.sampled is None:
        return kept
    sets, places = [], iter(range(len(kept)))
    for token, sampled in zip(completion.token_ids, completion.sampled, strict=True):
        place = next(places) if sampled else 0
        itself = KeptIds(small_ids([token]), whole_numbers([1]))
        sets.append(kept.part(place, place + 1) if sampled else itself)
    return joined_kept_ids(sets)


def logit_chunks(
    model: PreTrainedModel,
    ids: Sequence[int],
    first: int,
    precision: Precision,
    pictures: PromptPictures = NO_PICTURES,
) -> Iterator[torch.Tensor]:
    """(rows, V) float32 logits of all positions from `first` on, a few rows at a time."""
    inner = causal_model(model)
    row = sent(torch.tensor([list(ids)]), inner.device)
    was_training, shards = model.training, sharded(model)
    model.eval()
    try:
        with nullcontext() if shards is None else shards.looking():
            with in_precision(inner, precision):
                shown = model_inputs([pictures], row)
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


# Rows of logits in memory at a time, on the host and on a GPU, which holds a few copies of them in float64.
_ROWS, _ROWS_ON_GPU = 256, 64


@torch.no_grad()
def plain_scores(
    model: PreTrainedModel,
    critic: torch.nn.Module | None,
    completions: Sequence[Completion],
    distribution: Distribution,
) -> torch.Tensor:
    """(3, N) log-prob, entropy and critic's value (0 without a critic) of every sampled token, on the model's device.

    Padding comes after the scored tokens, so that causal attention hides it.
    """
    inner = causal_model(model)
    paths = [[*c.prompt_ids.tolist(), *c.token_ids.tolist()[:-1]] for c in completions]
    longest = max(len(path) for path in paths)
    rows = sent(torch.tensor([path + [0] * (longest - len(path)) for path in paths]), inner.device)
    hidden = inner.base_model(input_ids=rows, use_cache=False).last_hidden_state
    places = [
        torch.from_numpy(c.sampled_places + len(c.prompt_ids) - 1) + i * longest
        for i, c in enumerate(completions)
    ]
    chosen = hidden.flatten(0, 1)[sent(torch.cat(places), hidden.device)]
    values = critic(chosen)[:, 0] if critic is not None else torch.zeros(len(chosen), device=hidden.device)
    found, start, size = [], 0, _ROWS if chosen.device.type == "cpu" else _ROWS_ON_GPU
    for c in completions:
        end = start + len(c.sampled_places)
        for first in range(0, end - start, size):
            own = slice(first, min(first + size, end - start))
            logits = inner.get_output_embeddings()(chosen[start:end][own])
            logits = transformed_logits(inner.config.get_text_config(), logits)
            found.append(_of_rows(c, c.sampled_places[own], logits, distribution))
        start = end
    return torch.cat([torch.cat(found, 1), values[None]])


def _of_rows(
    completion: Completion, places: Ids, logits: torch.Tensor, distribution: Distribution
) -> torch.Tensor:
    """(2, n) log-probs and entropies of tokens at (n,) places of a completion, from (n, V) logits, on their device.

    Filters, penalties and grammars are applied on the host.
    """
    prompt, tokens = completion.prompt_ids.tolist(), completion.token_ids.tolist()
    if distribution.is_tempered_only and completion.kept_ids is None:
        logps = (logits / distribution.sampling.temperature).log_softmax(-1)
        own = sent(torch.tensor(tokens)[torch.from_numpy(places)], logits.device)
        return torch.stack([logps.gather(1, own[:, None])[:, 0], torch.special.entr(logps.exp()).sum(-1)])
    masks, sets = distribution.masks(tokens), sets_of_all(completion)
    scores = []
    for row, place in zip(logits.cpu(), places.tolist(), strict=True):
        if masks is not None:
            # The library's own operation takes no float64.
            bits = masks[place][:, None].bitwise_right_shift(torch.arange(32, dtype=torch.int32)) & 1
            row = row.masked_fill(bits.flatten()[: len(row)] == 0, -torch.inf)
        logps = distribution.logprobs(row, prompt, tokens[:place], None, sets)
        inside = logps[logps > -torch.inf]
        scores.append(torch.stack([logps[tokens[place]], -(inside.exp() * inside).sum()]))
    return sent(torch.stack(scores, 1), logits.device)


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten
# PyTorch compares the dtypes of their arguments before a dispatch mode sees them.
_CONVOLUTIONS = {
    getattr(torch, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
}


@dataclass(frozen=True, slots=True)
class Move:
    """A change of one tensor in float64: `size` × (R,) rows ⊗ (C,) columns; of a vector, by `size` × rows."""

    size: float
    rows: torch.Tensor
    columns: torch.Tensor | None

    def add_to(self, wide: torch.Tensor) -> torch.Tensor:
        """Change a contiguous tensor in place."""
        rows = self.rows.to(wide.dtype)
        if self.columns is None:
            return wide.add_(rows.view_as(wide), alpha=self.size)
        wide.view(len(rows), -1).addr_(rows, self.columns.to(wide.dtype), alpha=self.size)
        return wide

    def of_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The change of some rows."""
        assert self.columns is not None
        return self.size * self.rows[ids].unsqueeze(-1) * self.columns


class Widened(TorchDispatchMode):
    """A context in which every operation of PyTorch computes in a wider dtype. Gradients must be off.

    Operations of other libraries, such as those that unpack 4-bit weights, run as they are. Tensors of a dtype that is
    wider than `dtype` stay as they are. `moves` change weights, by the id of the tensor.
    """

    def __init__(self, moves: Mapping[int, Move], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._moves, self._dtype = moves, dtype
        self._narrow = _FLOATS[_FLOATS.index(dtype) + 1 :]
        self._functions, self._unmoved = _Functions(self), 0

    def __enter__(self) -> Widened:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def move_of(self, value: torch.Tensor) -> Move | None:
        """How a tensor is changed; None: it stays as it is."""
        return None if id(value) == self._unmoved else self._moves.get(id(value))

    @contextmanager
    def unmoved(self, value: torch.Tensor) -> Iterator[None]:
        """A context in which one tensor is not changed."""
        self._unmoved = id(value)
        try:
            yield
        finally:
            self._unmoved = 0

    def widen(self, value: Any) -> Any:
        """A tensor in the wider dtype. A tensor that has it already is changed only by the operation that reads it."""
        is_narrow = isinstance(value, torch.Tensor) and value.dtype in self._narrow
        return value.to(self._dtype) if is_narrow else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if func is _ATEN.embedding.default:
            return self._rows(func, *args, **kwargs)
        if func._schema.is_mutable:
            return func(*self._as_written(func, args), **kwargs)
        if kwargs.get("dtype") in self._narrow:
            kwargs["dtype"] = self._dtype
        args = _each(self._wide, args)
        kwargs = {name: _each(self._wide, value) for name, value in kwargs.items()}
        if func is _ATEN._grouped_mm.default:
            return _products(*args, **kwargs)
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        move = self.move_of(value)
        if move is not None:
            dtype = torch.promote_types(value.dtype, self._dtype)
            return move.add_to(value.to(dtype, memory_format=torch.contiguous_format, copy=True))
        if value.dtype not in self._narrow:
            return value
        return value.to(self._dtype, memory_format=torch.contiguous_format)

    def _rows(
        self, func: Any, weight: torch.Tensor, ids: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        """An embedding reads a few rows. The whole matrix need not be wide."""
        found = func(weight, ids, *rest, **more)
        found = found.to(torch.promote_types(found.dtype, self._dtype))
        move = self.move_of(weight)
        return found if move is None else found + move.of_rows(ids).to(found.dtype)

    def _as_written(self, func: Any, args: Any) -> list[Any]:
        """The arguments of an operation that writes: what it reads gets the dtype of what it writes."""
        infos = [argument.alias_info for argument in func._schema.arguments[: len(args)]]
        written = [info is not None and info.is_write for info in infos]
        dtypes = [
            value.dtype
            for value, is_written in zip(args, written, strict=True)
            if is_written and isinstance(value, torch.Tensor)
        ]
        target = dtypes[0] if dtypes else self._dtype

        def read(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and target.is_floating_point:
                return self._wide(value).to(target)
            return value

        return [
            value if is_written else _each(read, value)
            for value, is_written in zip(args, written, strict=True)
        ]


class _Functions(TorchFunctionMode):
    """A context for functions whose arguments are changed before a dispatch mode sees them.

    Convolutions get arguments of one dtype, before PyTorch compares them. The product with a moved matrix is that
    with the matrix, plus that with the move, which is an outer product. So the matrix is not copied.
    """

    def __init__(self, widened: Widened) -> None:
        super().__init__()
        self._widened = widened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) >= 2:
            return self._linear(func, *args, **kwargs)
        if func in _CONVOLUTIONS:
            widen = self._widened.widen
            args, kwargs = [widen(a) for a in args], {name: widen(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)

    def _linear(
        self, func: Any, rows: torch.Tensor, weight: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        move = self._widened.move_of(weight)
        if move is None or move.columns is None:
            return func(rows, weight, *rest, **more)
        with self._widened.unmoved(weight):
            found = func(rows, weight, *rest, **more)
        along = self._widened.widen(rows) @ move.columns.to(found.dtype)
        return found + along.unsqueeze(-1) * (move.size * move.rows).to(found.dtype)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with every leaf changed. Arguments of operations nest in lists alone; PyTorch's `tree_map` is slow."""
    if isinstance(value, (list, tuple)):
        return [_each(change, part) for part in value]
    return change(value)


def _products(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, *rest: Any, **more: Any
) -> torch.Tensor:
    """(T, N) products of E groups of rows, each with its own (K, N) matrix. PyTorch's operation takes no float64.

    `ends` is (E,): where each group of rows ends.
    """
    bounds = [0, *ends.tolist()]
    pairs = zip(bounds[:-1], bounds[1:], matrices, strict=True)
    found = rows.new_zeros(len(rows), matrices.shape[-1])
    for start, end, matrix in pairs:
        found[start:end] = rows[start:end] @ matrix
    return found
