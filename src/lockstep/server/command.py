"""The command line and the environment of vLLM's own server: what training needs, the guard, and what a user may add.

Words of the user are checked before anything is loaded. Later the server's own process checks with vLLM's parser that
every word is the whole name of an argument and not an abbreviation (`server/launch.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from lockstep.engines.vllm.arguments import (
    OWN_CODE,
    REFUSED,
    SERVER_BACKEND,
    WORKER_EXTENSION,
    check_quantization,
    cpu_cache_bytes,
    engine_arguments,
    refuse_family,
    usual_sequences,
)
from lockstep.engines.vllm.environment import LOOPBACK, cpu_settings, exact_products
from lockstep.engines.vllm.port.requests import picture_arguments
from lockstep.errors import InputError
from lockstep.extensions import SERVER_FLAGS, SERVER_VARIABLES, load
from lockstep.images.files import LARGEST
from lockstep.model_files import load_files
from lockstep.models.policy import context_length, reads_pictures
from lockstep.server.keys import KEY_VARIABLE

# `lockstep serve` sets these itself. With another value, the server would be open to others or unusable for a trainer.
_SET_BY_SERVE = frozenset(
    {
        "api_key",
        "config",
        "enable_scale_out",
        "host",
        "logprobs_mode",
        "middleware",
        "model",
        "model_tag",
        "port",
        "root_path",
        "uds",
        "worker_extension_cls",
    }
)
# These would make the server run a worker, an adapter or a model that the proofs do not examine.
_NOT_PROVEN = frozenset(
    {
        "default_mm_loras",
        "enable_prompt_embeds",
        "kv_offloading_backend",
        "kv_offloading_size",
        "lora_modules",
        "quantization_config",
        "scheduler_cls",
        "tokenizer_revision",
        "worker_cls",
    }
)
# These open a port without a guard, or send prompts, weights or cache blocks to another program.
# `tests/server/free_arguments.txt` lists all arguments of this release of vLLM that are in none of these sets.
_OPENS_OR_SENDS = frozenset(
    {
        "api_server_count",
        "ec_manager_config",
        "ec_transfer_config",
        "elastic_ep_max_dp_size",
        "enable_elastic_ep",
        "enable_fault_tolerance",
        "fault_tolerance_config",
        "grpc",
        "grpc_port",
        "headless",
        "kv_events_config",
        "kv_transfer_config",
        "otlp_traces_endpoint",
        "tool_server",
    }
)
# Prefixes of arguments for several copies of the model in one server: no trainer can tell them apart.
_COPIES = ("data_parallel_", "dp_")


def name_of(word: str) -> str:
    """The argument's name: `max_num_seqs` for `--max-num-seqs`, `--max_num_seqs=4` and `--max-num-seqs.key`."""
    return word.partition("=")[0].partition(".")[0].lstrip("-").replace("-", "_")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that may not be on a server's command line: short forms, and arguments that the user may not set."""
    for word in words:
        if word.startswith("-") and not word.startswith("--") and not _is_number(word):
            raise InputError(f"{word}: write vLLM's arguments with their whole names")
    check_names({name_of(word).removeprefix("no_") for word in words if word.startswith("--")})


def check_names(names: Iterable[str]) -> None:
    """Refuse arguments by name."""
    given = set(names)
    if own := _SET_BY_SERVE & given:
        raise InputError(f"lockstep serve sets {_listed(own)} itself; leave it out")
    if opening := _OPENS_OR_SENDS & given:
        raise InputError(
            f"the command line may not set {_listed(opening)}: it opens a port without a key, or sends data "
            f"to another program"
        )
    if copies := {name for name in given if name.startswith(_COPIES)}:
        raise InputError(
            f"the command line may not set {_listed(copies)}: a trainer cannot distinguish the copies inside "
            "one server; start as many servers, each on a port of its own, and give all of their URLs"
        )
    if code := OWN_CODE & given:
        raise InputError(
            f"the command line may not set {_listed(code)}: code that comes with a model is not run"
        )
    if other := {name for name in given if name in REFUSED | _NOT_PROVEN or name.startswith("spec")}:
        raise InputError(
            f"the command line may not set {_listed(other)}: the log-probs would differ, or no proof would find a fault"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# Largest key-value cache on a CPU, in bytes.
_LARGEST_CPU_CACHE = 4 << 30
# Longest sequence of a server on a GPU, in tokens, if the user names none. A model may allow a million, and then vLLM
# refuses to start unless its cache holds a whole sequence of them.
_GPU_LENGTH = 32768
# GiB of memory that the pictures of prompts may take. vLLM allocates the memory when pictures arrive.
_PICTURE_CACHE = 4


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options that a user may set for a server.

    The server's process reads and checks `rest` with vLLM's own parser (`server/launch.py`).

    Attributes:
        model: directory or hub id that vLLM can load (`models/policy.py`).
        max_model_len: longest prompt + completion in tokens; None: `usual_length`.
        max_num_seqs: largest number of sequences that are decoded together; None: 256 on a GPU, 64 on a CPU.
        fp32_head: whether the output head computes in float32, whatever `dtype` is.
        quantization: vLLM's name of the scheme in which the engine holds the weights in 8 bits; None: in `dtype`.
        rest: further arguments of vLLM's server, as the user typed them.
    """

    model: str
    host: str
    port: int
    dtype: torch.dtype
    max_model_len: int | None
    max_num_seqs: int | None
    tensor_parallel_size: int
    gpu_memory_utilization: float
    fp32_head: bool = False
    quantization: str | None = None
    rest: tuple[str, ...] = ()

    @property
    def is_later_node(self) -> bool:
        """Whether several nodes share one model and this is not the first of them, which alone answers calls."""
        return _given(self.rest).get("node_rank", "0") != "0"

    @property
    def url(self) -> str:
        """The URL at which this machine reaches the server; on a later node, that of the first node."""
        scheme = (
            "https" if any(word.startswith("--ssl-certfile") for word in map(_dashed, self.rest)) else "http"
        )
        host = _given(self.rest).get("master_addr", "") if self.is_later_node else self.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        host = f"[{host}]" if ":" in host else host
        return f"{scheme}://{host}:{self.port}"


def command_line(options: ServeOptions) -> list[str]:
    """The command that starts vLLM's API server.

    Raises:
        InputError: an option cannot be used, or neither the user nor the model gives a maximum length.
    """
    check_words(options.rest)
    refuse_family(options.model)
    check_quantization(options.quantization, options.dtype, "quantization")
    length = usual_length(options.model) if options.max_model_len is None else options.max_model_len
    sequences = options.max_num_seqs or usual_sequences()
    given = {name_of(word) for word in options.rest if word.startswith("--")}
    arguments: dict[str, Any] = {
        **engine_arguments(
            options.model,
            options.dtype,
            length,
            sequences,
            fp32_head=options.fp32_head,
            quantization=options.quantization,
            whole_prompts="no_enable_chunked_prefill" in given,
        ),
        **(
            picture_arguments(cache_gb=_PICTURE_CACHE)
            if reads_pictures(load_files(AutoConfig, options.model))
            else {}
        ),
        "host": options.host,
        "port": options.port,
        "tensor_parallel_size": options.tensor_parallel_size,
        # Opens the endpoint that takes and returns token ids.
        "enable_scale_out": True,
        "weight_transfer_config": {"backend": SERVER_BACKEND},
        # The server then answers requests of the proofs before completions that are generated ahead.
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
        needed = cpu_cache_bytes(options.model, options.dtype, length, sequences)
        arguments["kv_cache_memory_bytes"] = min(needed, _LARGEST_CPU_CACHE)
    given |= {name.removeprefix("no_") for name in given}
    flags = [word for name, value in arguments.items() if name not in given for word in _flags(name, value)]
    for name in SERVER_FLAGS.keys() & _given(options.rest):
        flags += load(SERVER_FLAGS[name])(options.model, options.dtype, given)
    return [sys.executable, "-m", "lockstep.server.launch", *flags, *map(_dashed, options.rest)]


def environment(key: str, options: ServeOptions, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the server's processes. `given`, this process's, has priority over Lockstep's defaults."""
    ours = {name: value for name, value in given.items() if name not in _DROPPED}
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # vLLM opens a closed list of formats, without Ghostscript's, and compares the header's size with this.
    defaults["VLLM_MAX_IMAGE_PIXELS"] = str(LARGEST)
    defaults |= exact_products(options.dtype, torch.float32 if options.fp32_head else options.dtype)
    names = _given(options.rest)
    if not torch.cuda.is_available():
        defaults |= cpu_settings(len(os.sched_getaffinity(0)))
        if "OMP_WAIT_POLICY" in ours:
            # The user has set the wait policy, and this default would override it.
            del defaults["GOMP_SPINCOUNT"]
        if options.tensor_parallel_size == 1 and not _SEVERAL_WORKERS & names.keys():
            # The model runs in the scheduler's process, which would otherwise use a core while it waits.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # `--host` is the address of the guarded API server only.
    inside = {} if _has_several_nodes(names) else LOOPBACK
    asked = {
        k: v for name in SERVER_VARIABLES.keys() & names for k, v in load(SERVER_VARIABLES[name]).items()
    }
    return {**defaults, **ours, **inside, **asked, **_path_of(ours), **_ALWAYS, KEY_VARIABLE: key}


_SEVERAL_NODES = {"nnodes", "node_rank", "master_addr"}
_EXECUTOR = "distributed_executor_backend"
_SEVERAL_WORKERS = {"pipeline_parallel_size", _EXECUTOR, *_SEVERAL_NODES}
# Without PYTHONSAFEPATH, Python would import a `vllm.py` that lies in the current directory.
_ALWAYS = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}

# The first would let the server unpickle what it receives. The second is a second key, which opens some of its paths.
_DROPPED = frozenset({"VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_API_KEY"})


def _given(rest: Sequence[str]) -> dict[str, str]:
    """The arguments that the user has set: name and value. The value comes after `=` or is the next word."""
    following = [*rest, ""][1:]
    return {
        name_of(word): word.partition("=")[2] or after
        for word, after in zip(rest, following, strict=False)
        if word.startswith("--")
    }


def _has_several_nodes(names: Mapping[str, str]) -> bool:
    return bool(_SEVERAL_NODES & names.keys()) or names.get(_EXECUTOR, "mp") not in ("mp", "uni")


def _path_of(given: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH without empty entries, which mean the current directory and are usually there by accident."""
    path = given.get("PYTHONPATH")
    return {} if path is None else {"PYTHONPATH": os.pathsep.join(filter(None, path.split(os.pathsep)))}


def usual_length(model: str) -> int:
    """The longest sequence of a server if the user names none: the model's own limit, on a GPU at most 32768 tokens."""
    return _bounded(_context(model))


def _bounded(length: int) -> int:
    return min(length, _GPU_LENGTH) if torch.cuda.is_available() else length


def shortened(options: ServeOptions) -> str:
    """A line for the user if the server takes shorter sequences than its model and nobody asked for that."""
    if options.max_model_len is not None or (length := _bounded(own := _context(options.model))) == own:
        return ""
    return (
        f"this server takes sequences of at most {length} of the model's {own} tokens, to bound its memory; "
        "--max_model_len sets another length"
    )


def _context(model: str) -> int:
    length = context_length(load_files(AutoConfig, model))
    if length is None:
        raise InputError("the model's config has no largest sequence length; set max_model_len")
    return length


def _flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else [flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _dashed(word: str) -> str:
    """A word with its argument in vLLM's spelling, with dashes. Keys after a dot are JSON keys and do not change."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    argument, dot, keys = name.partition(".")
    return argument.replace("_", "-") + dot + keys + equals + value
