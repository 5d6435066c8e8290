"""Log-probs and entropies without a whole matrix of logits: right values and gradients, in one chunk's memory."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from largest import Largest
from torch.profiler import ProfilerActivity, profile

from lockstep.contract.sampling import Sampling
from lockstep.learn.filters import IdRules, RowRules
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import token_logps

WIDTH, VOCABULARY = 6, 19
# The vocabulary is so large that tensors of its width need most of the memory.
WIDE = 4096


def plain(
    head: torch.nn.Module, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logps = (head(hidden) / temperature).log_softmax(-1)
    return logps[rows, targets], -(logps.exp() * logps).sum(-1)


@draws(80)
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


def peak_bytes(rows: int, chunk: int, entropy_gradient: bool) -> int:
    """The largest number of bytes that a forward and its backward held at any time, for any purpose."""
    head = torch.nn.Linear(WIDTH, WIDE, bias=False)
    hidden, places = torch.randn(rows, WIDTH, requires_grad=True), torch.arange(rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        logps, entropy = token_logps(
            head, hidden, places, places, temperature=0.7, chunk_size=chunk, entropy_gradient=entropy_gradient
        )
        loss = logps.sum() + entropy.sum() if entropy_gradient else logps.sum()
        del logps, entropy
        loss.backward()
    found = sorted(
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(accumulate(size for _, size in found))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("rows", "chunk"), [(64, 8), (128, 8), (128, 32)])
def test_forward_and_backward_never_hold_more_than_four_matrices_of_a_chunk(
    rows: int, chunk: int, entropy_gradient: bool
) -> None:
    matrix, head = chunk * WIDE * 4, WIDTH * WIDE * 4
    # The memory includes the gradient of the head, for all rows and for one chunk.
    assert 3 * matrix < peak_bytes(rows, chunk, entropy_gradient) < 4.1 * matrix + 2 * head


@pytest.mark.parametrize("chunk", [2, 8])
def test_under_autocast_the_heads_gradient_is_added_up_in_the_weights_precision(chunk: int) -> None:
    torch.manual_seed(2)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    hidden, rows = torch.randn(64, WIDTH), torch.arange(64)
    targets = torch.randint(VOCABULARY, (64,))

    def gradient(parts: list[slice]) -> torch.Tensor:
        """Compute all rows in parts, each with its own forward and backward."""
        head.weight.grad = None
        for part in parts:
            own = rows[: len(rows[part])]
            with torch.autocast("cpu", torch.bfloat16):
                logps, entropy = token_logps(
                    head,
                    hidden[part],
                    own,
                    targets[part],
                    temperature=1.0,
                    chunk_size=chunk,
                    entropy_gradient=True,
                )
            (logps.sum() + entropy.sum()).backward()
        assert head.weight.grad is not None
        return head.weight.grad.clone()

    together = gradient([slice(None)])
    apart = gradient([slice(i, i + chunk) for i in range(0, 64, chunk)])
    assert float((together - apart).norm() / apart.norm()) < 1e-6
    # In bf16 a single such sum would be wrong by a thousandth.
    assert not torch.equal(together, together.bfloat16().float())


def test_autocast_rounds_the_head_and_nothing_behind_it() -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(WIDTH, VOCABULARY)
    with torch.no_grad():
        head.weight *= 40
    hidden = torch.randn(9, WIDTH)
    rows = torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
        logps, entropy = token_logps(
            head, hidden, rows, rows, temperature=1.0, chunk_size=4, entropy_gradient=False
        )
    expected = logits.float().log_softmax(-1)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logps, expected[rows, rows])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 32])
def test_rules_of_the_sampling_distribution_stay_within_one_chunk(chunk: int) -> None:
    """With penalties and bans a chunk has one more matrix of flags, and the moved logits of the ids that occur."""
    rows = 128
    sampling = Sampling(
        rows, temperature=0.7, repetition_penalty=1.3, allowed_token_ids=tuple(range(0, WIDE, 2))
    )
    ids = np.arange(0, 2 * rows, 2)
    sequence = TrainingSequence("a", [3, 4], ids, np.zeros(rows))
    rules = RowRules(IdRules(sampling, WIDE), (sequence,), np.zeros(rows, dtype=np.int64), np.arange(rows))
    head = torch.nn.Linear(WIDTH, WIDE, bias=False)
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    with Largest() as seen:
        logps, _ = token_logps(
            head,
            hidden,
            torch.arange(rows),
            torch.from_numpy(ids.copy()),
            temperature=0.7,
            chunk_size=chunk,
            entropy_gradient=False,
            rules=rules,
        )
        logps.sum().backward()
    assert logps.isfinite().all()
    assert seen.elements == chunk * WIDE
    assert rules.support.tolist() == [WIDE // 2] * rows
