"""The proof of what is sent to vLLM: each request asks for the sampling settings of the trainer's request, and for no others.

The engine in this process gives the `vllm.SamplingParams` that it adds, and the client of a server gives the body that it posts.
The error comes before a token is sampled, even if the difference is too small for any log-prob in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engines.protocol import GenerationRequest
from lockstep.engines.vllm.arguments import BAD_WORDS
from lockstep.errors import ProofError

_NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens",
)  # fmt: skip
_OPTIONAL = ("logit_bias", "allowed_token_ids", "structured_outputs", "extra_args")


def check_sent(request: GenerationRequest, sent: Mapping[str, Any]) -> None:
    """Compare what is sent with the request.

    Args:
        sent: vLLM's sampling parameters by name.

    Raises:
        ProofError: a setting differs.
    """
    sampling = request.sampling
    due = {name: getattr(sampling, name) for name in _NUMBERS} | {"n": 1, "seed": request.seed}
    found = {name: sent.get(name) for name in due}
    due |= {"stop": list(sampling.stop), "logit_bias": dict(sampling.logit_bias)}
    due |= {"allowed_token_ids": list(sampling.allowed_token_ids or ()), "grammar": sampling.grammar is not None}
    due |= {"bad_words": [list(word) for word in sampling.bad_words]}
    found |= {"stop": list(sent.get("stop") or ()), "logit_bias": dict(sent.get("logit_bias") or {})}
    found |= {"allowed_token_ids": list(sent.get("allowed_token_ids") or ())}
    found |= {"grammar": sent.get("structured_outputs") is not None}
    found |= {"bad_words": [list(word) for word in (sent.get("extra_args") or {}).get(BAD_WORDS, ())]}
    wrong = [name for name, value in due.items() if found[name] != value]
    if wrong:
        name = wrong[0]
        raise ProofError(
            "settings",
            f"request {request.key} goes to vLLM with {name}={found[name]!r:.80} instead of {due[name]!r:.80}",
            "the conversion to vLLM's parameters lost or changed the setting, or vLLM itself changed it",
            "install the version of vLLM that Lockstep is tested with; otherwise this is a defect of Lockstep: report it",
        )


def fields_of(params: Any) -> dict[str, Any]:
    """The fields of a `vllm.SamplingParams` that `check_sent` reads."""
    return {name: getattr(params, name) for name in (*_NUMBERS, *_OPTIONAL, "n", "seed", "stop")}
