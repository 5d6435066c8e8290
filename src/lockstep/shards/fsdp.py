"""Weights that FSDP2 shards (`fully_shard`), as accelerate's FSDP2 plugin would shard them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.shards.passes import Passes

# The attribute that computes something as a forward of the model: FSDP gathers and frees the weights around it.
_RUN = "_lockstep_run"


class FsdpWeights:
    """The weights of a model in groups: the model's own is group 0, and each decoder layer has one.

    With autocast, the layers are gathered in autocast's dtype. The parameters of `model` become `DTensor`s on `device`.
    """

    title = "FSDP2"

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[torch.nn.Module],
        passes: Passes,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import (
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            # Without it the ranks wait for each other where an expert has a gradient on some of them only.
            raise InputError(
                f"FSDP2 needs PyTorch 2.13 or newer, and this is {torch.__version__}: install a newer one, "
                "or train without fsdp"
            )
        self._model = model
        self._units: list[Any] = [model, *layers]
        mesh = DeviceMesh.from_group(passes.group, device.type)
        dtypes = {p.dtype for p in model.parameters()}
        reduced = None if torch.float64 in dtypes else torch.float32
        cast = autocast if dtypes == {torch.float32} else None
        of_layers = MixedPrecisionPolicy(cast, reduced, cast_forward_inputs=False)
        of_rest = MixedPrecisionPolicy(None, reduced, cast_forward_inputs=False)
        # Buffers are small, and whole on every rank.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=of_layers, reshard_after_forward=True)
        # Embeddings, the last norm and the head stay whole from a forward to its backward; each act then reshards them.
        fully_shard(model, mesh=mesh, mp_policy=of_rest, reshard_after_forward=False)
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            # With a factor of 1 this is the same number, and every backend and dtype has it.
            unit.set_force_sum_reduction_for_comms(True)
            # A tensor may have a gradient on some ranks only, such as an expert's.
            unit.set_reduce_scatter_unused_params(True)
            # `fully_shard` gives the module a class of its own. Who reads the class's name must find the model's.
            type(unit).__name__ = type(unit).__name__.removeprefix("FSDP")
        vars(model)[_RUN] = lambda compute: compute()
        register_fsdp_forward_method(model, _RUN)
        self._units[0]._get_fsdp_state()._lazy_init()

    def gather(self, group: int) -> None:
        """Make the weights of one group whole, until `end`."""
        self._units[group].unshard()

    def run(self, forward: Callable[[], list[torch.Tensor | None]]) -> None:
        """Compute a forward of the model. The weights are gathered around it, and around its backward.

        `forward` returns the tensors through which a backward may begin.
        """
        vars(self._model)[_RUN](forward)

    def end(self) -> None:
        """After a forward, or after its backward: free all that is gathered."""
        self._units[0].reset_iter_state()

    def whole_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The tensor that a backward adds this parameter's gradient to, before the ranks' parts are summed."""
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    if one.sharded_param is parameter:
                        return one._unsharded_param
        return None

    def odd(self) -> list[str]:
        """Names of wrongly held parameters, beside those of which the model shows whole tensors."""
        return []
