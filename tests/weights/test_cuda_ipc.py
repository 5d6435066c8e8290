"""What `weights/wire/cuda_ipc.py` relies on in PyTorch.

Pushes over CUDA IPC are in `tests/pretend_cuda/test_runs.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_transports import Worker
from torch.multiprocessing import reductions

from lockstep.errors import InputError
from lockstep.weights.wire import cuda_ipc, shared_memory
from lockstep.weights.wire.cuda_ipc import NAME
from lockstep.weights.wire.shared_memory import TrainerLock, TrainerSlots, segment_bytes, worker_chunks
from lockstep.weights.wire.transport import choose_transport

FIELDS = [
    "device", "handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
    "event_handle",
    "event_sync_required",
]  # fmt: skip


def test_pytorch_gives_and_takes_the_eight_fields_in_this_order() -> None:
    """The binding has no signature. PyTorch's own callers show it."""
    (given,) = [
        [target.id for target in node.targets[0].elts]
        for node in ast.walk(ast.parse(inspect.getsource(reductions.reduce_tensor)))
        if isinstance(node, ast.Assign) and "_share_cuda_" in ast.unparse(node.value)
    ]
    (taken,) = [
        [
            argument.id.removeprefix("storage_") if i < 2 else argument.id
            for i, argument in enumerate(node.args)
        ]
        for node in ast.walk(ast.parse(inspect.getsource(reductions.rebuild_cuda_tensor)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_new_shared_cuda")
    ]
    assert given == taken == FIELDS
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)


def test_the_counters_are_those_of_pytorch() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/CudaIPCTypes.h"
    (count,) = re.findall(r"CUDA_IPC_REF_COUNTER_FILE_SIZE = (\d+);", header.read_text(encoding="utf-8"))
    assert int(count) == cuda_ipc.COUNTERS
    # The same function of PyTorch names the files of tensors that processes share by name.
    _, name, _ = torch.empty(8).untyped_storage()._share_filename_cpu_()
    assert cuda_ipc.COUNTER_FILE.fullmatch(name)
    for other in (
        b"/torch_1_2",
        b"/torch_1_2_3/../x",
        b"/torch_1_2_3\n",
        b"torch_1_2_3",
        b"/dev/shm/torch_1_2_3",
    ):
        assert not cuda_ipc.COUNTER_FILE.fullmatch(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_trainer_without_a_gpu_is_refused_by_name_and_auto_does_not_ask() -> None:
    with pytest.raises(
        InputError, match="vllm_weight_transport=cuda_ipc, but this process has no NVIDIA GPU"
    ):
        choose_transport(NAME, [Worker()], "127.0.0.1", 0, 20.0)


@pytest.mark.parametrize(("offset", "refused"), [(0, False), (64, True), (256, True)])
def test_a_tensor_of_a_push_that_ends_beyond_the_buffer_is_refused(
    tmp_path: Path, offset: int, refused: bool
) -> None:
    """The manifest of a push names places in the buffer whose handle came before."""
    path, buffer = tmp_path / "segment", torch.zeros(256, dtype=torch.uint8)
    lock = TrainerLock(shared_memory.new_file(path, segment_bytes(0, 1)))
    memory = shared_memory.map_file(path, segment_bytes(0, 1))
    slots = TrainerSlots(memory, 256, 1, 20.0, buffer)
    push = slots.begin_push()
    slots.announce_filled(0)
    places = [[["t", "uint8", [256], slots.offset(0) + offset]]]
    with path.open("rb") as file:
        incoming = worker_chunks(
            memory, file.fileno(), places, push=push, worker=0, workers=1, timeout=20.0, buffer=buffer
        )
        with (
            pytest.raises(ValueError, match="t is outside the buffer of 256 bytes")
            if refused
            else nullcontext()
        ):
            assert [(name, len(tensor)) for ((name, tensor),) in incoming] == [("t", 256)]
    if refused:
        with pytest.raises(RuntimeError, match="left the push"):
            slots.check_all_loaded(1)
    lock.close()
