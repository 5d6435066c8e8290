"""The device on which this process trains: one GPU, or the CPU where there is no GPU or the user asks for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
