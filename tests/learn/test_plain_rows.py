"""Models that cannot attend within a tree learn from plain rows.

The trainer detects and reports it; gradients stay the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from datasets import Dataset
from draws import draws
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from reference import sampled_places
from test_packing import assert_same_gradients, config, gradients_beside_reference, steps, units_of, weighted
from tiny import make_model, make_stateful, make_tokenizer
from transformers import PreTrainedModel

from lockstep import GRPOConfig, GRPOTrainer, InputError
from lockstep.contract.sampling import Sampling
from lockstep.learn.pack import pack_rows
from lockstep.learn.scoring import score_pack, why_plain_rows
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.arithmetic import Precision, head_dtype
from lockstep.run.trainers.checks import needs_plain_rows
from lockstep.watch.plain_forward import completion_logps

WINDOW = 6


def sliding(window: int = WINDOW) -> PreTrainedModel:
    """A model whose layers attend within a window."""
    return make_model("mistral", sliding_window=window)


EXACT = {"sliding": sliding().double(), "stateful": make_stateful().double()}


@draws(12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    sequences=steps(),
    kind=st.sampled_from(sorted(EXACT)),
    budget=st.integers(1, 200),
    chunk=st.integers(1, 40),
)
def test_loss_and_gradients_equal_the_padded_reference(
    sequences: list[TrainingSequence], kind: str, budget: int, chunk: int
) -> None:
    model, run = EXACT[kind], config(token_budget=budget, logits_chunk_size=chunk)
    sequences = weighted(sequences, run)
    found, expected = gradients_beside_reference(model, model, sequences, run, plain_rows=True)
    assert_same_gradients(found, expected, 1e-5)


def test_weights_in_half_precision_below_sums_in_float32_score_as_the_models_own_forward() -> None:
    """Mamba adds its layers up in float32, and casts the sums to the dtype of the head."""
    model, prompt, completion = make_stateful().bfloat16().eval(), (5, 6, 7), (8, 9, 10)
    (pack,) = pack_rows([TrainingSequence("a#0", prompt, completion, (0.0,) * 3)], 100)
    with torch.no_grad():
        assert model.base_model(pack.input_ids).last_hidden_state.dtype == torch.float32
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1)[range(3), completion]
        scores = score_pack(model, pack, 1.0, 64)
    again = completion_logps(model, prompt, completion, Sampling(3), Precision(None))
    for found in (scores.logps, again):
        torch.testing.assert_close(found.float(), expected, rtol=0.0, atol=1e-5)


def test_the_codes_of_a_quantised_head_are_no_dtype_for_hidden_states() -> None:
    head = torch.nn.Linear(4, 4)
    head.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert head_dtype(head, torch.float32) == torch.float32


@draws(60)
@given(steps(), st.integers(1, 200))
def test_rows_hold_every_token_once_and_keep_to_the_budget(
    sequences: list[TrainingSequence], budget: int
) -> None:
    packs = list(pack_rows(sequences, budget))
    held = [s for pack in packs for s in pack.sequences]
    assert sorted(held, key=lambda s: s.name) == sorted(sequences, key=lambda s: s.name)
    rows = [len(s.prompt_ids) + sampled_places(s)[-1] for s in held]
    assert rows == sorted(rows)
    for pack in packs:
        assert len(pack.sequences) == 1 or pack.input_ids.numel() <= budget
        paths = [(*s.prompt_ids, *s.completion_ids[: sampled_places(s)[-1]]) for s in pack.sequences]
        longest = max(map(len, paths))
        assert pack.input_ids.tolist() == [[*path, *[0] * (longest - len(path))] for path in paths]
        places = [
            (row, len(s.prompt_ids) - 1 + i)
            for row, s in enumerate(pack.sequences)
            for i in sampled_places(s)
        ]
        assert pack.predictors.tolist() == [row * longest + place for row, place in places]


@draws(100)
@given(steps(), st.integers(1, 120), st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_rows_of_a_unit_stay_together(
    sequences: list[TrainingSequence], budget: int, sizes: list[int]
) -> None:
    units = units_of(sequences, sizes)
    packs = list(pack_rows([s for unit in units for s in unit], budget))
    held = {tuple(unit[0].name for unit in units if unit[0] in pack.sequences): pack for pack in packs}
    assert sorted(name for names in held for name in names) == sorted(unit[0].name for unit in units)
    by_first = {unit[0].name: unit for unit in units}
    for names, pack in held.items():
        own = sorted((by_first[name] for name in names), key=lambda unit: pack.sequences.index(unit[0]))
        assert [s for unit in own for s in unit] == list(pack.sequences)
        # Only a pack with a single unit that is too large exceeds the budget.
        assert len(own) == 1 or pack.input_ids.numel() <= budget


def test_a_window_that_no_sequence_leaves_is_attended_within_a_tree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert why_plain_rows(sliding(50), 50) is None
    assert why_plain_rows(make_model("llama"), 10**6) is None
    assert not needs_plain_rows([sliding(50)], 50)
    assert capsys.readouterr().out == ""


def test_what_cannot_be_is_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert needs_plain_rows([make_model("llama"), sliding()], 7)
    assert "it attends within 6 tokens, and sequences may have 7" in capsys.readouterr().out
    assert needs_plain_rows([make_stateful()], 7)
    assert "it keeps a state from token to token" in capsys.readouterr().out
    mixed = make_model("qwen2")
    mixed.config.layer_types = ["chunked_attention", "full_attention"]
    assert needs_plain_rows([mixed], 7)
    assert "layers of kind chunked_attention" in capsys.readouterr().out
    # transformers does not call such a model stateful.
    mixed.config.layer_types = ["linear_attention", "full_attention"]
    assert needs_plain_rows([mixed], 7)
    assert "it keeps a state from token to token" in capsys.readouterr().out


def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids) + sum(ids) % 5) for ids in completion_ids]


def assert_trains(model: PreTrainedModel, folder: Path, **fields: Any) -> None:
    """Run two steps of GRPO and assert that every token is proven."""
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        learning_rate=1e-3,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **fields,
    )
    data = Dataset.from_dict({"prompt": [f"what is {i} + {i}" * (i % 3 + 1) for i in range(8)]})
    trainer = GRPOTrainer(str(folder / "model"), length, args, data)
    try:
        trainer.train()
    finally:
        trainer.close()
    logs = [entry for entry in trainer.state.log_history if "parity/checked_tokens" in entry]
    assert len(logs) == 2
    assert all(entry["parity/checked_tokens"] > 0 and entry["parity/max_abs_gap"] < 1e-3 for entry in logs)


@pytest.mark.parametrize("use_vllm", [False, pytest.param(True, marks=VLLM)])
def test_a_model_with_a_short_window_trains_with_every_token_proven(
    use_vllm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_trains(sliding(), tmp_path, use_vllm=use_vllm)
    assert "it attends within 6 tokens" in capsys.readouterr().out


def test_a_model_without_attention_trains_with_every_token_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_trains(make_stateful(), tmp_path, use_vllm=False, vllm_max_model_length=100)
    assert "it keeps a state from token to token" in capsys.readouterr().out


def test_a_model_that_names_no_longest_sequence_is_to_be_given_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="set vllm_max_model_length"):
        assert_trains(make_stateful(), tmp_path, use_vllm=False)
