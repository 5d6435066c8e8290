"""Weights that DeepSpeed ZeRO-3 partitions. Each layer's are gathered for its forward, and again for its backward.

The rest of Lockstep sees a parameter as a `DTensor` of the rows that FSDP2 would give this rank. Its memory is
DeepSpeed's own partition. An optimizer, a checkpoint or a proof that uses the `DTensor` therefore uses the partition.
DeepSpeed cuts flat tensors evenly. So it gets each tensor with rows of zeros at its end, until each rank has the same
number of rows.

A backward needs the tensors that its forward has used. So the whole weights of a layer stand in tensors that stay the
same ones. Their memory is freed and allocated again, and what DeepSpeed gathers is copied into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from lockstep.errors import LockstepError
from lockstep.extras.deepspeed import deepspeed_parts
from lockstep.shards.model import is_sharded, local_part
from lockstep.shards.passes import Passes

# A module and the name of one of its parameters.
Places = list[tuple[torch.nn.Module, str]]


class _Weight:
    """One tensor of the model. A tied tensor has several places in the model.

    Attributes:
        part: the parameter that the optimizer changes.
        whole: the tensor that a forward uses. It has memory only while it is gathered.
        source: DeepSpeed's parameter, with rows of zeros at its end.
    """

    def __init__(
        self, parameter: torch.nn.Parameter, places: Places, source: Any, dtype: torch.dtype, mesh: DeviceMesh
    ):
        shape = parameter.shape
        rows = source.ds_shape[0] // mesh.size()
        own = min(max(shape[0] - mesh.get_local_rank() * rows, 0), rows)
        local = deepspeed_parts.part_of(source).view(rows, *shape[1:])[:own]
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        self.part = torch.nn.Parameter(spread, requires_grad=parameter.requires_grad)
        whole = torch.empty(shape, dtype=dtype, device=local.device)
        self.whole = torch.nn.Parameter(whole, requires_grad=False)
        self.source, self.places = source, places
        if dtype != parameter.dtype:
            deepspeed_parts.send_as(source, dtype)
        self.close()

    def open(self) -> None:
        """Copy what DeepSpeed has gathered, and let the model compute with it."""
        whole = self.whole
        whole.requires_grad_(self.part.requires_grad)
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        # `.data` leaves the version counter alone: a backward accepts the tensor that its forward has saved.
        whole.data.copy_(self.source.data[: whole.shape[0]])
        self._place(whole)

    def close(self) -> None:
        """Free the whole tensor, and let the model show the part."""
        self.whole.untyped_storage().resize_(0)
        self._place(self.part)

    def is_partition(self) -> bool:
        """Whether nothing is gathered, and the optimizer changes what DeepSpeed would gather."""
        if self.whole.untyped_storage().size() or not deepspeed_parts.is_partitioned(self.source):
            return False
        return local_part(self.part).data_ptr() in (0, deepspeed_parts.part_of(self.source).data_ptr())

    def _place(self, parameter: torch.nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = parameter

    @property
    def elements(self) -> int:
        """Elements of each rank's part, with the zeros at its end."""
        return deepspeed_parts.part_of(self.source).numel()

    def take_gradient(self, summands: torch.Tensor) -> None:
        """Move what this rank's backward has added, if it has, to (ranks, elements) zeros."""
        gradient, self.whole.grad = self.whole.grad, None
        if gradient is not None:
            for summand, part in zip(summands, gradient.flatten().split(self.elements), strict=False):
                summand[: part.numel()].copy_(part)

    def add_gradient(self, reduced: torch.Tensor) -> None:
        """Add this rank's part of the sum over ranks to the parameter's gradient."""
        local = local_part(self.part)
        reduced = reduced.to(local.dtype)[: local.numel()].view_as(local)
        if self.part.grad is None:
            part: Any = self.part
            like = {"run_check": False, "shape": part.shape, "stride": part.stride()}
            part.grad = DTensor.from_local(reduced.clone(), part.device_mesh, [Shard(0)], **like)
        else:
            local_part(self.part.grad).add_(reduced)


class WeightGroup:
    """Weights that are gathered, freed and reduced together: those of one layer, or those of no layer."""

    def __init__(self, weights: list[_Weight], group: dist.ProcessGroup) -> None:
        self._weights, self._ranks = weights, group
        self.whole = self.in_backward = False

    def gather(self) -> None:
        if self.whole or not self._weights:
            return
        sources = [weight.source for weight in self._weights]
        deepspeed_parts.gather(sources)
        for weight in self._weights:
            weight.open()
        # The copies are used from here on.
        deepspeed_parts.free(sources)
        self.whole = True

    def free(self) -> None:
        if self.whole:
            for weight in self._weights:
                weight.close()
        self.whole = self.in_backward = False

    def reduce(self) -> None:
        """Add this backward's gradients, summed over ranks in float32, to those of the parts. Every rank calls."""
        trained = [weight for weight in self._weights if weight.part.requires_grad]
        for dtype in (torch.float32, torch.float64):
            own = [w for w in trained if (w.part.dtype == torch.float64) == (dtype == torch.float64)]
            if not own:
                continue
            sizes, ranks = [weight.elements for weight in own], dist.get_world_size(self._ranks)
            summands = torch.zeros(ranks, sum(sizes), dtype=dtype, device=own[0].whole.device)
            for weight, columns in zip(own, summands.split(sizes, dim=1), strict=True):
                weight.take_gradient(columns)
            reduced = deepspeed_parts.reduce_scatter(summands.flatten(), self._ranks)
            for weight, part in zip(own, reduced.split(sizes), strict=True):
                weight.add_gradient(part)

    def after_backward(self) -> None:
        """The layer's backward is done."""
        self.reduce()
        self.free()


class _AfterBackward(torch.autograd.Function):
    """Gives its inputs on unchanged, and ends a group's backward when their gradients are known."""

    @staticmethod
    def forward(ctx: Any, group: WeightGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.group.after_backward()
        return (None, *gradients)


class ZeroWeights:
    """The weights of a model in groups: the model's own is group 0, and each decoder layer has one.

    Group 0 stays whole from a forward to the end of its backward. The parameters of the whole model that is given
    become `DTensor`s, on `device`. `autocast` is the dtype of the forward's autocast.
    """

    title = "DeepSpeed ZeRO-3"

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[torch.nn.Module],
        passes: Passes,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        deepspeed_parts.begin(device)
        mesh = DeviceMesh.from_group(passes.group, device.type)
        cast = autocast if {p.dtype for p in model.parameters()} == {torch.float32} else None
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        names = {id(p): name for name, p in model.named_parameters()}
        places: dict[int, Places] = {key: [] for key in names}
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    places[id(p)].append((module, name))
        self.named: dict[str, _Weight] = {}
        self._groups = []
        for root in (*layers, model):
            # The memory of a parameter that is sharded already may be in use again, so that its old id means nothing.
            own = [p for p in root.parameters() if not is_sharded(p)]
            found = [(p, places[id(p)]) for p in own]
            named = [names[id(p)] for p in own]
            del own
            weights = _shard(found, mesh, device, None if root is model else cast)
            self.named |= dict(zip(named, weights, strict=True))
            self._groups.append(WeightGroup(weights, mesh.get_group()))
        self._groups.insert(0, self._groups.pop())
        for layer, group in zip(layers, self._groups[1:], strict=True):
            self._add_hooks(layer, group)
        self._backward_began = False
        # A `model.to(…)` would give the parameters other memory than DeepSpeed's partitions.
        vars(model)["_apply"] = partial(_apply_to_buffers, model)

    def gather(self, group: int) -> None:
        """Make the weights of one group whole, until `end`."""
        self._groups[group].gather()

    def run(self, forward: Callable[[], list[torch.Tensor | None]]) -> None:
        """Compute a forward, with the weights gathered for it and its backward.

        It returns the tensors through which a backward may begin.
        """
        self._groups[0].gather()
        for tensor in forward():
            if tensor is not None and tensor.requires_grad:
                # Without a trained layer, no hook of a layer is called.
                tensor.register_hook(self._note_backward)

    def end(self) -> None:
        """After a forward, or after its backward: reduce the gradients that are left, and free all that is gathered."""
        began, self._backward_began = self._backward_began, False
        for place in reversed(range(len(self._groups))):
            group = self._groups[place]
            # A layer whose input needs no gradient, such as the first one under an adapter, has no `_AfterBackward`.
            if began and (place == 0 or group.in_backward):
                group.reduce()
            group.free()

    def whole_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The tensor that a backward adds this parameter's gradient to, before the ranks' parts are summed."""
        return next((w.whole for w in self.named.values() if w.part is parameter), None)

    def odd(self) -> list[str]:
        """Names of parameters that are gathered, here or in DeepSpeed, or that are no longer DeepSpeed's partitions."""
        return [name for name, weight in self.named.items() if not weight.is_partition()]

    def _note_backward(self, gradient: torch.Tensor) -> None:
        self._backward_began = True

    def _add_hooks(self, layer: torch.nn.Module, group: WeightGroup) -> None:
        def before_forward(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            group.gather()
            return _with_end(group, args, kwargs) if torch.is_grad_enabled() else None

        def before_backward(gradient: torch.Tensor) -> None:
            self._backward_began = group.in_backward = True
            group.gather()

        def after_forward(module: torch.nn.Module, args: Any, output: Any) -> None:
            # Gradient checkpointing computes the forward again, inside the backward.
            if group.in_backward:
                return
            group.free()
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(before_backward)

        layer.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
        layer.register_forward_hook(after_forward)


def _with_end(group: WeightGroup, args: Any, kwargs: Any) -> Any:
    """The arguments of a layer, such that the group's backward ends when their gradients are known."""
    flat, form = tree_flatten((args, kwargs))
    places = [i for i, given in enumerate(flat) if isinstance(given, torch.Tensor) and given.requires_grad]
    if not places:
        return None
    for place, tensor in zip(places, _AfterBackward.apply(group, *(flat[i] for i in places)), strict=True):
        flat[place] = tensor
    return tree_unflatten(flat, form)


def _shard(
    found: Sequence[tuple[torch.nn.Parameter, Places]],
    mesh: DeviceMesh,
    device: torch.device,
    cast: torch.dtype | None,
) -> list[_Weight]:
    """Partition the parameters of a group, which leave the model. They are gathered in dtype `cast`, or their own."""
    if not found:
        return []
    sources = deepspeed_parts.partition([_padded(p, mesh.size(), device) for p, _ in found], mesh.get_group())
    return [_Weight(p, at, s, cast or p.dtype, mesh) for (p, at), s in zip(found, sources, strict=True)]


def _apply_to_buffers(
    model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """`Module._apply` of a sharded model, for `model.to(…)`: the weights are on their device already."""
    why = "the weights of a model that DeepSpeed shards cannot get another dtype or device"
    for p in model.parameters():
        probe = torch.empty(0, dtype=p.dtype, device=p.device)
        if (changed := change(probe)).dtype != probe.dtype or changed.device.type != probe.device.type:
            raise LockstepError(why)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
    return model


def _padded(parameter: torch.nn.Parameter, ranks: int, device: torch.device) -> torch.Tensor:
    """A copy whose first dimension is a multiple of the number of ranks. The new rows are zeros."""
    shape = parameter.shape
    copy = torch.zeros(-(-shape[0] // ranks) * ranks, *shape[1:], dtype=parameter.dtype, device=device)
    copy[: shape[0]].copy_(parameter.detach())
    return copy
