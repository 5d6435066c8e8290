"""Models that scale or cap their logits are scored as their own forward computes, with gradients, and by every engine.

CI has one scale and one cap on vLLM. The others are tested before a release.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import VLLM
from model_families import make_family, save_family
from stages import stage_on
from test_filtered_scores import ALONE, check
from transformers import PreTrainedModel

from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.scoring import check_scorable
from lockstep.models.arithmetic import transformed_logits

CAPPED = "gemma2, attention without a cap"


@pytest.fixture(scope="module", params=["cohere", "granite", CAPPED, "gemma2, with a low cap"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = make_family(request.param).double()
    adopt_tree_attention(made)
    return made


@pytest.mark.parametrize("name", ["top_k", "repetition_penalty", "nothing"])
def test_scores_and_gradients_are_those_of_the_models_own_logits(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    logits = torch.randn(9, dtype=torch.float64)
    assert not torch.allclose(transformed_logits(config, logits), logits)
    check(model, Sampling(8, temperature=0.8, **ALONE[name]), rows=False, chunk=5, seed=3)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("recurrent_gemma", {"logits_soft_cap": 0.5}),
        ("falcon_h1", {"lm_head_multiplier": 0.25}),
        ("xlstm", {"output_logit_soft_cap": 0.5}),
    ],
)
def test_the_heads_logits_become_those_of_the_models_own_forward(
    family: str, changed: dict[str, float]
) -> None:
    """Of families that keep a state: they are scored in plain rows by the same function."""
    made = make_family(family, **changed).eval()
    ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head = made.get_output_embeddings()(made.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        own = made(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(transformed_logits(made.config.get_text_config(), head), own)
    assert (head - own).abs().max() > 0.01


@pytest.mark.parametrize("window", [None, 7])
def test_a_cap_on_attention_is_that_of_the_models_own_definition(window: int | None) -> None:
    """Over plain rows, with a window too. The definition is transformers' eager attention."""
    fields = {"attn_logit_softcapping": 0.5, "sliding_window": window or 64}
    made = make_family("gemma2", **fields).double().eval()
    ids = torch.randint(3, 300, (2, 23), generator=torch.Generator().manual_seed(0))
    made.set_attn_implementation("eager")
    own = made(ids).logits
    made.set_attn_implementation("sdpa")
    assert (made(ids).logits - own).abs().max() > 1e-3, "the cap changes nothing"
    adopt_tree_attention(made)
    # The definition rounds the shares of attention to float32.
    near = {"atol": 1e-5, "rtol": 0.0}
    torch.testing.assert_close(made(ids, use_cache=False).logits, own, **near)
    padded = torch.ones_like(ids)
    padded[1, -4:] = 0
    torch.testing.assert_close(made(ids, attention_mask=padded, use_cache=False).logits[0], own[0], **near)


def test_an_attention_that_leaves_a_cap_out_is_refused_with_the_name_of_the_field() -> None:
    made = make_family("gemma2")
    made.config._attn_implementation = "flex_attention"
    with pytest.raises(InputError, match=r"attn_logit_softcapping=50\.0"):
        check_scorable(made)


@pytest.mark.parametrize(
    ("family", "use_vllm"),
    [
        (CAPPED, False),
        ("gemma2, with a low cap", False),
        pytest.param("cohere", True, marks=[*VLLM, pytest.mark.long]),
        pytest.param("granite", True, marks=[*VLLM, pytest.mark.release]),
        pytest.param(CAPPED, True, marks=[*VLLM, pytest.mark.release]),
        pytest.param("gemma2, with a low cap", True, marks=[*VLLM, pytest.mark.long]),
    ],
)
def test_engine_and_trainer_agree_in_a_step(family: str, use_vllm: bool, tmp_path: Path) -> None:
    with stage_on(save_family(family, tmp_path / "model"), tmp_path, use_vllm=use_vllm, bf16=False) as stage:
        assert stage.step() > 0
        assert stage.push(every_module=True).failed == []
