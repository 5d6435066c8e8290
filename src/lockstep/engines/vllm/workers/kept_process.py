"""Keeps what a trainer's process computes with, while vLLM is imported and started in it.

vLLM takes the process for its own (0.32.0): its workers set the threads, the random numbers and the precision of
float32 products, the worker for CPUs replaces `torch.set_num_threads`, its import and its platforms set variables of
the environment, and its engine freezes all objects of the process for the garbage collector.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Where PyTorch keeps whether it rounds float32 numbers in products and convolutions.
_PRECISIONS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
)
# vLLM and the libraries of CUDA read these later too.
_READ_LATER = ("VLLM_", "CUBLAS", "NCCL_")


@contextmanager
def process_kept() -> Iterator[None]:
    """A context in which vLLM may start. At its end threads, precisions, random numbers and environment are as before."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_READ_LATER)}
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    dtype, precisions = torch.get_default_dtype(), [place.fp32_precision for place in _PRECISIONS]
    numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        for place, precision in zip(_PRECISIONS, precisions, strict=True):
            if place.fp32_precision != precision:
                place.fp32_precision = precision
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_rng_state(numbers[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)
        for name in os.environ.keys() - environment.keys():
            if not name.startswith(_READ_LATER):
                del os.environ[name]
        os.environ.update(environment)


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """A context in which nobody freezes the objects of this process, so that the collector still looks at those of the trainer."""
    freeze = gc.freeze
    gc.freeze = lambda: None
    try:
        yield
    finally:
        gc.freeze = freeze
