"""Asks a running vLLM server for the log-probs of given ids, over its OpenAI-compatible endpoint.

The server needs nothing of Lockstep.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from lockstep import bounded_http
from lockstep.errors import InputError, LockstepError
from lockstep.extras.audit.dumps import AuditedRollout
from lockstep.extras.audit.evidence import Values

# Seconds and bytes of one answer.
SECONDS, LARGEST = 120.0, 256 << 20


def server_logprobs(url: str, rollouts: Sequence[AuditedRollout]) -> list[Values]:
    """For each rollout, (S,) log-probs of its sampled ids at temperature 1, as the server's weights give them now.

    The key is read from the environment variable `OPENAI_API_KEY`, if it is set.

    Raises:
        LockstepError: the server cannot be reached or does not answer in time.
        InputError: it answers in another way than vLLM, or without log-probs of the prompt.
    """
    base = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return bounded_http.run(_all_scored(base, headers, rollouts))


async def _all_scored(base: str, headers: dict[str, str], rollouts: Sequence[AuditedRollout]) -> list[Values]:
    async with httpx.AsyncClient(headers=headers) as client:
        try:
            model = (await _asked(client, "GET", f"{base}/v1/models"))["data"][0]["id"]
            return [await _scored(client, base, model, rollout) for rollout in rollouts]
        except (httpx.HTTPError, httpx.InvalidURL, bounded_http.UnboundedAnswer) as error:
            raise LockstepError(f"{base} cannot be asked: {error}") from error
        except TimeoutError as error:
            raise LockstepError(f"{base} did not answer within {SECONDS:.0f} s") from error
        except InputError:
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise InputError(f"{base} does not answer as a vLLM server does; --url needs one") from error


async def _scored(client: httpx.AsyncClient, base: str, model: str, rollout: AuditedRollout) -> Values:
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = await _asked(client, "POST", f"{base}/v1/completions", json=body)
    found = answer["choices"][0].get("prompt_logprobs")
    if not found or len(found) != len(ids):
        raise InputError(f"{base} gives no log-probs of prompts; --url needs a vLLM server that allows prompt_logprobs")
    own = [float(entry[str(token)]["logprob"]) for entry, token in zip(found[1:], ids[1:], strict=True)]
    return np.array(own[len(rollout.prompt_ids) - 1 :])[rollout.sampled]


async def _asked(client: httpx.AsyncClient, method: str, url: str, **body: Any) -> Any:
    """The JSON of an answer."""
    answer, found = await bounded_http.call(client, method, url, seconds=SECONDS, most=lambda _: LARGEST, **body)
    if answer.status_code != 200:
        said = found[:1200].decode(errors="replace")[:300]
        raise LockstepError(f"{url} answers {answer.status_code}: {said}")
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{url} does not answer with JSON; --url needs a vLLM server") from error
