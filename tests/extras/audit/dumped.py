"""Makes rollouts as another program would dump them: sampled by a tiny model, and written with one fault, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tiny import make_tokenizer
from transformers import PreTrainedModel

_LETTERS = make_tokenizer().convert_tokens_to_ids([*"the", "Ġ", *"fox"])
# The tokenizer would encode the letters of the second as other ids.
PROMPTS = ([40, 41, 42, 43], _LETTERS)


@dataclass(frozen=True)
class Row:
    """One rollout before it is written."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    sampled: list[int] = field(default_factory=list)


Logits = Callable[[torch.Tensor], torch.Tensor]


def tempered(temperature: float) -> Logits:
    return lambda logits: logits / temperature


_AS_IT_IS = tempered(1.0)


def cut(top_p: float) -> Logits:
    """Keeps the most likely ids whose mass before the last of them is below `top_p`."""

    def kept(logits: torch.Tensor) -> torch.Tensor:
        ordered, places = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        ordered[(p.cumsum(-1) - p) >= top_p] = -torch.inf
        return torch.empty_like(logits).scatter_(-1, places, ordered)

    return kept


@torch.no_grad()
def sampled_rows(
    model: PreTrainedModel,
    rows: int = 16,
    length: int = 24,
    draw: Logits = _AS_IT_IS,
    report: Logits | None = None,
    seen: Callable[[list[int]], list[int]] = lambda prompt: prompt,
    seed: int = 0,
) -> list[Row]:
    """Rollouts that never end early.

    Args:
        draw: the distribution that is sampled.
        report: the distribution whose log-probs are reported; None: the sampled one.
        seen: the prompt that the engine sees.
    """
    generator, by_prompt = torch.Generator().manual_seed(seed), []
    for prompt in PROMPTS:
        ids, logprobs = torch.tensor([seen(prompt)]).repeat(rows // 2, 1), []
        first = ids.shape[1]
        for _ in range(length):
            logits = model(input_ids=ids).logits[:, -1].float()
            tokens = torch.multinomial(draw(logits).softmax(-1), 1, generator=generator)
            logprobs.append((report or draw)(logits).log_softmax(-1).gather(1, tokens))
            ids = torch.cat([ids, tokens], 1)
        values = torch.cat(logprobs, 1).tolist()
        by_prompt.append(
            [Row(prompt, own, v) for own, v in zip(ids[:, first:].tolist(), values, strict=True)]
        )
    return [row for pair in zip(*by_prompt, strict=True) for row in pair]


def as_trl(rows: list[Row]) -> list[dict[str, Any]]:
    return [{"prompt_ids": r.prompt, "completion_ids": r.completion, "logprobs": r.logprobs} for r in rows]


def as_prime_rl(rows: list[Row]) -> list[dict[str, Any]]:
    return [
        {
            "prompt_ids": r.prompt,
            "prompt_mask": [0] * len(r.prompt),
            "completion_ids": r.completion,
            "completion_mask": [1] * len(r.completion),
            "completion_logprobs": r.logprobs,
            "temperature": 1.0,
        }
        for r in rows
    ]


def as_verl(rows: list[Row]) -> list[dict[str, Any]]:
    """Prompts padded on the left, answers on the right."""
    return [
        {
            "prompts": [0] * (8 - len(r.prompt)) + r.prompt,
            "responses": [*r.completion, 0, 0],
            "attention_mask": [0] * (8 - len(r.prompt)) + [1] * (len(r.prompt) + len(r.completion)) + [0, 0],
            "response_mask": [1] * len(r.completion) + [0, 0],
            "rollout_log_probs": [*r.logprobs, 0.0, 0.0],
        }
        for r in rows
    ]


def as_openrlhf(rows: list[Row]) -> list[dict[str, Any]]:
    """Masks and log-probs stand one place before their token; padding is on the right."""
    return [
        {
            "sequences": [*r.prompt, *r.completion, 0],
            "attention_mask": [1] * (len(r.prompt) + len(r.completion)) + [0],
            "action_mask": [0] * (len(r.prompt) - 1) + [1] * len(r.completion) + [0],
            "rollout_log_probs": [0.0] * (len(r.prompt) - 1) + r.logprobs + [0.0],
        }
        for r in rows
    ]


def write(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def with_logprobs(rows: list[Row], change: Callable[[int, list[float]], list[float]]) -> list[Row]:
    return [replace(row, logprobs=change(i, row.logprobs)) for i, row in enumerate(rows)]
