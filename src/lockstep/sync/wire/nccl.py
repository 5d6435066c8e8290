"""The trainer's end of the NCCL transport: weights go from the trainer's GPU to the GPUs of servers, without a copy in main memory.

`sync/wire/gloo.py` drives the push, as over gloo. `groups/devices.py` has the connections. It has not been run on a GPU yet.

vLLM 0.32.0 has a transfer engine for NCCL too. It is not used: its workers unpickle what they find in the trainer's store
(`StatelessProcessGroup.broadcast_obj`), and that store has no authentication. Its other way to meet, a given NCCL id, has no
trainer's end in vLLM. In both ways its waits have no limit.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep.errors import InputError
from lockstep.sync.wire.chunks import Named
from lockstep.sync.wire.gloo import NCCL, GlooTransport
from lockstep.sync.wire.groups.devices import DeviceChannel, KeptChannel
from lockstep.sync.wire.groups.meeting import Meeting
from lockstep.sync.wire.receivers import WeightReceiverCalls


class NCCLTransport(GlooTransport):
    """Sends whole tensors from device to device. Tensors of parts of the model in which nothing changed are left out.

    Changed elements alone are not sent: finding them needs a copy in main memory, and takes longer than sending everything
    over NCCL (docs/internals/plan.md).

    The group of the trainer and the workers stays for the run. It is made again for other servers, for one that was started again,
    and after a push that failed.

    Args:
        host: this machine's address, as the servers reach it.
        port: port that the servers connect to; 0 means a free port.
        timeout: seconds that a whole push may take.
        device: the trainer's device. On a CPU, gloo takes the place of NCCL.
    """

    _name = NCCL

    def __init__(self, host: str, port: int, timeout: float, device: torch.device) -> None:
        super().__init__(host, port, timeout, deltas=False)
        self._device = device
        self._kept = KeptChannel(device)
        # The workers of the kept group. Other workers, or the same in another order, get a group of another name.
        self._members: list[tuple[str, int]] = []

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        members = [(server.url, server.world_size) for server in servers]
        if members != self._members:
            self._members, self._group = members, secrets.token_hex(16)
        super().send(tensors, servers, base)

    def forget(self) -> None:
        super().forget()
        self._kept.close()

    def close(self) -> None:
        """End the group. The workers end theirs when another trainer comes, or when their server ends."""
        self._kept.close()

    def _channel(self, meeting: Meeting) -> DeviceChannel:
        return self._kept.join(meeting, self._group)


def own_gpu(transport: str) -> torch.device:
    """The GPU of this process, for a transport between GPUs.

    Raises:
        InputError: this process has no GPU, or the transport is NCCL and its PyTorch has none.
    """
    if not torch.cuda.is_available():
        raise InputError(
            f"vllm_weight_transport={transport}, but this process has no NVIDIA GPU; use auto, shared_memory or gloo"
        )
    if transport == NCCL and not dist.is_nccl_available():
        raise InputError(
            "vllm_weight_transport=nccl, but this PyTorch was built without NCCL; use auto, shared_memory or gloo"
        )
    return torch.device("cuda", torch.cuda.current_device())


def identity_of(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in every process; empty for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_gpus(own: str, servers: Sequence[WeightReceiverCalls]) -> None:
    """Check that the trainer and each worker have a GPU of their own. NCCL accepts no two processes on one GPU.

    Args:
        own: UUID of the trainer's GPU.

    Raises:
        InputError: a worker has no GPU, or the GPU of another process.
    """
    users = {own: "the trainer"}
    for server in servers:
        for found in server.workers("lockstep_device"):
            gpu, user = found["gpu"], f"the server at {server.url}"
            if not gpu:
                raise InputError(
                    f"vllm_weight_transport=nccl, but {user} computes without an NVIDIA GPU; use auto, shared_memory or gloo"
                )
            if gpu in users:
                raise InputError(
                    f"vllm_weight_transport=nccl, but {users[gpu]} and {user} use the same GPU ({gpu}), which NCCL refuses: give "
                    "each a GPU of its own (CUDA_VISIBLE_DEVICES), or use shared_memory"
                )
            users[gpu] = user
