"""Builds the command line and environment of vLLM's own server: with what training needs, and closed to everybody else.

`lockstep serve` calls it, and `server/supervisor.py` runs the result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from lockstep.engines.vllm.arguments import SERVER_BACKEND, WORKER_EXTENSION, cpu_cache_bytes, engine_arguments
from lockstep.engines.vllm.pictures import picture_arguments
from lockstep.errors import InputError
from lockstep.models.policy import context_length
from lockstep.models.vision import reads_pictures
from lockstep.server.adapters import ENVIRONMENT, adapter_words
from lockstep.server.arguments import check_words, name_of
from lockstep.server.keys import KEY_VARIABLE

# Limit of a CPU's cache if the user gives no length.
_LARGEST_CPU_CACHE = 4 << 30
# GiB of memory that the pictures of prompts may take. vLLM takes the memory as pictures come.
_PICTURE_CACHE = 4


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options that a user may set for a server.

    vLLM's own parser, in the server's process, reads and checks `rest` (`server/launch.py`).

    Attributes:
        model: directory or hub id, resolved.
        max_model_len: longest prompt + completion in tokens; None: the model's own limit.
        fp32_head: whether the output head computes in float32, whatever `dtype` is.
        rest: further arguments of vLLM's server, as the user typed them.
    """

    model: str
    host: str
    port: int
    dtype: torch.dtype
    max_model_len: int | None
    max_num_seqs: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    fp32_head: bool = False
    rest: tuple[str, ...] = ()

    @property
    def follows(self) -> bool:
        """Whether this is not the first of several nodes that share one model. Only the first node answers calls."""
        return _given(self.rest).get("node_rank", "0") != "0"

    @property
    def url(self) -> str:
        """The URL at which this machine reaches the server. If it is on the first of several nodes, it has the same port there."""
        scheme = "https" if any(word.startswith("--ssl-certfile") for word in map(_dashed, self.rest)) else "http"
        host = _given(self.rest).get("master_addr", "") if self.follows else self.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        host = f"[{host}]" if ":" in host else host
        return f"{scheme}://{host}:{self.port}"


def command_line(options: ServeOptions) -> list[str]:
    """The command that starts vLLM's API server.

    Raises:
        InputError: an argument may not be set, or neither the user nor the model gives a maximum length.
    """
    check_words(options.rest)
    length = _context(options.model) if options.max_model_len is None else options.max_model_len
    arguments: dict[str, Any] = {
        **engine_arguments(options.model, options.dtype, length, options.max_num_seqs, fp32_head=options.fp32_head),
        **(
            picture_arguments(cache_gb=_PICTURE_CACHE)
            if reads_pictures(AutoConfig.from_pretrained(options.model))
            else {}
        ),
        "host": options.host,
        "port": options.port,
        "tensor_parallel_size": options.tensor_parallel_size,
        # The token-in, token-out endpoint.
        "enable_scale_out": True,
        "weight_transfer_config": {"backend": SERVER_BACKEND},
        # Requests of the proofs are answered before completions that are generated ahead.
        "scheduling_policy": "priority",
        "worker_extension_cls": WORKER_EXTENSION,
        "middleware": "lockstep.server.guard.KeyGuard",
        "disable_fastapi_docs": True,
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    else:
        needed = cpu_cache_bytes(options.model, options.dtype, length, options.max_num_seqs)
        arguments["kv_cache_memory_bytes"] = min(needed, _LARGEST_CPU_CACHE)
    said = {name_of(word) for word in options.rest if word.startswith("--")}
    said |= {name.removeprefix("no_") for name in said}
    words = [word for name, value in arguments.items() if name not in said for word in _words(name, value)]
    if "enable_lora" in said:
        words += adapter_words(options.model, said)
    return [sys.executable, "-m", "lockstep.server.launch", *words, *map(_dashed, options.rest)]


def environment(key: str, options: ServeOptions, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the server's processes."""
    ours = {name: value for name, value in given.items() if name not in _DROPPED}
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    names = _given(options.rest)
    if not torch.cuda.is_available():
        defaults |= _cpu_settings(len(os.sched_getaffinity(0)))
        if "OMP_WAIT_POLICY" in ours:
            # The user has set the wait policy, and the next setting would override it.
            del defaults["GOMP_SPINCOUNT"]
        if options.tensor_parallel_size == 1 and not _SEVERAL_WORKERS & names.keys():
            # Run the model in the scheduler's process. Otherwise the scheduler spins while it waits for the model.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM's own processes unpickle what they send each other. `--host` is the address of the guarded server alone.
    inside = {} if _has_several_nodes(names) else _LOOPBACK
    adapters = ENVIRONMENT if "enable_lora" in names else {}
    return {**defaults, **ours, **inside, **adapters, **_path_of(ours), **_ALWAYS, KEY_VARIABLE: key}


_SEVERAL_NODES = {"nnodes", "node_rank", "master_addr"}
_EXECUTOR = "distributed_executor_backend"
_SEVERAL_WORKERS = {"pipeline_parallel_size", _EXECUTOR, *_SEVERAL_NODES}
_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
# Without PYTHONSAFEPATH, Python would import a `vllm.py` that lies in the current directory.
_ALWAYS = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}

# These would let the server unpickle what it receives, or open some of its paths with a second key.
_DROPPED = frozenset({"VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_API_KEY"})


def _given(rest: Sequence[str]) -> dict[str, str]:
    """The names that the user has set, each with its value: behind `=`, or the next word."""
    following = [*rest, ""][1:]
    return {
        name_of(word): word.partition("=")[2] or after
        for word, after in zip(rest, following, strict=False)
        if word.startswith("--")
    }


def _has_several_nodes(names: Mapping[str, str]) -> bool:
    return bool(_SEVERAL_NODES & names.keys()) or names.get(_EXECUTOR, "mp") not in ("mp", "uni")


def _path_of(given: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH without its empty entries, which stand for the current directory. They are usually there by accident."""
    path = given.get("PYTHONPATH")
    return {} if path is None else {"PYTHONPATH": os.pathsep.join(filter(None, path.split(os.pathsep)))}


def _cpu_settings(cores: int) -> dict[str, str]:
    """Threads and memory of an engine that shares its machine with a trainer. The measurements are in docs/internals/server.md."""
    return {
        # vLLM would keep one core for its scheduler and bind its threads to the others.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cores),
        # By default a waiting thread would spin for some milliseconds, on a core that the trainer needs.
        "GOMP_SPINCOUNT": "3000",
        # oneDNN would keep its last 1024 matmuls, and every new number of tokens per step adds five: before that was full, the
        # server grew by a fifth. vLLM itself keeps 32 per shape of weights; the 128 are for torch's own calls.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }


def _context(model: str) -> int:
    length = context_length(AutoConfig.from_pretrained(model))
    if length is None:
        raise InputError("the model's config does not say how long a sequence may be; set max_model_len")
    return length


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else [flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _dashed(word: str) -> str:
    """An argument in vLLM's spelling, with dashes. The keys behind a dot are JSON keys and do not change."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    argument, dot, keys = name.partition(".")
    return argument.replace("_", "-") + dot + keys + equals + value
