"""Prints as JSON what Lockstep does in a process on a machine with two GPUs. `test_device.py` runs it, and compares.

A program of its own, because a pretend GPU must be there before PyTorch is imported.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import pretend_cuda

pretend_cuda.activate(devices=2)

import torch

from lockstep import GRPOConfig
from lockstep.contract.tensors import tensor_specs
from lockstep.engines.vllm.start import number_of_workers
from lockstep.errors import InputError
from lockstep.learn.pack import pack_rows
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.adapters import _digest
from lockstep.run.files.identity import curve_settings
from lockstep.watch.inputs import surroundings
from lockstep.watch.resume import memory_digests


def config(**fields: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", bf16=False, report_to=[], **fields)


def said(**fields: Any) -> tuple[GRPOConfig, str]:
    with contextlib.redirect_stderr(io.StringIO()) as written:
        made = config(**fields)
    return made, written.getvalue()


def several_gpus() -> dict[str, Any]:
    one, line = said(vllm_tensor_parallel_size=2)
    server, _ = said(vllm_mode="server", vllm_server_base_url="http://127.0.0.1:1")
    on_cpu, other_line = said(use_cpu=True)
    try:
        number_of_workers({"tensor_parallel_size": 4})
        refused = ""
    except InputError as error:
        refused = str(error)
    return {
        "n_gpu": [one.n_gpu, server.n_gpu, on_cpu.n_gpu],
        "sequences": [
            c.vllm_max_num_seqs for c in (config(use_vllm=True), config(use_vllm=True, vllm_max_num_seqs=7))
        ],
        "batch": [one.train_batch_size, on_cpu.train_batch_size],
        "device": [str(one.device), str(server.device), str(on_cpu.device)],
        "line": line,
        "line on the cpu": other_line,
        "workers": number_of_workers({"tensor_parallel_size": one.vllm_tensor_parallel_size}),
        "refused": refused,
    }


def other_device() -> dict[str, Any]:
    here, there = config(), config(use_cpu=True)
    return {
        "equal": curve_settings(here) == curve_settings(there),
        "devices": [surroundings(use_cpu=c.use_cpu)["device"] for c in (here, there)],
    }


def determinism() -> dict[str, Any]:
    names = "CUBLAS_WORKSPACE_CONFIG", "VLLM_BATCH_INVARIANT"

    def after(**fields: Any) -> list[str | None]:
        config(**fields)
        return [os.environ.pop(name, None) for name in names]

    found = {
        "off": after(),
        "on the cpu": after(use_cpu=True, full_determinism=True),
        "on": after(full_determinism=True),
    }
    os.environ["VLLM_BATCH_INVARIANT"] = "0"
    return {**found, "of the user": after(full_determinism=True)}


def reads_in_other_threads() -> dict[str, Any]:
    """For each digest: how many of the GPU's tensors another thread has read, and how many too early."""
    of_thread, reads, detach = threading.local(), [], torch.Tensor.detach
    here = threading.get_ident()

    class Stream:
        def record_event(self) -> int:
            return threading.get_ident()

        def wait_event(self, event: int) -> None:
            of_thread.event = event

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda and threading.get_ident() != here:
            reads.append(getattr(of_thread, "event", None) == here)
            of_thread.event = None
        return detach(tensor)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    works = {
        "push": lambda: tensor_specs(list(model.named_parameters())),
        "base": lambda: _digest(list(model.named_parameters())),
        "checkpoint": lambda: memory_digests({"model": model}, optimizer, schedule),
    }
    found = {}
    with (
        patch.object(torch.cuda, "current_stream", lambda device=None: Stream()),
        patch.object(torch.Tensor, "detach", noted),
    ):
        for name, work in works.items():
            reads.clear()
            work()
            found[name] = [len(reads), reads.count(False)]
    return found


def plain_rows() -> dict[str, Any]:
    """The positions of a pack of two plain rows, as they arrive on the device."""
    (pack,) = pack_rows([TrainingSequence(f"a#{i}", (5, 6), (7, 8), (0.0,) * 2) for i in range(2)], 64)
    there = pack.to(torch.device("cuda"))
    return {"device": there.position_ids.device.type, "positions": there.position_ids.tolist()}


if __name__ == "__main__":
    parts = (several_gpus, other_device, determinism, reads_in_other_threads, plain_rows)
    print(json.dumps({part.__name__: part() for part in parts}))
