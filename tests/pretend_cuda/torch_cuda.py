"""The Python side of the device: what `torch.cuda` says about it, and bindings that a CPU build of PyTorch lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .log import LOG
from .streams import Event, Stream


class Properties:
    """Stands for what `torch.cuda.get_device_properties` returns: figures of an H100."""

    name, major, minor, multi_processor_count = "Pretend GPU", 9, 0, 132
    uuid, gcnArchName, warp_size, max_threads_per_multi_processor = "pretend-0", "", 32, 2048
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448
    shared_memory_per_multiprocessor, regs_per_multiprocessor, L2_cache_size = 233472, 65536, 50 << 20
    is_integrated, is_multi_gpu_board = False, False

    def __init__(self, memory: int) -> None:
        self.total_memory = memory


class _Device:
    """Stands for `torch.cuda.device`."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _StreamContext(_Device):
    """Stands for `torch.cuda.StreamContext`. Dynamo asks whether an object is one."""


@contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _synchronize(device: Any = None) -> None:
    LOG.event("sync", "cuda.synchronize", "", 0)


def patch(extension: Any, memory: int, devices: int) -> None:
    """Make `torch.cuda` say that there is a device.

    Args:
        memory: bytes of the device.
        devices: the number of devices that are counted.
    """
    found = {**_presence(devices), **_memory(extension, memory), **_streams(), **_generators(extension)}
    for name, value in found.items():
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.version.cuda = "12.8"
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    bindings = {
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getDevice": lambda: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_isInBadFork": False,
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_getCurrentRawStream": lambda index: 0,
    }
    for name, value in bindings.items():
        setattr(torch._C, name, value)
    base: Any = torch.storage._StorageBase
    base.to = _storage_to
    base.clone = _storage_clone
    whole: Any = torch.UntypedStorage
    of_the_host = whole.resize_
    whole.resize_ = lambda self, size: _storage_resize(self, size, of_the_host)
    # There is one stream, so memory is never given to another one. The binding asks for a stream of PyTorch's own
    # class.
    torch.Tensor.record_stream = lambda self, stream: None
    # The marks of CUDA's profiler, which DeepSpeed sets.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0
    base.cuda = lambda self, device=None, non_blocking=False: _storage_to(self, device="cuda")


def _presence(devices: int) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: devices,
        "_device_count_nvml": lambda: devices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _Device,
        "device_of": _nothing,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "get_arch_list": lambda: ["sm_90"],
        "utilization": lambda device=None: 0,
    }


def _memory(extension: Any, memory: int) -> dict[str, Any]:
    def now(device: Any = None) -> int:
        return extension.allocated()

    def most(device: Any = None) -> int:
        return extension.peak()

    def forget(device: Any = None) -> None:
        extension.reset_peak()

    return {
        "get_device_properties": lambda device=None: Properties(memory),
        "mem_get_info": lambda device=None: (memory - now(), memory),
        "memory_allocated": now,
        "memory_reserved": now,
        "max_memory_allocated": most,
        "max_memory_reserved": most,
        "reset_peak_memory_stats": forget,
        "reset_max_memory_allocated": forget,
        "memory_stats": lambda device=None: {
            "num_alloc_retries": 0,
            "allocated_bytes.all.current": now(),
            "allocated_bytes.all.peak": most(),
        },
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _streams() -> dict[str, Any]:
    stream = Stream()
    return {
        "synchronize": _synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: stream or _nothing(),
        "StreamContext": _StreamContext,
        "is_current_stream_capturing": lambda: False,
    }


def _generators(extension: Any) -> dict[str, Any]:
    generator = extension.the_generator()

    def seeded(seed: int) -> None:
        generator.manual_seed(int(seed))

    return {
        "manual_seed": seeded,
        "manual_seed_all": seeded,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(next(iter(states))),
        "default_generators": (generator,),
    }


# The bindings of a CPU build know no storage of a GPU, so a storage is copied as a tensor of bytes.


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_clone(self: Any) -> Any:
    return (
        torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device)
        .copy_(_bytes_of(self))
        .untyped_storage()
    )


def _storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
    target = torch.device(device)
    if target.type == self.device.type:
        return self
    return (
        torch.empty(self.nbytes(), dtype=torch.uint8, device=target).copy_(_bytes_of(self)).untyped_storage()
    )


def _storage_resize(self: Any, size: int, of_the_host: Any) -> Any:
    if self.device.type == "cpu":
        return of_the_host(self, size)
    torch.ops.pretend_cuda.resize_storage(_bytes_of(self), size)
    return self
