"""Decides which of vLLM's arguments a user may add to a server's command line.

This check runs before anything is loaded. The server's own process, which has vLLM's parser, then checks that every word is the
whole name of an argument and not an abbreviation (`server/launch.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.engines.vllm_arguments import REFUSED
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
        "port",
        "root_path",
        "uds",
        "worker_extension_cls",
    }
)
# These would put other code, or another model, in the place that the proofs examine.
_FOREIGN = frozenset(
    {
        "hf_config_path",
        "kv_transfer_config",
        "model_class_overrides",
        "quantization_config",
        "scheduler_cls",
        "worker_cls",
    }
)


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
    own = _OWN & given
    if own:
        raise InputError(f"lockstep serve sets {', '.join(sorted(own))} itself; leave it out")
    other = {name for name in given if name in REFUSED | _FOREIGN or name.startswith("spec")}
    if other:
        raise InputError(
            f"the command line may not set {', '.join(sorted(other))}: log-probs would differ, or no proof would see it"
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
