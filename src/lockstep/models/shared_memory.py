"""Finds trained parameters that share memory with another parameter.

An optimizer steps each parameter object. If two objects hold the same numbers, each step changes the numbers twice,
each time by a part of their gradient. One object under several names (a tied head) is no such case. The check is made
before training.
"""

from __future__ import annotations

import torch

from lockstep.errors import InputError


def refuse_shared_memory(model: torch.nn.Module) -> None:
    """Refuse a model in which a trained parameter and another parameter are different objects in the same memory.

    Raises:
        InputError: there is such a pair. PEFT makes one for a LoRA on a tied embedding with `ensure_weight_tying`.
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
                    f"{other_name} and {name} are two parameters in the same memory: an optimizer would change their numbers twice "
                    "per step. Give tied layers one parameter: with ensure_weight_tying, name an embedding in modules_to_save "
                    "instead of target_modules; or leave it out"
                )
        place.fill_(number)
