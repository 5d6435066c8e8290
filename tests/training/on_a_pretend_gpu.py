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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pretend_cuda

pretend_cuda.activate()

import torch

from lockstep import GRPOConfig
from lockstep.engines.vllm.workers.start import number_of_workers
from lockstep.errors import InputError
from lockstep.parity.resume.surroundings import surroundings
from lockstep.training.run_files.run_identity import curve_settings

torch.cuda.device_count = lambda: 2


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


if __name__ == "__main__":
    print(json.dumps({part.__name__: part() for part in (several_gpus, other_device, determinism)}))
