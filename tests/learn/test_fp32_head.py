"""An output head in float32 under bfloat16 must be on both sides or on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_vllm
from datasets import Dataset
from tiny import CONTEXT, make_model, make_tokenizer

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import ProofError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.policy import fp32_head_product
from lockstep.tokens.chat import load_tokenizer

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(8)]})


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    # The weights have a usual scale, because bf16 rounds the logits of the other tests' models by whole nats.
    folder = tmp_path_factory.mktemp("fp32_head")
    make_model(scale=0.05).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def trainer(model: str, folder: Path, **fields: Any) -> GRPOTrainer:
    base: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
    }
    base |= {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": []}
    base |= {"bf16": True, "use_vllm": False, "learning_rate": 1e-4, "cast_lm_head_to_fp32": True}
    engine = fields.pop("engine", None)
    return GRPOTrainer(
        model, by_length, GRPOConfig(str(folder), **{**base, **fields}), PROMPTS, engine=engine
    )


def test_the_trainers_head_is_computed_in_float32_past_autocast() -> None:
    model = make_model("llama", scale=0.05)
    adopt_tree_attention(model)
    (pack,) = pack_sequences([TrainingSequence("a#0", (5, 6, 7), (8, 9), (-1.0,) * 2, (1.0,) * 2, 1.0)], 100)
    states: list[torch.Tensor] = []
    model.base_model.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = score_pack(model, pack, 1.0, 8, fp32_head=True).logps
        rounded = score_pack(model, pack, 1.0, 8).logps
    hidden = states[0][0, 2:]
    exact = (hidden.float() @ model.lm_head.weight.T).log_softmax(-1)[torch.arange(2), torch.tensor([8, 9])]
    assert torch.allclose(found, exact, rtol=0, atol=2e-6)
    assert not torch.allclose(rounded, exact, rtol=0, atol=2e-5)


def test_the_gradient_reaches_the_head_and_what_is_below() -> None:
    head = torch.nn.Linear(4, 6, bias=True, dtype=torch.bfloat16)
    hidden = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    logits = fp32_head_product(head, hidden)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert head.bias.grad is not None


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])]
)
def test_both_sides_compute_the_head_in_float32_and_a_run_passes_its_proofs(
    model_dir: str, tmp_path: Path, engine: str
) -> None:
    run = trainer(model_dir, tmp_path, use_vllm=engine == "vllm")
    try:
        settings = run.engine.settings()
        assert (settings.dtype, settings.head_dtype) == (torch.bfloat16, torch.float32)
        run.train()
    finally:
        run.close()
    assert 0 < run.state.log_history[0]["parity/mean_abs_gap"] < 0.15


def test_an_engine_whose_head_is_in_bfloat16_is_refused(model_dir: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    engine = TransformersEngine(model_dir, tokenizer, dtype=torch.bfloat16, max_model_len=CONTEXT)
    with pytest.raises(
        ProofError, match=r"head_dtype is torch\.bfloat16 in the engine, training assumes torch\.float32"
    ):
        trainer(model_dir, tmp_path, engine=engine)
    same = TransformersEngine(
        model_dir, tokenizer, dtype=torch.bfloat16, max_model_len=CONTEXT, fp32_head=True
    )
    trainer(model_dir, tmp_path, engine=same)


def test_in_float32_the_field_changes_nothing(model_dir: str, tmp_path: Path) -> None:
    runs = [
        trainer(model_dir, tmp_path / str(cast), bf16=False, cast_lm_head_to_fp32=cast, max_steps=1)
        for cast in (False, True)
    ]
    for run in runs:
        run.train()
    one, other = (dict(run.model.named_parameters()) for run in runs)
    assert all(torch.equal(parameter, other[name]) for name, parameter in one.items())
