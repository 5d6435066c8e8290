"""Tiny random models of many families, each with its specialities: biases, windows, caps, factors, experts.

`benchmarks/proofs/vllm_families.py` verifies each of them on vLLM, and tests use a few. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tiny import CONTEXT, save
from transformers import AutoModelForCausalLM, PreTrainedModel

# The names of the sizes in most configs, in those of GPT-2, and in those of Bloom and MPT.
_USUAL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_GROUPED = {**_USUAL, "num_key_value_heads": 1}
_HEADS_OF_32 = {**_GROUPED, "head_dim": 32}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


class Family(NamedTuple):
    """The config class of a family, by its name in transformers, and the fields that make a tiny model of it."""

    config: str
    fields: dict[str, object]


FAMILIES = {
    "llama": Family("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2": Family("Qwen2Config", _GROUPED),
    "qwen3": Family("Qwen3Config", _HEADS_OF_32),
    "mistral": Family("MistralConfig", {**_HEADS_OF_32, "sliding_window": None}),
    "gemma": Family("GemmaConfig", _HEADS_OF_32),
    "gemma2": Family("Gemma2Config", {**_HEADS_OF_32, "query_pre_attn_scalar": 32}),
    "gemma2, attention without a cap": Family(
        "Gemma2Config",
        {
            **_HEADS_OF_32,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": None,
        },
    ),
    # Scores of a tiny model are small. Without the cap it would compute other log-probs.
    "gemma2, with a low cap": Family(
        "Gemma2Config", {**_HEADS_OF_32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.5}
    ),
    "gemma3": Family("Gemma3TextConfig", {**_HEADS_OF_32, **_WINDOW, "query_pre_attn_scalar": 32}),
    "vaultgemma": Family(
        "VaultGemmaConfig",
        {**_HEADS_OF_32, **_WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": None},
    ),
    "phi": Family("PhiConfig", _USUAL),
    "phi3": Family("Phi3Config", _GROUPED),
    "gpt_neox": Family("GPTNeoXConfig", _USUAL),
    "gpt2": Family("GPT2Config", _GPT2),
    "gptj": Family("GPTJConfig", {**_GPT2, "rotary_dim": 16}),
    "olmo": Family("OlmoConfig", _GROUPED),
    "olmo2": Family("Olmo2Config", _GROUPED),
    "olmo3": Family("Olmo3Config", {**_GROUPED, **_WINDOW}),
    "opt": Family("OPTConfig", {**_USUAL, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "falcon": Family("FalconConfig", {**_USUAL, "multi_query": True, "alibi": False}),
    "stablelm": Family("StableLmConfig", {**_GROUPED, "use_qkv_bias": True}),
    "cohere": Family("CohereConfig", {**_GROUPED, "logit_scale": 0.25}),
    "cohere2": Family(
        "Cohere2Config", {**_GROUPED, **_WINDOW, "sliding_window": CONTEXT, "logit_scale": 0.25}
    ),
    "cohere2, longer than its window": Family("Cohere2Config", {**_GROUPED, **_WINDOW, "logit_scale": 0.25}),
    "granite": Family(
        "GraniteConfig",
        {**_GROUPED, "logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "smollm3": Family("SmolLM3Config", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "starcoder2": Family("Starcoder2Config", {**_GROUPED, "sliding_window": None}),
    "nemotron": Family("NemotronConfig", _GROUPED),
    "glm": Family("GlmConfig", _HEADS_OF_32),
    "glm4": Family("Glm4Config", _HEADS_OF_32),
    "exaone4": Family("Exaone4Config", {**_GROUPED, **_WINDOW}),
    "ernie4_5": Family("Ernie4_5Config", _HEADS_OF_32),
    "seed_oss": Family("SeedOssConfig", _HEADS_OF_32),
    "helium": Family("HeliumConfig", _HEADS_OF_32),
    "bloom": Family("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 2, "seq_length": CONTEXT}),
    "mpt": Family("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": CONTEXT}),
    "qwen3_moe": Family("Qwen3MoeConfig", {**_HEADS_OF_32, **_EXPERTS}),
    "mixtral": Family("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": Family("OlmoeConfig", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": Family("GraniteMoeConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": Family(
        "Lfm2Config",
        {
            **_GROUPED,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            # vLLM reads these, and configs of real models have them.
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 16,
            "conv_dim": 64,
        },
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        {**_GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16},
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig", {**_GROUPED, "lru_width": 64, "block_types": ["recurrent", "attention"]}
    ),
    "minimax": Family(
        "MiniMaxConfig",
        {
            **_HEADS_OF_32,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    # What it computes in bfloat16 differs from float32 by 0.2 nats on average, with these weights.
    "zamba2": Family(
        "Zamba2Config",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "attention_head_dim": 64,
            "use_mem_rope": True,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "mamba_headdim": 32,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
            "chunk_size": 16,
        },
    ),
    "xlstm": Family(
        "xLSTMConfig", {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 16}
    ),
    "mamba": Family("MambaConfig", {"hidden_size": 64, "state_size": 4, "num_hidden_layers": 2}),
}


def make_family(name: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny model of a family in float32.

    Its matrices have random weights of a size at which distributions are far from flat. Its norms and biases are
    random too, so that no test can miss a bias or a norm that is lost.
    """
    family = FAMILIES[name]
    fields = {
        "vocab_size": 384,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
        **family.fields,
    }
    config = getattr(transformers, family.config)(**fields | changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def save_family(name: str, folder: Path, **changes: object) -> str:
    """The directory of a tiny model of a family, with a tokenizer."""
    return str(save(make_family(name, **changes), folder))
