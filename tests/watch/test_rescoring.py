"""Rescoring gives the log-probs of the model's own forward, in a bounded amount of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from lockstep.contract.sampling import Grammar, Sampling
from lockstep.errors import LockstepError
from lockstep.models.arithmetic import Precision
from lockstep.watch import plain_forward as rescoring
from lockstep.watch.plain_forward import completion_logps, sequence_logits

PROMPT, TOKENS = tuple(range(7, 19)), tuple((37 * i) % 300 + 4 for i in range(80))
VOCABULARY = 384
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = [
    Cohere2Config(**SHAPE, logit_scale=0.25),
    GraniteConfig(**SHAPE, logits_scaling=4.0),
    Gemma2Config(**SHAPE, final_logit_softcapping=2.0, query_pre_attn_scalar=32),
]


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(found)
            if isinstance(leaf, torch.Tensor)
        ]
        self.bytes = max([self.bytes, *sizes])
        return found


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound of nineteen rows of logits. No length in these tests is a multiple of nineteen."""
    bound = 19 * VOCABULARY * 4
    monkeypatch.setattr(rescoring, "LOGITS_BYTES", bound)
    return bound


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # A narrow model, so that no other tensor is as large as a few rows of logits.
    return make_model(hidden_size=16, intermediate_size=16, head_dim=8)


PRECISIONS = [Precision(), Precision(autocast=torch.bfloat16), Precision(torch.bfloat16, torch.float32)]
SAMPLINGS = [Sampling(80), Sampling(80, temperature=0.7, top_k=20), Sampling(80, repetition_penalty=1.2)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chunks_of_rows_give_the_same_log_probs(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, precision: Precision
) -> None:
    whole = completion_logps(model, PROMPT, TOKENS, sampling, precision)
    monkeypatch.setattr(rescoring, "LOGITS_BYTES", 1)
    by_row = completion_logps(model, PROMPT, TOKENS, sampling, precision)
    assert torch.equal(torch.isfinite(whole), torch.isfinite(by_row))
    found = torch.isfinite(whole)
    torch.testing.assert_close(by_row[found], whole[found], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sampling", [Sampling(80, min_tokens=2), Sampling(80, grammar=Grammar("regex", "a+"))]
)
def test_settings_that_need_more_than_themselves_are_not_scored_without_it(
    model: PreTrainedModel, sampling: Sampling
) -> None:
    with pytest.raises(LockstepError, match="under a Distribution"):
        completion_logps(model, PROMPT, TOKENS, sampling)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_tensor_grows_beyond_the_bound_with_the_length(
    model: PreTrainedModel, few_rows: int, precision: Precision
) -> None:
    with Largest() as largest:
        completion_logps(model, PROMPT, TOKENS * 5, Sampling(400), precision)
    assert largest.bytes == few_rows
    with Largest() as largest:
        sequence_logits(model, TOKENS * 5, precision)
    assert largest.bytes == len(TOKENS) * 5 * VOCABULARY * 4


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("precision", PRECISIONS[:2])
def test_log_probs_are_those_of_the_models_own_forward(
    config: PreTrainedConfig, precision: Precision, few_rows: int
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT + TOKENS])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast is not None):
        logps = model(ids).logits[0].float().log_softmax(-1)
    expected = logps[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    own = completion_logps(model, PROMPT, TOKENS, Sampling(80), precision)
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
