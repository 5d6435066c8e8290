"""Log-probs and entropies without a whole matrix of logits: right, with right gradients, in memory of one chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.training.token_logps import token_logps

WIDTH, VOCABULARY = 6, 19


def plain(
    head: torch.nn.Module, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logps = (head(hidden) / temperature).log_softmax(-1)
    return logps[rows, targets], -(logps.exp() * logps).sum(-1)


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(1, 12),
    more=st.lists(st.integers(0, 11), max_size=8),
    chunk=st.integers(1, 14),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    entropy_gradient=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_whole_logits(
    count: int, more: list[int], chunk: int, temperature: float, entropy_gradient: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    head = torch.nn.Linear(WIDTH, VOCABULARY).double()
    hidden = torch.randn(count, WIDTH, dtype=torch.float64, requires_grad=True)
    # Every row has a token; some have several, in any order.
    rows = torch.tensor([*range(count), *(row % count for row in more)])[torch.randperm(count + len(more))]
    targets = torch.randint(VOCABULARY, rows.shape)
    of_logps, of_entropy = torch.randn(len(rows)).double(), torch.randn(count).double()
    results = []
    for ours in (True, False):
        if ours:
            logps, entropy = token_logps(
                head,
                hidden,
                rows,
                targets,
                temperature=temperature,
                chunk_size=chunk,
                entropy_gradient=entropy_gradient,
            )
        else:
            logps, entropy = plain(head, hidden, rows, targets, temperature)
        loss = (logps * of_logps).sum() + ((entropy * of_entropy).sum() if entropy_gradient else 0.0)
        gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])
        results.append([logps.detach(), entropy.detach(), *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_an_entropy_that_is_not_part_of_the_loss_has_no_gradient() -> None:
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    _, entropy = token_logps(
        torch.nn.Linear(WIDTH, VOCABULARY),
        hidden,
        torch.arange(3),
        torch.arange(3),
        temperature=1.0,
        chunk_size=2,
        entropy_gradient=False,
    )
    assert not entropy.requires_grad


def test_a_distribution_with_one_certain_token_gives_finite_gradients() -> None:
    head = torch.nn.Linear(1, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.zero_()[3] = 1e4
    hidden = torch.ones(1, 1, requires_grad=True)
    logps, entropy = token_logps(
        head,
        hidden,
        torch.tensor([0]),
        torch.tensor([3]),
        temperature=1.0,
        chunk_size=1,
        entropy_gradient=True,
    )
    (logps.sum() + entropy.sum()).backward()
    assert logps.item() == 0.0
    assert entropy.item() == pytest.approx(0.0, abs=1e-3)
    assert torch.isfinite(head.weight.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [4, 8, 32])
def test_what_is_kept_for_the_backward_is_one_chunk_of_the_vocabulary(chunk: int) -> None:
    head = torch.nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(32, WIDTH, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 2 and tensor.shape[1] == VOCABULARY and tensor.shape[0] != WIDTH:
            kept[tensor.data_ptr()] = tensor.shape[0]
        return tensor

    rows = torch.arange(32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logps, _ = token_logps(
            head, hidden, rows, rows % VOCABULARY, temperature=1.0, chunk_size=chunk, entropy_gradient=False
        )
    assert sum(kept.values()) == chunk
    assert logps.shape == (32,)


def test_autocast_rounds_the_head_and_nothing_behind_it() -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(WIDTH, VOCABULARY)
    with torch.no_grad():
        head.weight *= 40
    hidden = torch.randn(9, WIDTH)
    rows = torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
        logps, entropy = token_logps(head, hidden, rows, rows, temperature=1.0, chunk_size=4, entropy_gradient=False)
    expected = logits.float().log_softmax(-1)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logps, expected[rows, rows])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-5)
