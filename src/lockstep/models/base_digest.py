"""The digest of a base: names, shapes and values of a model's weights, without its adapter.

The same base has the same digest wherever it lies, in whatever order and in however many files it is stored. The
digest does not depend on the dtype in which the weights were loaded, as long as float32 holds their values. Therefore
it tells whether an adapter meets the base that it was trained on, and whether a reference model is the one with which
a run began. The receipt has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import xxhash

from lockstep.models.adapters import causal_model, is_adapted
from lockstep.models.checkpoint_names import checkpoint_tensors
from lockstep.models.cuda import read_in_threads
from lockstep.models.quantised import dequantised, is_quantised

# Elements that are converted and read at a time: few enough to stay in a processor's cache.
_PART = 1 << 18
# What PEFT names the module that it has wrapped: a layer with an adapter, and a module that is trained as a whole.
_WRAPPED = ("base_layer", "original_module")


def base_digest(model: torch.nn.Module) -> str:
    """Hex digest of a model's base.

    Every parameter and every saved buffer counts once, under the name of a checkpoint, with its shape and its values in float32
    (float64 and integers: as they are). Of tied tensors only the first name counts. Weights in 4 bits count as the values that
    their codes stand for. Adapters, and modules that PEFT trains as a whole, do not count; what they have replaced does.
    """
    inner = causal_model(model)
    named = dict(_tensors(inner, "", wrapped=is_adapted(model)))
    firsts: dict[object, str] = {}
    once = {name: tensor for name, tensor in named.items() if firsts.setdefault(id(tensor), name) == name}
    plain = {name: tensor for name, tensor in once.items() if not is_quantised(tensor)}
    tensors = [(part.name, part.tensor) for part in checkpoint_tensors(inner, plain)]
    return _digest(tensors + [(name, tensor) for name, tensor in once.items() if name not in plain])


def weights_digest(model: torch.nn.Module) -> str:
    """`base_digest`, and if the model has an adapter, a digest of its base and its adapter."""
    return _digest(list(_tensors(model, "", wrapped=False))) if is_adapted(model) else base_digest(model)


def _digest(tensors: list[tuple[str, torch.Tensor]]) -> str:
    contents = read_in_threads(_content, [tensor for _, tensor in tensors])
    lines = sorted(f"{name} {text}" for (name, _), text in zip(tensors, contents, strict=True))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _tensors(module: torch.nn.Module, prefix: str, *, wrapped: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers, by the base model's own names."""
    if wrapped:
        for inside in _WRAPPED:
            if inside in module._modules:
                yield from _tensors(getattr(module, inside), prefix, wrapped=wrapped)
                return
    saved = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in {**module._parameters, **saved}.items():
        if tensor is not None:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.", wrapped=wrapped)


def _content(tensor: torch.Tensor) -> str:
    values = dequantised(tensor) if is_quantised(tensor) else tensor.detach()
    narrow = values.is_floating_point() and values.dtype != torch.float64
    digest = xxhash.xxh3_128()
    for part in values.contiguous().flatten().split(_PART):
        plain = part.cpu().float() if narrow else part.cpu()
        digest.update(plain.view(torch.uint8).numpy().data)
    return f"{list(values.shape)} {digest.hexdigest()}"
