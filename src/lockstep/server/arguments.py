"""Checks which of vLLM's arguments a user may add to a server's command line.

This check runs before anything is loaded. Later the server's own process checks with vLLM's parser that every word is the whole
name of an argument and not an abbreviation (`server/launch.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.engines.vllm.arguments import OWN_CODE, REFUSED
from lockstep.errors import InputError

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
# Prefixes of arguments for several copies of the model in one server. A trainer cannot distinguish the copies, and their ports have
# no guard.
_COPIES = ("data_parallel_", "dp_")


def name_of(word: str) -> str:
    """The argument's name: `max_num_seqs` for `--max-num-seqs`, `--max_num_seqs=4` and `--max-num-seqs.key`."""
    return word.partition("=")[0].partition(".")[0].lstrip("-").replace("-", "_")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that may not be on a server's command line.

    Raises:
        InputError: a word is a short form such as `-q`, or an argument that the user may not set.
    """
    for word in words:
        if word.startswith("-") and not word.startswith("--") and not _is_number(word):
            raise InputError(f"{word}: write vLLM's arguments with their whole names")
    check_names({name_of(word).removeprefix("no_") for word in words if word.startswith("--")})


def check_names(names: Iterable[str]) -> None:
    """Refuse arguments by name.

    Raises:
        InputError: the user may not set one of them.
    """
    given = set(names)
    if own := _SET_BY_SERVE & given:
        raise InputError(f"lockstep serve sets {_listed(own)} itself; leave it out")
    if opening := _OPENS_OR_SENDS & given:
        raise InputError(
            f"the command line may not set {_listed(opening)}: it opens a port without a key, or sends data to another program"
        )
    if copies := {name for name in given if name.startswith(_COPIES)}:
        raise InputError(
            f"the command line may not set {_listed(copies)}: a trainer cannot distinguish the copies inside one server; start as "
            "many servers, each on a port of its own, and give all of their URLs"
        )
    if code := OWN_CODE & given:
        raise InputError(f"the command line may not set {_listed(code)}: code that comes with a model is not run")
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
