"""Families whose attention takes no tree learn from plain rows, with the scores and gradients of the model's own forward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from model_families import make_family
from test_filtered_scores import check

from lockstep.engines.protocol import Sampling
from lockstep.errors import InputError
from lockstep.training.forward.attention.tree_attention import adopt_tree_attention
from lockstep.training.forward.scoring import check_scorable, why_plain_rows
from lockstep.training.generate.engine import shake_hands

# Nemotron's layers drop the tree on its way. transformers cannot give the others another attention.
REASONS = {
    "nemotron": "do not pass a pack's tree on",
    **dict.fromkeys(["falcon", "stablelm", "gptj", "bloom", "mpt"], "another attention"),
}


@pytest.mark.parametrize("family", REASONS)
def test_a_family_without_trees_is_scored_in_rows(family: str) -> None:
    model = make_family(family).double()
    adopt_tree_attention(model)
    check_scorable(model)
    assert REASONS[family] in str(why_plain_rows(model, 100))
    check(model, Sampling(8, temperature=0.8), rows=True, chunk=5, seed=3)


@pytest.mark.parametrize("family", ["llama", "phi", "gpt2", "opt", "gemma3", "granite"])
def test_a_family_with_trees_shares_its_prompts(family: str) -> None:
    model = make_family(family)
    adopt_tree_attention(model)
    assert why_plain_rows(model, 16) is None


def test_what_vllm_computes_otherwise_is_refused_before_the_first_push() -> None:
    engine = SimpleNamespace(settings=lambda: SimpleNamespace(engine="vllm"))
    with pytest.raises(InputError, match="within 512 tokens"):
        shake_hands(engine, make_family("cohere2"), "unused", torch.float32, 513)  # type: ignore[arg-type]
