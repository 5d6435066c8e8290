"""The device on which this process trains: one GPU, or the CPU where there is no GPU or the user asks for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch

from lockstep.models.cuda import check_driver, unused_gpus

if TYPE_CHECKING:
    from lockstep.training.config.online_config import OnlineConfig

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
            f"this machine has NVIDIA GPUs ({', '.join(gpus)}), and PyTorch {torch.__version__} is built without CUDA, so that the "
            "CPU trains; set use_cpu to true if this is wanted"
        )
    config.use_cpu = True


def ask_for_determinism(config: OnlineConfig, environment: MutableMapping[str, str]) -> None:
    """Let CUDA's products and vLLM's kernels give the same bits again, if the run asks for it. Both read this when they start.

    transformers makes PyTorch deterministic, which does not reach the engine: vLLM's kernels depend on what else is in the batch,
    unless it is in its batch-invariant mode. Values of the user's have priority.
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
        f"({torch.cuda.get_device_name(config.device)}); CUDA_VISIBLE_DEVICES chooses another one, and torchrun starts one process "
        "per GPU"
    )
    config._n_gpu = 1
