"""A sharded model, the part of a tensor that this rank holds, and the norm of sharded gradients.

`sharded(model)` gives the `ShardedModel` of a model, or None where it is whole on this rank. Its `ShardedWeights` hold
one group per decoder layer and one for the rest, gather them and reduce gradients; `fsdp.py` has those of FSDP2.
The policy and the reference are sharded before the optimizer is made.

Gradients are summed in float32 and never averaged: the loss of a pack is its share of the whole step's loss. In
float32, 1, 2 and 4 ranks so give the same gradients as a model that is not sharded.

Proofs and digests read parameters, gradients and optimizer state by their parts; a tensor that is not sharded is its
own part. Only `collected` communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.errors import InputError, ProofError
from lockstep.models.adapters import causal_model
from lockstep.progress import waiting
from lockstep.shards.fsdp import FsdpWeights
from lockstep.shards.passes import PASS_LIMIT, Passes

# The rank that holds the engine, and gets whole tensors.
OWNER = 0
Part = TypeVar("Part", bound=torch.Tensor | None)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded over ranks (a `DTensor`)."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Part) -> Part:
    """The part that this rank holds, in the tensor's own memory. It may be empty. None stays None."""
    if tensor is None or not is_sharded(tensor):
        return tensor
    return tensor.detach().to_local()  # type: ignore[attr-defined]


def first_element(tensor: torch.Tensor) -> int:
    """The place of the first element of this rank's part in the flattened tensor. The first dimension is cut."""
    if not is_sharded(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    rows = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, tensor.shape[0]) * (tensor.numel() // max(tensor.shape[0], 1))


def collected(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole, in new memory, on the owner; the others get their part. Every rank calls."""
    mesh, part, shape = tensor.device_mesh, local_part(tensor), tensor.shape  # type: ignore[attr-defined]
    rows = -(-shape[0] // mesh.size())
    mine = part.contiguous()
    if mine.shape[0] < rows:
        mine = torch.cat([mine, mine.new_zeros(rows - mine.shape[0], *shape[1:])])
    whole = mine.new_empty(mesh.size() * rows, *shape[1:]) if mesh.get_local_rank() == OWNER else None
    parts = None if whole is None else list(whole.split(rows))
    with waiting("every rank's part of a tensor", verb=f"rank {mesh.get_local_rank()} waits for "):
        dist.gather(mine, parts, dst=OWNER, group=mesh.get_group())
    return part if whole is None else whole[: shape[0]]


T = TypeVar("T")
# The attribute of a causal language model that holds its `ShardedModel`.
_NAME = "_lockstep_shards"


class ShardedWeights(Protocol):
    """The parts of a model's weights on this rank: group 0 without its layers, then the layers in their order."""

    title: str

    def gather(self, group: int) -> None: ...

    def run(self, forward: Callable[[], list[torch.Tensor | None]]) -> None: ...

    def end(self) -> None: ...

    def whole_of(self, parameter: torch.Tensor) -> torch.Tensor | None: ...

    def odd(self) -> list[str]: ...


# Shards a model in place: (model, its layers, passes, device, dtype of autocast).
Shard = Callable[
    [PreTrainedModel, Sequence[torch.nn.Module], Passes, torch.device, torch.dtype | None], ShardedWeights
]


def sharded(model: torch.nn.Module) -> ShardedModel | None:
    """The shards of a model, with or without an adapter; None if it is whole on this rank."""
    inner = model if isinstance(model, PreTrainedModel) else causal_model(model)
    return vars(inner).get(_NAME)


class ShardedModel:
    """A causal language model whose weights are sharded over all ranks, along their first dimension.

    Args:
        model: the whole model, equal on every rank. It is sharded in place, on `device`.
        autocast: dtype of the forward's autocast; None: there is none.
        shard: makes the `ShardedWeights`, for example `FsdpWeights`.

    Attributes:
        parameters: the sharded parameters by name. They are the ones that the optimizer changes, also while a layer
            is gathered.
        learn: plays a forward with gradient and its backward, for a pack without weight. The trainer sets it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        passes: Passes,
        device: torch.device,
        autocast: torch.dtype | None = None,
        shard: Shard = FsdpWeights,
    ) -> None:
        layers = decoder_layers(model)
        if odd := [name for name, p in model.named_parameters() if not p.dim() or not p.is_floating_point()]:
            raise InputError(
                f"{odd[0]} cannot be sharded: it is a single number or quantised; train without shards"
            )
        self._model, self._passes, self._layers = model, passes, layers
        self.weights = shard(model, layers, passes, device, autocast)
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self._places = {id(p): i for i, p in enumerate(self.parameters.values())}
        self._hidden: torch.Tensor | None = None
        self._backward_began = False
        self.learn: Callable[[], None] | None = None
        # The acts are done in this order: a rank that learns comes first, so that others join in with packs of their
        # own.
        self._gathers = [passes.register(partial(collected, p)) for p in self.parameters.values()]
        self._wholes = [passes.register(partial(self._play_group, i)) for i in range(len(layers) + 1)]
        self._look = passes.register(self._play_look)
        self._learn = passes.register(self._play_learning)
        setattr(model, _NAME, self)

    # ---- forwards ---------------------------------------------------------------------------------------------------

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A context for one forward with gradient (`run`) and its backward (`backward`).

        If the caller fails between the two, the backward is played to its end first, so that no other rank waits.
        """
        self._hidden, self._backward_began, trouble = None, False, None
        with self._passes.act(self._learn), self._hook():
            try:
                yield
            except Exception as error:
                if self._hidden is None or self._backward_began:
                    raise
                trouble = error
                (self._hidden.sum() * 0.0).backward()
            self._end()
        if trouble is not None:
            raise trouble

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A context for one forward without gradient: `run`, or a forward of the trunk and the head by hand.

        Embeddings, last norm and head are whole inside.
        """
        self._hidden, trouble = None, None
        with self._passes.act(self._look), self._hook():
            self.weights.gather(0)
            try:
                yield
            except Exception as error:
                if self._hidden is None:
                    raise
                # The other ranks have done all that they do together with this one.
                trouble = error
            self._end()
        if trouble is not None:
            raise trouble

    def whole_head(self) -> AbstractContextManager[None]:
        """A context in which embeddings, last norm and head are whole, without a forward of the layers."""
        return self._whole_group(0)

    def whole_around(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """A context in which the weights of a module inside one layer, or outside of all layers, are whole."""
        return self._whole_group(
            next((i for i, u in enumerate(self._layers, 1) if module in set(u.modules())), 0)
        )

    @contextmanager
    def _whole_group(self, group: int) -> Iterator[None]:
        with self._passes.act(self._wholes[group]):
            self.weights.gather(group)
        try:
            yield
        finally:
            self._end()

    def run(self, compute: Callable[[], T], outputs: Callable[[T], Sequence[torch.Tensor | None]]) -> T:
        """What `compute` returns, computed as a forward of the model. Inside `learning` or `looking`.

        `outputs` are the tensors of the result through which a backward may begin.
        """
        found: list[T] = []

        def forward() -> list[torch.Tensor | None]:
            found.append(compute())
            return list(outputs(found[0]))

        self.weights.run(forward)
        return found[0]

    def backward(self, backward: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """The same backward, for use inside `learning`."""

        def noted(loss: torch.Tensor) -> None:
            self._backward_began = True
            backward(loss)

        return noted

    @contextmanager
    def _hook(self) -> Iterator[None]:
        def note(module: torch.nn.Module, given: Any, output: Any) -> None:
            self._hidden = output.last_hidden_state

        handle = self._model.base_model.register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()
            self._hidden = None

    def _end(self) -> None:
        """After an act: nothing is gathered any more."""
        self.weights.end()

    # ---- whole tensors ----------------------------------------------------------------------------------------------

    def gather(self, parameter: torch.Tensor) -> torch.Tensor:
        """A whole parameter, as a new tensor. Only the owner asks; the others are in a call of `Ranks`."""
        with self._passes.act(self._gathers[self._places[id(parameter)]]):
            return collected(parameter)

    def gathered_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that a backward adds this rank's part of a parameter's gradient to, before they are summed.

        Another parameter is returned as it is. The tensor has memory only while its layer is gathered. It exists
        after the first forward.
        """
        if id(parameter) not in self._places or (found := self.weights.whole_of(parameter)) is None:
            return parameter
        # A reference without the adapter may have left it frozen; the next gather sets it too.
        return found.requires_grad_(parameter.requires_grad)

    # ---- the state between acts -------------------------------------------------------------------------------------

    def check(self, version: int) -> None:
        """Check that every parameter is sharded, as the optimizer, a push and a save need it.

        A layer that is still gathered would be read as it was before the optimizer's step.
        """
        now: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        odd = [name for name, p in self.parameters.items() if now.get(name) is not p or not is_sharded(p)]
        sizes = self._passes.count
        odd += [
            n for n, p in now.items() if is_sharded(p) and local_part(p).shape[0] > -(-p.shape[0] // sizes)
        ]
        odd += [name for name in now if name not in self.parameters]
        odd += self.weights.odd()
        if odd:
            raise ProofError(
                "shards",
                f"at version {version} {len(odd)} of {len(self.parameters)} parameters are not sharded; the "
                f"first is {odd[0]}",
                "a layer stayed gathered after a forward, so that it holds its weights of before the "
                "optimizer's step; or a parameter was added or replaced after the model was sharded",
                "let nothing gather weights of the model outside of a forward, and change no module after "
                "the trainer was made",
            )

    @property
    def elements(self) -> int:
        """How many elements of the parameters this rank holds."""
        return sum(local_part(p).numel() for p in self.parameters.values())

    # ---- what a rank plays without own work -------------------------------------------------------------------------

    def _play_group(self, group: int) -> None:
        self.weights.gather(group)
        self._end()

    @torch.no_grad()
    def _play_look(self) -> None:
        self.weights.gather(0)
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        self._model.base_model(input_ids=ids, use_cache=False)
        self._end()

    def _play_learning(self) -> None:
        assert self.learn is not None
        self.learn()
        self._end()


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of a model, as `GradientCheckpointingLayer` or the model's `_no_split_modules` name them."""
    names = set(model._no_split_modules or ())
    found = [m for m in model.modules() if type(m).__name__ in names]
    if not found:
        raise InputError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), so that it cannot be "
            "sharded; train without shards"
        )
    return found


@torch.no_grad()
def clip_sharded(parameters: Sequence[torch.nn.Parameter], max_norm: float, passes: Passes) -> torch.Tensor:
    """Clip the gradients of all parameters together to a norm, as `torch.nn.utils.clip_grad_norm_` does.

    Every rank calls. Parameters may be sharded, or the same on every rank. Infinity changes nothing. Returns the norm
    of the whole gradient before, as a scalar.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # A gradient that every rank has counts once.
    own = [local_part(g) for g in gradients if is_sharded(g) or passes.rank == 0]
    norms = torch._foreach_norm([g for g in own if g.numel()])
    device = gradients[0].device if gradients else torch.device("cpu")
    wide = torch.float64 if device.type == "cpu" else torch.float32
    square = (
        torch.stack([n.to(device, wide) for n in norms]).square().sum()
        if norms
        else torch.zeros((), dtype=wide)
    )
    square = square.to(device)
    with waiting("the gradients of every rank", PASS_LIMIT, verb=f"rank {passes.rank} waits for "):
        dist.all_reduce(square, group=passes.group)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    parts = [part for part in map(local_part, gradients) if part.numel()]
    torch._foreach_mul_(parts, scale)
    return norm
