"""vLLM's own server as a command line and an environment: what training needs, and nothing open.

Comes from: `lockstep serve`. Goes to: `server/supervisor.py`, which runs it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from lockstep.engines.server_calls import is_local
from lockstep.engines.vllm_arguments import SERVER_BACKEND, WORKER_EXTENSION, cpu_cache_bytes, engine_arguments
from lockstep.errors import InputError
from lockstep.models.policy import context_length
from lockstep.server.arguments import check_words, name_of
from lockstep.server.keys import KEY_VARIABLE

# Without a length given, a CPU's cache takes no more than this.
_LARGEST_CPU_CACHE = 4 << 30


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a user may say of a server.

    `rest` is read by vLLM's own parser in the server's process, and checked there (`server/launch.py`).

    Attributes:
        model: directory or hub id, resolved.
        max_model_len: longest prompt + completion; None: the model's own.
        fp32_head: the output head's product is in float32, whatever `dtype` is.
        rest: further arguments of vLLM's server, as typed.
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
    def url(self) -> str:
        """Where this machine reaches the server."""
        scheme = "https" if any(word.startswith("--ssl-certfile") for word in map(_dashed, self.rest)) else "http"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"{scheme}://{host}:{self.port}"


def command_line(options: ServeOptions) -> list[str]:
    """The command that starts vLLM's API server.

    Raises:
        InputError: an argument may not be set, or neither the user nor the model says how long a sequence may be.
    """
    check_words(options.rest)
    length = _context(options.model) if options.max_model_len is None else options.max_model_len
    arguments: dict[str, Any] = {
        **engine_arguments(options.model, options.dtype, length, options.max_num_seqs, fp32_head=options.fp32_head),
        "host": options.host,
        "port": options.port,
        "tensor_parallel_size": options.tensor_parallel_size,
        # The token-in, token-out endpoint.
        "enable_scale_out": True,
        "weight_transfer_config": {"backend": SERVER_BACKEND},
        # What a proof asks is answered before generations that were begun ahead.
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
    return [sys.executable, "-m", "lockstep.server.launch", *words, *map(_dashed, options.rest)]


def environment(key: str, options: ServeOptions, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the server's processes."""
    ours = {name: value for name, value in given.items() if name not in _DROPPED}
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    names = {name_of(word) for word in options.rest}
    if is_local(options.host) and not _SEVERAL_NODES & names:
        # What vLLM's processes say to each other stays on this machine too.
        defaults |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if not torch.cuda.is_available():
        defaults |= _cpu_settings(len(os.sched_getaffinity(0)))
        if "OMP_WAIT_POLICY" in ours:
            # The user's own word on what the next setting is about, which it would override.
            del defaults["GOMP_SPINCOUNT"]
        if options.tensor_parallel_size == 1 and not _SEVERAL_WORKERS & names:
            # The model in the scheduler's own process: in one of its own, the scheduler spins while it waits for it.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**defaults, **ours, KEY_VARIABLE: key, "VLLM_SERVER_DEV_MODE": "1"}


_SEVERAL_NODES = {"nnodes", "node_rank", "master_addr", "distributed_executor_backend"}
_SEVERAL_WORKERS = {"pipeline_parallel_size", *_SEVERAL_NODES}

# Would let the server unpickle what comes over the wire, or open some of its paths with a second key.
_DROPPED = frozenset({"VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_API_KEY"})


def _cpu_settings(cores: int) -> dict[str, str]:
    """Threads and memory of an engine that shares its machine with a trainer: docs/server.md has what was measured."""
    return {
        # vLLM would keep one core for its scheduler and bind its threads to the others.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cores),
        # A thread that waits for its next share of work would look for it some milliseconds long, on a core that the trainer needs.
        "GOMP_SPINCOUNT": "3000",
        # oneDNN would keep its last 1024 matmuls, of which every number of tokens in a step makes five: the server grew by a
        # fifth before that was full. vLLM keeps 32 of each shape of weights itself; the 128 are for torch's own calls.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }


def _context(model: str) -> int:
    length = context_length(AutoConfig.from_pretrained(model))
    if length is None:
        raise InputError("the model's config names no longest sequence; set max_model_len")
    return length


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else [flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _dashed(word: str) -> str:
    """vLLM's spelling of an argument; the keys behind a dot are JSON's and stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    argument, dot, keys = name.partition(".")
    return argument.replace("_", "-") + dot + keys + equals + value
