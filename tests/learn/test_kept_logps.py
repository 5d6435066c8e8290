"""The logits of kept ids are those of the whole head, for every kind of head, without a tokens × vocabulary matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from largest import Largest
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear

from lockstep.learn import token_logps as module
from lockstep.learn.token_logps import KeptSets, kept_logits, kept_logps
from lockstep.models.policy import fp32_head_product
from lockstep.tokens.arrays import KeptIds

WIDTH, VOCABULARY = 6, 60


def made_head(kind: str, vocabulary: int = VOCABULARY) -> torch.nn.Module:
    plain = torch.nn.Linear(WIDTH, vocabulary, bias=kind == "biased")
    if kind == "adapter":
        return LoraLinear(
            plain, "default", LoraConfig(r=2, init_lora_weights=False), r=2, init_lora_weights=False
        )
    if kind == "hooked":
        plain.register_forward_hook(lambda module, args, logits: 2.0 * logits)
    return plain


def made_sets(sizes: list[int], vocabulary: int = VOCABULARY, seed: int = 0) -> KeptSets:
    rng = np.random.default_rng(seed)
    parts = [np.sort(rng.choice(vocabulary, size, replace=False)) for size in sizes]
    kept = KeptIds(np.concatenate(parts), np.cumsum(sizes))
    return KeptSets.of(kept, np.array([rng.choice(part) for part in parts]), torch.device("cpu"))


def test_a_gpu_computes_many_tokens_in_one_product() -> None:
    kept = made_sets([3] * 1024)
    there = replace(kept, ids=kept.ids.to("meta"))
    assert [len(list(module._needed_rows(sets, VOCABULARY))) for sets in (kept, there)] == [32, 2]


@draws(40)
@given(
    kind=st.sampled_from(["plain", "biased", "adapter", "hooked"]),
    sizes=st.lists(st.integers(1, VOCABULARY), min_size=1, max_size=9),
    together=st.integers(1, 5),
    temperature=st.sampled_from([1.0, 0.6]),
    entropy_gradient=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_whole_head(
    kind: str, sizes: list[int], together: int, temperature: float, entropy_gradient: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    head, kept = made_head(kind).double(), made_sets(sizes, seed=seed)
    hidden = torch.randn(len(sizes), WIDTH, dtype=torch.float64, requires_grad=True)
    of_logps, of_entropy = torch.randn(2, len(sizes)).double()
    trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENS", together)
        for ours in (True, False):
            if ours:
                logits = kept_logits(head, head, hidden, kept, chunk_size=together, fp32_head=False)
                logps, entropy = kept_logps(logits, kept, temperature, entropy_gradient=entropy_gradient)
            else:
                mask = torch.full((len(sizes), VOCABULARY), True)
                mask[kept.tokens, kept.ids] = False
                whole = (head(hidden) / temperature).masked_fill(mask, -1e300).log_softmax(-1)
                logps, entropy = (
                    whole[range(len(sizes)), kept.ids[kept.targets]],
                    -(whole.exp() * whole).sum(-1),
                )
            assert not ours or entropy.requires_grad == entropy_gradient
            loss = (logps * of_logps).sum() + ((entropy * of_entropy).sum() if entropy_gradient else 0.0)
            results.append([logps.detach(), entropy.detach(), *torch.autograd.grad(loss, trained)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["plain", "biased", "adapter", "fp32", "hooked"])
def test_under_autocast_the_head_rounds_as_it_does_without_a_filter(kind: str) -> None:
    torch.manual_seed(1)
    head, kept, hidden = made_head(kind), made_sets([5, 60, 1, 12]), torch.randn(4, WIDTH, requires_grad=True)
    product = partial(fp32_head_product, head) if kind == "fp32" else head
    trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    gradient = torch.randn(len(kept.ids))
    with torch.autocast("cpu", torch.bfloat16):
        found = kept_logits(head, product, hidden, kept, chunk_size=2, fp32_head=kind == "fp32")
        expected = product(hidden)[kept.tokens, kept.ids].float()
    assert found.dtype == torch.float32
    # One unit of bf16 is 2^-8. Sums in another order may round the other way.
    torch.testing.assert_close(found, expected, rtol=1e-6 if kind == "fp32" else 2**-7, atol=1e-6)
    if kind != "fp32":
        assert torch.equal(found, found.bfloat16().float())
    pairs = zip(
        torch.autograd.grad(found, trained, gradient),
        torch.autograd.grad(expected, trained, gradient),
        strict=True,
    )
    for own, other in pairs:
        assert own.dtype == torch.float32
        torch.testing.assert_close(
            own, other, rtol=0, atol=1e-5 if kind == "fp32" else 0.05 * float(other.abs().max())
        )


def test_a_frozen_head_gets_no_gradient_and_the_states_still_do() -> None:
    head, kept, hidden = made_head("biased").requires_grad_(False), made_sets([5, 9]), torch.randn(2, WIDTH)
    hidden.requires_grad_()
    kept_logits(head, head, hidden, kept, chunk_size=2, fp32_head=False).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_no_tensor_is_larger_than_the_heads_weight() -> None:
    tokens, vocabulary = 512, 4096
    head, kept = made_head("plain", vocabulary), made_sets([9] * tokens, vocabulary)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    with Largest() as seen:
        logits = kept_logits(head, head, hidden, kept, chunk_size=512, fp32_head=False)
        logps, entropy = kept_logps(logits, kept, 1.0, entropy_gradient=True)
        (logps.sum() + entropy.sum()).backward()
    assert seen.elements == vocabulary * WIDTH


def test_a_set_of_one_id_has_log_prob_and_entropy_zero_and_no_gradient() -> None:
    head, kept = made_head("plain"), made_sets([1, 1, 1])
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    logits = kept_logits(head, head, hidden, kept, chunk_size=2, fp32_head=False)
    logps, entropy = kept_logps(logits, kept, 0.7, entropy_gradient=True)
    (logps.sum() + entropy.sum()).backward()
    assert logps.tolist() == entropy.tolist() == [0.0] * 3
    assert hidden.grad is not None
    assert not hidden.grad.any()
