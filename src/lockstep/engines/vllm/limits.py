"""How many ids one request may name. Only vLLM's second model runner, which it uses on GPUs, has such limits.

That runner has a table of a fixed size per setting. A request with more ids would raise an error inside the engine's step, and end
a server's engine. The process that runs the model reads the sizes from its vLLM (`engines/vllm/settings.py`). Requests are compared
with them before they are sent (`engines/answers.py`), and those of a run at its start (`watch/handshake.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engines.filters.distribution import Sampling
from lockstep.errors import InputError

# vLLM's environment variables that make two of the tables larger.
_WORDS, _WORD_IDS = "VLLM_MAX_NUM_BAD_WORDS", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"
_FIRST_RUNNER = (
    "start vLLM with VLLM_USE_V2_MODEL_RUNNER=0 in its environment: its first model runner has no such limit"
)


def request_limits(vllm_config: Any) -> dict[str, int]:
    """The largest number of ids that one request may name, per setting; empty: there is no limit.

    Returns:
        `allowed_token_ids`, `logit_bias`: ids. `end_ids`: ids, in a request with `min_tokens`. `bad_words`: sequences of ids.
        `bad_word_ids`: ids of all these sequences together.
    """
    if not vllm_config.use_v2_model_runner:
        return {}
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias

    return {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "end_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "bad_words": getattr(envs, _WORDS),
        "bad_word_ids": getattr(envs, _WORD_IDS),
    }


def check_limits(sampling: Sampling, limits: Mapping[str, int]) -> None:
    """Compare the settings of a request with the limits of its engine.

    Args:
        limits: from `request_limits`.

    Raises:
        InputError: a setting names more ids than the engine can take. The message says what to do.
    """
    words = sum(map(len, sampling.bad_words))
    found = {
        "allowed_token_ids": (len(sampling.allowed_token_ids or ()), "allowed_token_ids names {} ids", _FIRST_RUNNER),
        "logit_bias": (len(sampling.logit_bias), "logit_bias names {} ids", _FIRST_RUNNER),
        "end_ids": (
            len(sampling.end_ids) if sampling.min_tokens else 0,
            "min_tokens is set, and {} ids end a completion",
            f"leave min_tokens out, or {_FIRST_RUNNER}",
        ),
        "bad_words": (
            len(sampling.bad_words),
            "bad_words has {} sequences of ids (a word may have two: with and without a space before it)",
            f"start vLLM with {_WORDS}={len(sampling.bad_words)} in its environment",
        ),
        "bad_word_ids": (
            words,
            "the words of bad_words have {} ids together",
            f"start vLLM with {_WORD_IDS}={words} in its environment",
        ),
    }
    for name, most in limits.items():
        number, what, advice = found[name]
        if number > most:
            # `end_ids` come from the model, so that a user cannot name fewer.
            fewer = "" if name == "end_ids" else "name fewer, or "
            raise InputError(
                f"{what.format(number)}; the engine takes at most {most} per request (vLLM's second model runner, which it uses "
                f"on GPUs): {fewer}{advice}"
            )
