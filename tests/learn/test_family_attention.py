"""Families whose attention takes no tree learn from plain rows, with the model's own scores and gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from methods import make
from model_families import make_family
from safetensors.torch import load_file, save_file
from test_filtered_scores import check
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import GRPOConfig
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.scoring import check_scorable, why_plain_rows
from lockstep.models.policy import load_policy
from lockstep.run.engine import check_positions, shake_hands, start_engine

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


def test_a_head_of_its_own_in_the_files_of_a_tied_model_is_refused_with_vllm(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    # A second copy of the embedding is the same model.
    save_file(
        {**weights, "lm_head.weight": embedding.clone()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    same = load_policy(str(tmp_path))
    assert same.lm_head.weight is same.model.embed_tokens.weight
    save_file(
        {**weights, "lm_head.weight": embedding * 2},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    engine = SimpleNamespace(settings=lambda: SimpleNamespace(engine="vllm"))
    with pytest.raises(InputError, match="tie_word_embeddings to false"):
        shake_hands(engine, load_policy(str(tmp_path)), "unused", torch.float32, 32)  # type: ignore[arg-type]


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_sequences_on_both_sides_of_longropes_border_are_refused(engine: str) -> None:
    config = LlamaConfig(
        rope_parameters={**LONGROPE, "original_max_position_embeddings": 64}, max_position_embeddings=512
    )
    check_positions(config, 64, by_capacity=engine == "vllm")
    with pytest.raises(InputError, match=r"more than 64 tokens.*vllm_max_model_length to 64"):
        check_positions(config, 65, by_capacity=engine == "vllm")


def test_kinds_of_layers_have_positions_of_their_own() -> None:
    config = SimpleNamespace(
        max_position_embeddings=512,
        rope_parameters={
            "full_attention": {**LONGROPE, "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    with pytest.raises(InputError, match="more than 32 tokens"):
        check_positions(config, 33, by_capacity=True)  # type: ignore[arg-type]


def test_a_rotation_that_only_vllm_scales_is_refused_on_vllm() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    plain = SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)
    check_positions(plain, 512, by_capacity=True)  # type: ignore[arg-type]
    scaled = SimpleNamespace(max_position_embeddings=512, rope_parameters={**rope, "alpha": 1000.0})
    check_positions(scaled, 512, by_capacity=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="alpha"):
        check_positions(scaled, 512, by_capacity=True)  # type: ignore[arg-type]


def test_the_border_is_looked_at_in_the_handshake() -> None:
    model = make_family("llama")
    model.config.rope_parameters = {**LONGROPE, "original_max_position_embeddings": 16}
    for kind, longest in (("vllm", 8), ("transformers", 17)):
        engine = SimpleNamespace(settings=lambda kind=kind: SimpleNamespace(engine=kind, max_model_len=17))
        with pytest.raises(InputError, match="more than 16 tokens"):
            shake_hands(engine, model, "unused", torch.float32, longest)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_vllm", [True, False])
def test_a_border_that_every_sequence_crosses_is_seen_before_the_model_is_loaded(
    use_vllm: bool, tmp_path: Path
) -> None:
    """The directory has no weights: whatever loads them gives another error."""
    ropes = {**LONGROPE, "original_max_position_embeddings": 64}
    LlamaConfig(rope_parameters=ropes, max_position_embeddings=512).save_pretrained(tmp_path)

    def refused(**fields: int) -> str:
        with pytest.raises(InputError) as found:
            make("GRPO", str(tmp_path), tmp_path, None, {"use_vllm": use_vllm, **fields})  # type: ignore[arg-type]
        return str(found.value)

    assert "more than 64 tokens" in refused(max_completion_length=64)
    assert "longrope" not in refused(max_completion_length=62)
    assert ("longrope" in refused(max_completion_length=8, vllm_max_model_length=65)) == use_vllm
    assert "longrope" not in refused(max_completion_length=8, vllm_max_model_length=64)


def test_a_border_that_the_prompts_cross_is_seen_before_the_engine_starts(tmp_path: Path) -> None:
    model = make_family("llama")
    model.config.rope_parameters = {**LONGROPE, "original_max_position_embeddings": 64}
    config = GRPOConfig(output_dir=str(tmp_path), bf16=False, use_vllm=True)
    with pytest.raises(InputError, match=r"vLLM takes sequences of 65 tokens"):
        start_engine(config, "no directory", None, 65, model)  # type: ignore[arg-type]
