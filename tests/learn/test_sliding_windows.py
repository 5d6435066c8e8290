"""A model whose sliding window is longer than every sequence uses trees: gradients equal those of the padded reference.

The layers of the reference use the window as the model defines it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from blocks import small_blocks
from draws import draws
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from reference import padded_logps
from test_packing import assert_same_gradients, config, gradients_beside_reference, moved_by, steps, weighted
from tiny import make_model
from transformers import PreTrainedModel

from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import score_pack, why_plain_rows
from lockstep.learn.sequence import TrainingSequence

BUILDS: dict[str, Callable[[], PreTrainedModel]] = {
    "every layer": lambda: make_model("mistral", sliding_window=6),
    "one layer": lambda: make_model("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
}
# The model that learns, and the same weights for the reference, which uses transformers' own attention.
MODELS = {kind: build().double() for kind, build in BUILDS.items()}
PLAIN = {kind: copy.deepcopy(model) for kind, model in MODELS.items()}


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    for model in MODELS.values():
        adopt_tree_attention(model)
    with small_blocks():
        yield


def reaching(kind: str, window: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model that learns and the model of the reference, with a window of this many tokens."""
    for model in (MODELS[kind], PLAIN[kind]):
        model.config.sliding_window = window
    return MODELS[kind], PLAIN[kind]


@pytest.mark.parametrize("over", [-2, -1, 0, 1, 20], ids="{:+d}".format)
@draws(10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    sequences=steps(),
    kind=st.sampled_from(sorted(MODELS)),
    budget=st.integers(1, 300),
    temperature=st.sampled_from([1, 0.7]),
)
def test_gradients_equal_the_padded_reference_at_and_around_the_reach_of_the_window(
    over: int, sequences: list[TrainingSequence], kind: str, budget: int, temperature: float
) -> None:
    longest = max(len(s.prompt_ids) + len(s.completion_ids) for s in sequences)
    model, plain = reaching(kind, max(longest + over, 1))
    rows = why_plain_rows(model, longest) is not None
    assert rows == (max(longest + over, 1) < longest)
    run = config(token_budget=budget, temperature=temperature)
    sequences = moved_by(plain, weighted(sequences, run), temperature)
    found, expected = gradients_beside_reference(model, plain, sequences, run, plain_rows=rows)
    assert_same_gradients(found, expected, 1e-5)


@pytest.mark.parametrize("kind", BUILDS)
def test_a_tree_is_right_where_it_is_wider_than_the_window_and_wrong_where_a_branch_is_longer(
    kind: str,
) -> None:
    """The comparison above can fail: packs exceed the window; a window too short for a branch gives wrong values."""
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(4, 12)), (20 + i, 30 + i, 40 + i, 50 + i), (0.0,) * 4)
        for i in range(6)
    ]
    (pack,) = pack_sequences(sequences, 1000)
    assert pack.input_ids.shape[1] == 8 + 6 * 3
    gaps = []
    for window in (12, 6):
        model, plain = reaching(kind, window)
        with torch.no_grad():
            expected = padded_logps(plain, sequences, 1.0)[0].flatten()
            gaps.append(float((score_pack(model, pack, 1.0, 512).logps - expected).abs().max()))
    assert gaps[0] < 1e-6
    assert gaps[1] > 1e-2
