"""Devices: copies between the host and a GPU, settings of CUDA for the whole process, and why a GPU cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from lockstep.errors import InputError, told


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on a device.

    A tensor of the host goes to a GPU from pinned memory, in the order of the stream. PyTorch keeps that memory until
    the copy has ended. A plain copy would let the host wait until the GPU has done all of its work.
    """
    to_gpu = torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    # PyTorch cannot pin a tensor whose elements share memory, as those of `expand` do.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True) if to_gpu else tensor.to(device)


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the host, with their shapes and dtypes, without gradients. Equal dtypes are copied together."""
    held: dict[int, torch.Tensor] = {i: t.detach() for i, t in enumerate(tensors) if t.device.type == "cpu"}
    away = [i for i in range(len(tensors)) if i not in held]
    for dtype in {tensors[i].dtype for i in away}:
        own = [i for i in away if tensors[i].dtype == dtype]
        flat = torch.cat([tensors[i].detach().flatten() for i in own]).cpu()
        parts = flat.split([tensors[i].numel() for i in own])
        held |= {i: part.view(tensors[i].shape) for i, part in zip(own, parts, strict=True)}
    return [held[i] for i in range(len(tensors))]


_T = TypeVar("_T")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Values with which a user hides all GPUs.
_NONE_VISIBLE = ("", "-1", "none", "void", "nodevfiles")


def unused_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs for which NVIDIA's driver has files, if PyTorch uses none of them and the user has not hidden them."""
    if torch.cuda.is_available() or environment.get(_VISIBLE, "0").strip().lower() in _NONE_VISIBLE:
        return []
    return sorted(path.name for path in devices.glob("nvidia[0-9]*"))


def check_driver(environment: Mapping[str, str], instead: str, devices: Path = Path("/dev")) -> None:
    """Check that a PyTorch that is built for CUDA can use the GPUs of this machine, unless the user has hidden them.

    If it cannot, most often because the driver is too old, the error has the driver's own words, and says what to do
    to go on without a GPU (`instead`).
    """
    if torch.version.cuda is None or not (gpus := unused_gpus(environment, devices)):
        return
    trouble = "torch.cuda.is_available() is false"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        trouble = told(error)
    raise InputError(
        f"this machine has NVIDIA GPUs ({', '.join(gpus)}), and PyTorch {torch.__version__} cannot use them: "
        f"{trouble}. Install a driver for CUDA {torch.version.cuda}, or a PyTorch for the driver, and see that "
        f"{_VISIBLE} names GPUs that exist; {instead}"
    )


def has_fast_bf16() -> bool:
    """Whether bf16 is faster than fp32 on this machine.

    On a CPU without AMX or AVX-512 BF16 (or Arm's BF16) it is slower: oneDNN emulates it, at a fifth of fp32's speed
    on an AVX2 machine (19 against 105 GFLOP/s on two cores of an EPYC 7003).
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def usual_token_budgets() -> tuple[int, int]:
    """Positions of one forward that fill this machine's kernels and fit into usual memory (docs/internals/training.md).

    Returns:
        The number for a forward, and the number for a forward with all completions of one prompt. On a CPU the second
        is larger, because a CPU has more memory for its speed than a GPU.
    """
    return (4096, 4096) if torch.cuda.is_available() else (2048, 5120)


def cuda_rounds_float32() -> bool:
    """Whether CUDA multiplies float32 numbers in fewer bits (TF32).

    `torch.get_float32_matmul_precision` raises an error after `tf32: true`, with which transformers uses PyTorch's
    newer setting.
    """
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def rounds_products(*dtypes: torch.dtype) -> bool:
    """Whether a GPU rounds float32 numbers before it multiplies them (TF32), and one of these dtypes is float32.

    Triton's kernels, which vLLM's attention in float32 is, have a setting of their own: TRITON_F32_DEFAULT. Lockstep
    sets it to `ieee` for such an engine; a user's own value stays.
    """
    if torch.float32 not in dtypes or not torch.cuda.is_available():
        return False
    return cuda_rounds_float32() or os.environ.get("TRITON_F32_DEFAULT", "ieee") != "ieee"


def prepare_cuda() -> None:
    """Choose two settings in which PyTorch's defaults do not fit. Without a GPU they have no effect.

    - cuDNN does not compute attention. It makes a plan for each new shape, and packs have new shapes: on an H200 a
      pack then took 23 to 135 times as long (docs/internals/speed.md). vLLM switches it off too.
    - Convolutions multiply float32 numbers as matrix products do. PyTorch rounds them (TF32) in convolutions only,
      such as a vision tower's patch embedding. An engine that computes this embedding as a product does not round.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not cuda_rounds_float32():
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def marks_of(device: torch.device) -> Callable[[], torch.cuda.Event] | None:
    """A function that records an event on the calling thread's stream, whose time can be read later; None for a CPU."""
    if device.type != "cuda":
        return None

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return mark


Written = dict[torch.device, torch.cuda.Event]


def written_so_far(tensors: Iterable[torch.Tensor]) -> Written:
    """What this thread's streams have been given to do so far, by GPU of these tensors; nothing for a CPU."""
    gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in gpus}


def read_after(written: Written, read: Callable[[torch.Tensor], _T], tensor: torch.Tensor) -> _T:
    """What a function reads from a tensor after it was written. The calling thread has a stream of its own on a GPU."""
    if (event := written.get(tensor.device)) is not None:
        torch.cuda.current_stream(tensor.device).wait_event(event)
    return read(tensor)


def read_in_threads(read: Callable[[torch.Tensor], _T], tensors: Sequence[torch.Tensor]) -> list[_T]:
    """What a function reads from each tensor, in two threads, after all that this thread has written."""
    written = written_so_far(tensors)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda tensor: read_after(written, read, tensor), tensors))
