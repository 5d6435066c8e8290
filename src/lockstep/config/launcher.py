"""What the launcher and the machine decide: variables of `accelerate launch`, and the device of this process.

What `accelerate launch` sets in the environment beside the config: each variable that changes numerics is taken or
refused.

transformers and accelerate read these variables on their own, and the trainer would then compute otherwise than its
config says. The variables of FSDP and of DeepSpeed are read where their configurations are read. torchrun sets only
ranks, addresses and threads, which are read as they are.

The device on which this process trains: one GPU, or the CPU where there is no GPU or the user asks for it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lockstep.devices import check_driver, unused_gpus
from lockstep.errors import InputError
from lockstep.progress import waiting

if TYPE_CHECKING:
    from lockstep.config.run import OnlineConfig

_PRECISION = "ACCELERATE_MIXED_PRECISION"
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_YES = ("1", "true", "yes", "on", "y", "t")
# Variables that switch on what no proof has covered, with what to do instead.
_REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported; use FSDP2 or DeepSpeed ZeRO-3",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config is not supported; use FSDP2 or DeepSpeed ZeRO-3",
}

# torch's own limit where transformers gives it none: on a CPU.
_LIMIT_ON_CPU = 1800.0
# Seconds of one try to reach rank 0, and between two tries.
_TRY, _PAUSE = 5.0, 0.2


@contextmanager
def meeting_ranks(environment: Mapping[str, str], limit: float, *, use_cpu: bool) -> Iterator[None]:
    """A block in which torch lets the ranks meet; nothing where there is one rank, or they have met.

    torch waits half an hour without a word, and then ends in a traceback.

    Args:
        limit: seconds that the ranks may take (`ddp_timeout`).

    Raises:
        InputError: not all ranks come in time.
    """
    count = environment.get("WORLD_SIZE", "")
    if not count.isdigit() or int(count) < 2 or dist.is_initialized():
        yield
        return
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    where = f"{host or '(no MASTER_ADDR)'}:{port or '(no MASTER_PORT)'}"
    asked = f"WORLD_SIZE is {count}, so that {count} processes meet at {where} (MASTER_ADDR, MASTER_PORT)"
    instead = "start all of them, with torchrun or accelerate launch; for one alone, unset WORLD_SIZE"
    field = "ddp_timeout has the seconds"
    # Under torchrun its own process answers there, also for rank 0.
    if environment.get("RANK", "0") != "0" and host and port.isdigit():
        _await_answer(host, int(port), limit, f"{asked}, and nobody answers there ({{}}): {instead}. {field}")
    try:
        with waiting(
            f"the {count} processes of WORLD_SIZE to meet at {where}", _LIMIT_ON_CPU if use_cpu else limit
        ):
            yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        advice = instead if use_cpu else f"{instead}. {field}"
        raise InputError(
            f"{asked}, and not all came in time ({str(error).splitlines()[0]:.200}): {advice}"
        ) from error


def _await_answer(host: str, port: int, limit: float, otherwise: str) -> None:
    end, said = time.monotonic() + limit, [""]
    with waiting(f"rank 0 to answer at {host}:{port} (MASTER_ADDR, MASTER_PORT)", limit, lambda: said[0]):
        while True:
            try:
                socket.create_connection(
                    (host, port), timeout=max(0.1, min(_TRY, end - time.monotonic()))
                ).close()
                return
            except OSError as error:
                # A host without a name may get one later.
                said[0] = str(error)
            if time.monotonic() + _PAUSE > end:
                raise InputError(otherwise.replace("{}", said[0]))
            time.sleep(_PAUSE)


def take_launcher(config: OnlineConfig, environment: Mapping[str, str]) -> None:
    """Give the config what the launcher asks for and the config leaves open.

    Args:
        config: `bf16` is None if the user has not set it.

    Raises:
        InputError: a variable contradicts a field, or asks for what is not supported. The error names both.
    """
    for name, instead in _REFUSED.items():
        if environment.get(name, "").lower() in _YES:
            raise InputError(f"{name}={environment[name]}: {instead}, or unset it")
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "")
    if backend.lower() not in ("", "no"):
        raise InputError(
            f"ACCELERATE_DYNAMO_BACKEND={backend} compiles the model, and a compiled forward has not been "
            f"compared with the "
            "engine; unset it, or launch with --dynamo_backend no"
        )
    _take_precision(config, environment.get(_PRECISION, "").lower())
    steps = environment.get(_ACCUMULATION, "")
    # DeepSpeed's own check compares its value.
    uses_deepspeed = config.deepspeed or environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _YES
    if steps and not uses_deepspeed and steps != str(config.gradient_accumulation_steps):
        raise InputError(
            f"{_ACCUMULATION}={steps}, and gradient_accumulation_steps is "
            f"{config.gradient_accumulation_steps}; give the "
            "number in the config alone"
        )
    if environment.get("ACCELERATE_USE_CPU", "").lower() in _YES:
        config.use_cpu = True


def _take_precision(config: OnlineConfig, asked: str) -> None:
    """`accelerate launch` sets "no" unless it is told otherwise, so that "no" contradicts nothing."""
    if asked in ("", "no"):
        return
    if asked != "bf16":
        raise InputError(f"{_PRECISION}={asked} is not supported; launch with --mixed_precision bf16 or no")
    if config.bf16 is None and not config.fp16:
        config.bf16 = True
    elif not config.bf16:
        said = "fp16 is true" if config.fp16 else "bf16 is false"
        raise InputError(
            f"{_PRECISION}=bf16, and {said} in the config; set bf16 to true, or launch with --mixed_precision no"
        )


_logger = logging.getLogger(__name__)


def take_device(config: OnlineConfig, environment: Mapping[str, str]) -> None:
    """Let a run without a GPU train on the CPU.

    Raises:
        InputError: the machine has a GPU, and PyTorch cannot use it.
    """
    if config.use_cpu or torch.cuda.is_available():
        return
    check_driver(environment, "set use_cpu to true to train on the CPU")
    if gpus := unused_gpus(environment):
        _logger.warning(
            f"this machine has NVIDIA GPUs ({', '.join(gpus)}), and PyTorch {torch.__version__} is built "
            f"without CUDA, so that the "
            "CPU trains; set use_cpu to true if this is wanted"
        )
    config.use_cpu = True


def ask_for_determinism(config: OnlineConfig, environment: MutableMapping[str, str]) -> None:
    """Let CUDA's products and vLLM's kernels give the same bits again, if the run asks for it.

    Both read this when they start.

    transformers makes PyTorch deterministic, which does not reach the engine: vLLM's kernels depend on what else is
    in the batch, unless it is in its batch-invariant mode. Values of the user's have priority.
    """
    if config.full_determinism and torch.cuda.is_available() and not config.use_cpu:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        environment.setdefault("VLLM_BATCH_INVARIANT", "1")


def use_one_gpu(config: OnlineConfig) -> None:
    """Let a process that sees several GPUs train on one of them. transformers would put a copy of the model on each."""
    if config.n_gpu <= 1:
        return
    _logger.info(
        f"this process sees {config.n_gpu} GPUs and trains on one of them, {config.device} "
        f"({torch.cuda.get_device_name(config.device)}); CUDA_VISIBLE_DEVICES chooses another one, and "
        f"torchrun starts one process "
        "per GPU"
    )
    config._n_gpu = 1
