"""The distributions that an engine may have used by mistake are the run's with one setting left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.contract.distribution import Distribution
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.tokens.arrays import KeptIds

PROMPT, OUTPUT = [3, 4, 4], [5, 4]
LOGITS = torch.randn(8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"temperature": 0.7}, ["the raw distribution"]),
        ({"top_p": 0.9}, ["a distribution without top_k, top_p and min_p"]),
        (
            {"top_k": 3, "temperature": 0.7},
            ["a distribution without top_k, top_p and min_p", "the raw distribution"],
        ),
        ({"grammar": Grammar("regex", "a")}, ["a distribution without the grammar"]),
        (
            {"repetition_penalty": 1.2, "presence_penalty": 0.3},
            [
                "a distribution without penalties",
                "a distribution whose repetition_penalty does not count the prompt",
                "a distribution whose penalties count the prompt",
            ],
        ),
    ],
)
def test_each_setting_in_force_can_be_missing(fields: dict[str, Any], names: list[str]) -> None:
    assert list(Distribution(Sampling(5, **fields)).others()) == names


def test_penalties_count_the_ids_that_the_name_says() -> None:
    whole = Distribution(Sampling(5, repetition_penalty=2.0, frequency_penalty=1.0))
    others = whole.others()
    repeated = torch.where(LOGITS > 0, LOGITS / 2, LOGITS * 2)
    counts = {"vllm": [0, 0, 0, 0, 1, 1, 0, 0], "all": [0, 0, 0, 1, 3, 1, 0, 0]}

    def expected(seen: list[int], kind: str) -> torch.Tensor:
        moved = LOGITS.clone()
        moved[seen] = repeated[seen]
        return moved - torch.tensor(counts[kind])

    cases = {
        "vllm": (whole, [3, 4, 5], "vllm"),
        "completion": (
            others["a distribution whose repetition_penalty does not count the prompt"],
            [4, 5],
            "vllm",
        ),
        "all": (others["a distribution whose penalties count the prompt"], [3, 4, 5], "all"),
    }
    for distribution, seen, kind in cases.values():
        torch.testing.assert_close(distribution.shaped(LOGITS, PROMPT, OUTPUT)[0], expected(seen, kind))


def test_a_token_with_kept_ids_is_scored_among_them() -> None:
    distribution = Distribution(Sampling(5, temperature=0.5, top_k=1))
    kept = KeptIds([0, 1, 2, 5], [1, 2, 4])  # type: ignore[arg-type]
    found = distribution.logprobs(LOGITS, PROMPT, OUTPUT, kept=kept)
    assert found.isfinite().nonzero()[:, 0].tolist() == [2, 5]
    torch.testing.assert_close(found[[2, 5]], (LOGITS[[2, 5]] / 0.5).log_softmax(-1))
