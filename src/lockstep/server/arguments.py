"""Decides which of vLLM's arguments a user may add to a server's command line.

This check runs before anything is loaded. The server's own process, which has vLLM's parser, then checks that every word is the
whole name of an argument and not an abbreviation (`server/launch.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.engines.vllm.arguments import REFUSED
from lockstep.errors import InputError

# `lockstep serve` sets these. Another value would open the server to others or break the contract with the trainer.
_OWN = frozenset(
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
# These would put other code, or another model, in the place that the proofs examine.
_FOREIGN = frozenset(
    {
        "code_revision",
        "default_mm_loras",
        "enable_prompt_embeds",
        "hf_config_path",
        "kv_offloading_backend",
        "kv_offloading_size",
        "lora_modules",
        "model_class_overrides",
        "quantization_config",
        "scheduler_cls",
        "tokenizer_revision",
        "trust_remote_code",
        "worker_cls",
    }
)
# These open a port of vLLM's own, which has no guard, or send prompts, weights or cache blocks to another program.
# `tests/server/free_arguments.txt` lists all other arguments of this release of vLLM.
_OPEN = frozenset(
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
# A trainer cannot tell the copies inside one server apart, and their ports have no guard.
_COPIES = ("data_parallel_", "dp_")


def name_of(word: str) -> str:
    """The argument's name: `max_num_seqs` for `--max-num-seqs`, `--max_num_seqs=4` and `--max-num-seqs.key`."""
    return word.partition("=")[0].partition(".")[0].lstrip("-").replace("-", "_")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that may not be on a server's command line.

    Raises:
        InputError: a short form, or an argument that the user may not set.
    """
    for word in words:
        if word.startswith("-") and not word.startswith("--") and not _is_number(word):
            raise InputError(f"{word}: give vLLM's arguments by their whole names")
    check_names({name_of(word).removeprefix("no_") for word in words if word.startswith("--")})


def check_names(names: Iterable[str]) -> None:
    """Refuse arguments by name.

    Raises:
        InputError: the user may not set one of them.
    """
    given = set(names)
    if own := _OWN & given:
        raise InputError(f"lockstep serve sets {_listed(own)} itself; leave it out")
    if opening := _OPEN & given:
        raise InputError(
            f"the command line may not set {_listed(opening)}: it opens a port without a key, or sends data to another program"
        )
    if copies := {name for name in given if name.startswith(_COPIES)}:
        raise InputError(
            f"the command line may not set {_listed(copies)}: a trainer cannot tell the copies inside one server apart; start as "
            "many servers, each on a port of its own, and give all of their URLs"
        )
    if other := {name for name in given if name in REFUSED | _FOREIGN or name.startswith("spec")}:
        raise InputError(
            f"the command line may not set {_listed(other)}: log-probs would differ, or no proof would see it"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
