"""The proof of the requests that are sent to vLLM: they have the same sampling settings as the trainer's requests.

The engine in this process checks the `vllm.SamplingParams` that it gives to vLLM, and the client of a server checks the body that
it posts. The check comes before the first token is sampled. It also finds differences that are too small for any log-prob in half
precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.contract.protocol import GenerationRequest
from lockstep.engines.vllm.arguments import BAD_WORDS
from lockstep.errors import ProofError

_NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens",
)  # fmt: skip
_OPTIONAL = ("logit_bias", "allowed_token_ids", "structured_outputs", "extra_args")


def check_sent(request: GenerationRequest, sent: Mapping[str, Any]) -> None:
    """Compare the settings that are sent with the settings of the request.

    Args:
        sent: vLLM's sampling parameters by name.

    Raises:
        ProofError: a setting differs.
    """
    sampling = request.sampling
    expected = {name: getattr(sampling, name) for name in _NUMBERS} | {"n": 1, "seed": request.seed}
    found = {name: sent.get(name) for name in expected}
    expected |= {"stop": list(sampling.stop), "logit_bias": dict(sampling.logit_bias)}
    expected |= {"allowed_token_ids": list(sampling.allowed_token_ids or ()), "grammar": sampling.grammar is not None}
    expected |= {"skip_special_tokens": not sampling.stop}
    expected |= {"bad_words": [list(word) for word in sampling.bad_words]}
    found |= {"stop": list(sent.get("stop") or ()), "logit_bias": dict(sent.get("logit_bias") or {})}
    found |= {"allowed_token_ids": list(sent.get("allowed_token_ids") or ())}
    found |= {"skip_special_tokens": sent.get("skip_special_tokens", True)}
    found |= {"grammar": sent.get("structured_outputs") is not None}
    found |= {"bad_words": [list(word) for word in (sent.get("extra_args") or {}).get(BAD_WORDS, ())]}
    wrong = [name for name, value in expected.items() if found[name] != value]
    if wrong:
        name = wrong[0]
        raise ProofError(
            "settings",
            f"request {request.key} goes to vLLM with {name}={found[name]!r:.80} instead of {expected[name]!r:.80}",
            "the conversion to vLLM's parameters lost or changed the setting, or vLLM itself changed it",
            "install the version of vLLM that Lockstep is tested with; otherwise this is a defect of Lockstep: report it",
        )


def fields_of(params: Any) -> dict[str, Any]:
    """The fields of a `vllm.SamplingParams` that `check_sent` reads."""
    return {name: getattr(params, name) for name in (*_NUMBERS, *_OPTIONAL, "n", "seed", "stop", "skip_special_tokens")}
