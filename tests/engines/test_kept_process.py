"""After vLLM has started in the trainer's process, the trainer computes as before."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from conftest import needs_vllm, start

from lockstep.engines.vllm.start import nothing_frozen, process_kept


def state() -> dict[str, Any]:
    """What a trainer's numbers and speed depend on in its process. vLLM's own variables are vLLM's."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)
    return {
        "threads": torch.get_num_threads(),
        "the setter of threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "precisions": [place.fp32_precision for place in places],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "numbers of torch": torch.get_rng_state().tolist(),
        "numbers of numpy": str(np.random.get_state()),
        "numbers of python": random.getstate(),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:]),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "folder": os.getcwd(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "CUBLAS", "NCCL_", "PYTEST_"))
        },
    }


@contextmanager
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A process with settings that vLLM would change. Yields the calls that freeze its objects."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("NUMEXPR_MAX_THREADS", "77")
    before = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    torch.set_num_threads(3)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield frozen
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.fp32_precision = before[1]


def as_vllms_workers() -> None:
    """What vLLM 0.32.0's workers and platforms do, for GPUs and for CPUs."""
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.bfloat16)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    gc.freeze()
    os.environ.update(LOCAL_WORLD_SIZE="1", NUMEXPR_MAX_THREADS="2", VLLM_DIST_IDENT="own")
    os.environ.pop("HOME", None)


def test_what_vllms_workers_change_is_put_back_after_a_start_and_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    with known(monkeypatch) as frozen:
        before = state()
        with process_kept(), nothing_frozen():
            as_vllms_workers()
        assert state() == before
        assert os.environ["VLLM_DIST_IDENT"] == "own"
        with suppress(RuntimeError), process_kept(), nothing_frozen():
            as_vllms_workers()
            raise RuntimeError("vLLM cannot start")
        assert state() == before
    assert not frozen


@pytest.mark.vllm
@needs_vllm
def test_a_real_start_leaves_the_trainers_process_as_it_was(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with known(monkeypatch) as frozen:
        before, count = state(), len(frozen)
        engine = start("vllm", untied_dir)
        try:
            now = state()
            assert [name for name in before if now[name] != before[name]] == []
        finally:
            engine.close()
    # Only Lockstep's own, after the import.
    assert len(frozen) <= count + 1
