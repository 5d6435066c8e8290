"""Asks a running vLLM server for the log-probs of given ids, over its OpenAI-compatible endpoint.

The server needs nothing of Lockstep.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import httpx
import numpy as np

from lockstep.audit.dumps import AuditedRollout
from lockstep.audit.evidence import Values
from lockstep.errors import InputError, LockstepError

_SECONDS = 120.0


def server_logprobs(url: str, rollouts: Sequence[AuditedRollout]) -> list[Values]:
    """For each rollout, (S,) log-probs of its sampled ids at temperature 1, as the server's weights give them now.

    The key is read from the environment variable `OPENAI_API_KEY`, if it is set.

    Raises:
        LockstepError: the server cannot be reached or does not answer in time.
        InputError: its answer has no log-probs of the prompt.
    """
    base = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=_SECONDS, headers=headers) as client:
            model = client.get(f"{base}/v1/models").raise_for_status().json()["data"][0]["id"]
            return [_scored(client, base, model, rollout) for rollout in rollouts]
    except httpx.HTTPStatusError as error:
        raise LockstepError(f"{base} answers {error.response.status_code}: {error.response.text[:300]}") from error
    except httpx.HTTPError as error:
        raise LockstepError(f"{base} cannot be asked: {error}") from error


def _scored(client: httpx.Client, base: str, model: str, rollout: AuditedRollout) -> Values:
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = client.post(f"{base}/v1/completions", json=body).raise_for_status().json()
    found = answer["choices"][0].get("prompt_logprobs")
    if not found or len(found) != len(ids):
        raise InputError(f"{base} gives no log-probs of prompts; --url needs a vLLM server that allows prompt_logprobs")
    own = [float(entry[str(token)]["logprob"]) for entry, token in zip(found[1:], ids[1:], strict=True)]
    return np.array(own[len(rollout.prompt_ids) - 1 :])[rollout.sampled]
