"""The log-probs of a rollout's ids, to compare those of the dump with: by the model, or by a running vLLM server.

The model is run once per rollout, and also gives what the draws proof needs. The server is asked over its
OpenAI-compatible endpoint, and needs nothing of Lockstep.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lockstep import bounded_http
from lockstep.contract.distribution import Distribution
from lockstep.errors import InputError, LockstepError
from lockstep.extras.audit.dumps import AuditedRollout
from lockstep.models.arithmetic import Precision
from lockstep.watch.draws import TokenDraws
from lockstep.watch.plain_forward import logit_chunks

Values = NDArray[np.float64]
_PLAIN = Precision()


@dataclass(frozen=True)
class Scored:
    """The model's values of the S sampled ids of a rollout.

    Attributes:
        reported: (S,) log-probs of the dump; NaN where there is none.
        own: (S,) the model's log-probs under the stated distribution.
        draws: sums over the model's distributions; None: they were not asked for.
        others: (S,) log-probs under other distributions, by name.
    """

    rollout: AuditedRollout
    reported: Values
    own: Values
    draws: TokenDraws | None = None
    others: dict[str, Values] = field(default_factory=dict)

    @property
    def gaps(self) -> Values:
        """(S,) reported − own."""
        return self.reported - self.own


@torch.no_grad()
def score(
    model: PreTrainedModel,
    rollout: AuditedRollout,
    stated: Distribution,
    precision: Precision = _PLAIN,
    others: dict[str, Distribution] | None = None,
    prompt_ids: Sequence[int] | None = None,
    *,
    draws: bool = False,
) -> Scored:
    """Score a rollout's sampled ids, perhaps after another prompt, and under other distributions too.

    No tensor of logits is larger than `LOGITS_BYTES`. The sums for the draws proof cost as much as the log-probs.
    """
    prompt, tokens = list(rollout.prompt_ids if prompt_ids is None else prompt_ids), rollout.completion_ids
    wanted = {"": stated, **(others or {})}
    found: dict[str, list[float]] = {name: [] for name in wanted}
    sums: list[tuple[float, float, float, float]] = []
    place = 0
    for rows in logit_chunks(model, [*prompt, *tokens[:-1]], len(prompt) - 1, precision):
        chosen = [i for i in range(len(rows)) if rollout.sampled[place + i]]
        targets = torch.tensor([tokens[place + i] for i in chosen], dtype=torch.long)
        logits = rows[chosen].cpu()
        for name, distribution in wanted.items():
            logps = _logps(logits, distribution, prompt, tokens, [place + i for i in chosen])
            chosen_logps = logps.gather(1, targets[:, None])[:, 0]
            found[name] += chosen_logps.tolist()
            if draws and not name:
                sums += draw_sums(logps.double(), chosen_logps.double())
        place += len(rows)
    reported, scores = rollout.logprobs[rollout.sampled], {name: np.array(v) for name, v in found.items()}
    own = scores.pop("")
    # The sums of each id, as columns: entropies, variances, below, upto.
    found_draws = TokenDraws(own, *np.array(sums).reshape(-1, 4).T) if draws else None
    return Scored(rollout, reported, own, found_draws, scores)


def _logps(
    logits: torch.Tensor, distribution: Distribution, prompt: list[int], tokens: list[int], places: list[int]
) -> torch.Tensor:
    if distribution.is_tempered_only:
        return (logits / distribution.sampling.temperature).log_softmax(-1)
    rows = [distribution.logprobs(row, prompt, tokens[:i]) for row, i in zip(logits, places, strict=True)]
    return torch.stack(rows) if rows else logits


def draw_sums(logps: torch.Tensor, own: torch.Tensor) -> list[tuple[float, float, float, float]]:
    """Entropy, variance of log p, mass of less likely ids, and mass of at most as likely ids, of each row."""
    p = logps.exp()
    finite = logps.masked_fill(p == 0, 0.0)
    mean = (p * finite).sum(-1)
    variance = (p * (finite - mean[:, None]) ** 2).sum(-1)
    below = (p * (logps < own[:, None])).sum(-1)
    upto = (p * (logps <= own[:, None])).sum(-1)
    return list(zip((-mean).tolist(), variance.tolist(), below.tolist(), upto.tolist(), strict=True))


# Seconds and bytes of one answer.
SECONDS, LARGEST = 120.0, 256 << 20


def server_logprobs(url: str, rollouts: Sequence[AuditedRollout]) -> list[Values]:
    """For each rollout, (S,) log-probs of its sampled ids at temperature 1, as the server's weights give them now.

    The key is read from the environment variable `OPENAI_API_KEY`, if it is set.
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
        needed = "--url needs a vLLM server that allows prompt_logprobs"
        raise InputError(f"{base} gives no log-probs of prompts; {needed}")
    own = [float(entry[str(token)]["logprob"]) for entry, token in zip(found[1:], ids[1:], strict=True)]
    return np.array(own[len(rollout.prompt_ids) - 1 :])[rollout.sampled]


async def _asked(client: httpx.AsyncClient, method: str, url: str, **body: Any) -> Any:
    """The JSON of an answer."""
    limits: Any = {"seconds": SECONDS, "most": lambda _: LARGEST}
    answer, found = await bounded_http.call(client, method, url, **limits, **body)
    if answer.status_code != 200:
        said = found[:1200].decode(errors="replace")[:300]
        raise LockstepError(f"{url} answers {answer.status_code}: {said}")
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{url} does not answer with JSON; --url needs a vLLM server") from error
