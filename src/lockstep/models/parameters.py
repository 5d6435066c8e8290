"""The parameters of a model: their names in checkpoints, and those that share memory.

transformers holds the weights of all experts of a layer in two tensors, while checkpoints and vLLM's loaders have one
tensor per expert and projection. Here each such tensor is a view of the model's own memory.

An optimizer steps each parameter object. If two objects hold the same numbers, each step changes the numbers twice,
each time by a part of their gradient. One object under several names (a tied head) is no such case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.errors import InputError


class RowRange(NamedTuple):
    """The rows of a model's parameter that are one tensor of a checkpoint.

    Attributes:
        name: the tensor's name in the checkpoint.
        start, rows: the first row and the number of rows, if the parameter's first two dimensions are flattened to one.
            `rows` is 0 if the tensor is the whole parameter.
    """

    name: str
    start: int = 0
    rows: int = 0


class CheckpointTensor(NamedTuple):
    """A tensor under its checkpoint name: the parameter `parameter_name` itself, or a view of its memory."""

    name: str
    tensor: torch.Tensor
    parameter_name: str


# Kept per parameter, because transformers finds conversions by regular expressions and every push needs them.
_found_ranges: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[RowRange, ...]]] = WeakKeyDictionary()


def checkpoint_tensors(
    model: torch.nn.Module, named: Mapping[str, torch.Tensor] | None = None
) -> list[CheckpointTensor]:
    """Every parameter of a model, once per name, split and named as in a checkpoint.

    Args:
        named: tensors by the model's own names; None: all parameters of the model.

    Raises:
        InputError: the weights of one expert are not consecutive rows of the parameter.
    """
    if named is None:
        named = dict(model.named_parameters(remove_duplicate=False))
    ranges = _row_ranges(model, named)
    found = []
    for name, tensor in named.items():
        for part in ranges.get(name, (RowRange(name),)):
            own = tensor.detach().flatten(0, 1).narrow(0, part.start, part.rows) if part.rows else tensor
            found.append(CheckpointTensor(part.name, own, name))
    return found


def expert_names(model: torch.nn.Module) -> list[str]:
    """The names of parameters that hold the weights of several experts."""
    return [name for name, parameter in model.named_parameters() if _holds_experts(name, parameter)]


def _holds_experts(name: str, parameter: torch.Tensor) -> bool:
    return ".experts." in name and parameter.dim() == 3


def _row_ranges(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, tuple[RowRange, ...]]:
    if not isinstance(model, PreTrainedModel) or not any(_holds_experts(*item) for item in named.items()):
        return {}
    ranges = _found_ranges.setdefault(model, {})
    for name, tensor in named.items():
        if name not in ranges:
            ranges[name] = _row_ranges_of(model, name, tensor)
    return ranges


def _row_ranges_of(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> tuple[RowRange, ...]:
    """The parts of one parameter: transformers converts a tensor that has the number of each row as its value."""
    if not _holds_experts(name, parameter):
        # In checkpoints of families with experts, other parameters may have other names too.
        (renamed,) = revert_weight_conversion(model, {name: torch.zeros(1)})
        return (RowRange(renamed),)
    rows = torch.arange(parameter.shape[0] * parameter.shape[1]).view(*parameter.shape[:2], 1)
    ranges = []
    for checkpoint_name, row_numbers in revert_weight_conversion(model, {name: rows}).items():
        row_numbers = row_numbers.flatten()
        first, count = int(row_numbers[0]), len(row_numbers)
        if not torch.equal(row_numbers, torch.arange(first, first + count)):
            raise InputError(
                f"{checkpoint_name} is stored in {name} in a way that cannot be sent to vLLM; set use_vllm "
                "to false, or train another model"
            )
        ranges.append(RowRange(checkpoint_name, first, count))
    return tuple(sorted(ranges, key=lambda part: part.start))


def refuse_shared_memory(model: torch.nn.Module) -> None:
    """Refuse a model in which a trained parameter and another parameter are different objects in the same memory.

    PEFT makes such a pair for a LoRA on a tied embedding with `ensure_weight_tying`.
    """
    by_storage: dict[object, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            storage = parameter.device, parameter.dtype, parameter.untyped_storage().data_ptr()
            by_storage.setdefault(storage, []).append((name, parameter))
    for sharing in by_storage.values():
        if len(sharing) > 1 and any(p.requires_grad for _, p in sharing):
            _refuse_overlap(sharing)


def _refuse_overlap(sharing: list[tuple[str, torch.nn.Parameter]]) -> None:
    first = sharing[0][1]
    # The number of the parameter that holds each element of the storage, from 1.
    owners = torch.zeros(first.untyped_storage().nbytes() // first.itemsize, dtype=torch.int32)
    for number, (name, parameter) in enumerate(sharing, 1):
        place = owners.as_strided(parameter.shape, parameter.stride(), int(parameter.storage_offset()))
        if earlier := int(place.max()):
            other_name, other = sharing[earlier - 1]
            if parameter.requires_grad or other.requires_grad:
                raise InputError(
                    f"{other_name} and {name} are two parameters in the same memory: an optimizer would "
                    "change their numbers twice per step. Give tied layers one parameter: with "
                    "ensure_weight_tying, name an embedding in modules_to_save instead of target_modules; "
                    "or leave it out"
                )
        place.fill_(number)
