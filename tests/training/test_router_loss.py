"""A mixture of experts never loses the auxiliary loss of its routers without an error message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import start
from methods import FIELDS, make
from tiny import save
from transformers import AutoModelForCausalLM, MixtralConfig

from lockstep.errors import InputError


def experts(folder: Path, coefficient: float) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(
        **sizes,
        vocab_size=384,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=128,
        eos_token_id=0,
        router_aux_loss_coef=coefficient,
    )
    torch.manual_seed(0)
    return str(save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder))


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_model_with_a_routers_loss_is_refused_until_it_is_said_to_go_without(tmp_path: Path, method: str) -> None:
    model = experts(tmp_path / "model", 0.02)
    engine = start("transformers", model)
    with pytest.raises(InputError, match=r"router_aux_loss_coef=0.02 in its config.*set router_aux_loss_coef=0"):
        make(method, model, tmp_path, engine, FIELDS[method])
    run = make(method, model, tmp_path, engine, {**FIELDS[method], "router_aux_loss_coef": 0.0, "max_steps": 1})
    run.train()
    assert run.state.global_step == 1


def test_a_model_whose_routers_have_no_loss_needs_no_word(tmp_path: Path) -> None:
    model = experts(tmp_path / "model", 0.0)
    make("GRPO", model, tmp_path, start("transformers", model), FIELDS["GRPO"])
