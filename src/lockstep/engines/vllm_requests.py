"""Converts requests to vLLM's form, and vLLM's outputs to completions.

The engines that run vLLM use it. `engines/answers.py` then checks every answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lockstep.engines.protocol import Completion, FinishReason, GenerationRequest, RequestKey, Sampling
from lockstep.errors import LockstepError, ProofError
from lockstep.tokens.arrays import Ids, reals, whole_numbers

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """The fields of `vllm.SamplingParams` as JSON types, for this process or for a server."""
    sampling: Sampling = request.sampling
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "seed": request.seed,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }


# Requests the log-probs of the prompt itself. vLLM then neither reads its prefix cache nor applies a temperature.
SCORING_FIELDS = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}


def sampling_params(request: GenerationRequest) -> Any:
    """The `vllm.SamplingParams` of a request."""
    return _final_only(sampling_fields(request))


def scoring_params() -> Any:
    """The `vllm.SamplingParams` that score a prompt."""
    return _final_only(SCORING_FIELDS)


def _final_only(fields: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)


def completion(key: RequestKey, output: RequestOutput) -> Completion:
    (sample,) = output.outputs
    logprobs = sample.logprobs or []
    token_ids = list(sample.token_ids)
    if len(logprobs) != len(token_ids):
        raise ProofError(
            "logprobs",
            f"request {key} has {len(token_ids)} tokens and {len(logprobs)} log-probs",
            "vLLM was started without log-probs",
            "keep the engine arguments that Lockstep sets",
        )
    if sample.finish_reason not in ("stop", "length"):
        raise LockstepError(f"request {key} ended with finish reason {sample.finish_reason!r}")
    return Completion(
        key=key,
        prompt_ids=whole_numbers(output.prompt_token_ids or ()),
        token_ids=whole_numbers(token_ids),
        # Look up by token id: the first entry is not always the sampled token.
        logprobs=reals([entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)]),
        weight_versions=_versions(sample.weight_versions, len(token_ids)),
        finish_reason=cast(FinishReason, sample.finish_reason),
    )


def _versions(spans: Any, tokens: int) -> Ids:
    return versions_of([(int(span.version), span.start, span.end) for span in spans or ()], tokens)


def versions_of(spans: Sequence[tuple[int, int, int]], tokens: int) -> Ids:
    """The version of each token. Tokens from index `tokens` on are left out.

    Args:
        spans: for each span its version, its first token, and the token after its last token. Spans are in order.
    """
    versions = np.array([version for version, _, _ in spans], dtype=np.int64)
    return whole_numbers(np.repeat(versions, [end - start for _, start, end in spans])[:tokens])


def prompt_logprobs(output: RequestOutput) -> tuple[float, ...]:
    """Log-prob of every prompt id except the first, which has none."""
    ids = output.prompt_token_ids or []
    entries = output.prompt_logprobs or []
    return tuple(entry[token].logprob for entry, token in zip(entries[1:], ids[1:], strict=False) if entry)
