"""Switching an adapter off gives the base model; switching it on again restores the policy, also after errors."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from tiny import make_model

from lockstep.errors import InputError
from lockstep.models.adapters import add_adapter, causal_model, head_name, is_adapted, without_adapter
from lockstep.models.parameters import refuse_shared_memory
from lockstep.weights.push import weights_of

IDS = torch.tensor([[5, 9, 200, 31]])


def adapted(**fields: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "target_modules": ["q_proj", "up_proj"],
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
        **fields,
    }
    return peft.get_peft_model(make_model(), peft.LoraConfig(**config))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def state(model: Any) -> tuple[Any, ...]:
    return (
        model.active_adapters,
        [(name, p.requires_grad) for name, p in model.named_parameters()],
        weights_of(model).manifest(0).digest,
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"target_modules": ["q_proj", "k_prj", "w_out"]},
            "no layer k_prj, w_out; did you mean k_proj? Only q_proj is",
        ),
        (
            {"modules_to_save": ["embed_tokens", "score"]},
            "modules_to_save: the model has no layer score; only emb",
        ),
        (
            {"exclude_modules": ["q_proj", "qq"]},
            "exclude_modules: the model has no layer qq; only q_proj is used",
        ),
    ],
    ids=str,
)
def test_names_of_layers_that_the_model_has_not_are_said(
    fields: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **fields})
    add_adapter(make_model(), config)
    (line,) = [r.getMessage() for r in caplog.records if "the model has no layer" in r.getMessage()]
    assert said in line


@pytest.mark.parametrize(
    "fields", [{}, {"target_modules": "all-linear"}, {"target_modules": ["layers.0.mlp.up_proj"]}], ids=str
)
def test_names_that_the_model_has_are_not_said(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    add_adapter(make_model(), peft.LoraConfig(**{"target_modules": ["q_proj"], **fields}))
    assert not caplog.records


@pytest.mark.parametrize("field", ["target_modules", "modules_to_save", "exclude_modules"])
def test_a_field_of_which_no_name_is_there_is_refused(field: str) -> None:
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], field: ["k_prj"]})
    with pytest.raises(InputError, match=f"{field}: the model has no layer k_prj; did you mean k_proj"):
        add_adapter(make_model(), config)


def test_the_causal_model_is_the_one_inside() -> None:
    plain, model = make_model(), adapted()
    assert causal_model(plain) is plain
    assert type(causal_model(model)) is type(plain)
    assert causal_model(model).base_model is not model.base_model
    assert (is_adapted(plain), is_adapted(model), is_adapted(causal_model(model))) == (False, True, True)
    assert (
        head_name(model)
        == head_name(plain)
        == head_name(adapted(target_modules=["lm_head"]))
        == "lm_head.weight"
    )


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_without_its_adapter_a_model_is_the_one_it_was_made_of(saved: Any) -> None:
    model, plain = adapted(modules_to_save=saved), make_model()
    before, own = state(model), logits(model)
    with without_adapter(model):
        assert torch.equal(logits(model), logits(plain))
        # The weights that an engine would get are then those of the base model too.
        assert all(torch.equal(t, plain.get_parameter(name)) for name, t in weights_of(model))
    assert torch.equal(logits(model), own)
    assert not torch.equal(own, logits(plain))
    assert state(model) == before


def test_a_reference_adapter_takes_the_place_of_none() -> None:
    model = adapted()
    model.add_adapter("ref", peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    before, own = state(model), logits(model)
    with without_adapter(model):
        assert model.active_adapters == ["ref"]
        reference = logits(model)
        assert not torch.equal(reference, logits(make_model()))
    assert not torch.equal(reference, own)
    assert torch.equal(logits(model), own)
    assert state(model) == before


@pytest.mark.parametrize("reference", [False, True])
def test_an_error_inside_leaves_the_policy_as_it_was(reference: bool) -> None:
    model = adapted()
    if reference:
        model.add_adapter("ref", peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    # One tensor of the adapter is not trained; it must stay untrained.
    next(p for name, p in model.named_parameters() if "default" in name).requires_grad_(False)
    before, own = state(model), logits(model)
    with pytest.raises(RuntimeError, match="inside"), without_adapter(model):
        raise RuntimeError("inside")
    assert state(model) == before
    assert torch.equal(logits(model), own)


def test_a_model_without_an_adapter_has_none_to_switch_off() -> None:
    with pytest.raises(InputError, match="no adapter to switch off"), without_adapter(make_model()):
        pass


def test_an_adapter_that_is_added_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model = add_adapter(_made(), peft.LoraConfig(), seed=5)
    assert is_adapted(model)
    assert torch.equal(torch.rand(4), expected)


def _made() -> Any:
    """A tiny model that does not set the seed."""
    kept = torch.get_rng_state()
    model = make_model()
    torch.set_rng_state(kept)
    return model


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"target_modules": ["embed_tokens"]}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    ],
    ids=["target_modules", "modules_to_save"],
)
def test_an_adapter_that_trains_the_same_numbers_twice_is_refused(
    fields: dict[str, Any], refused: bool
) -> None:
    config = peft.LoraConfig(**fields, ensure_weight_tying=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("llama", tied=True), config)
    with (
        pytest.raises(InputError, match=r"embed_tokens.* and .*lm_head.*twice") if refused else nullcontext()
    ):
        refuse_shared_memory(model)


def test_only_trained_numbers_that_are_really_shared_are_refused() -> None:
    def model(*parts: torch.Tensor, trained: bool = True) -> torch.nn.Module:
        return torch.nn.ParameterList([torch.nn.Parameter(part, requires_grad=trained) for part in parts])

    memory = torch.zeros(4, 6)
    refuse_shared_memory(model(*memory.split(2)))
    # The columns of one memory lie between each other, and share no number.
    refuse_shared_memory(model(memory[:, :3], memory[:, 3:]))
    refuse_shared_memory(model(memory, memory.t(), trained=False))
    refuse_shared_memory(make_model("llama", tied=True))
    for parts in ((memory, memory.t()), (memory[:3], memory[2:]), (memory, memory[3, 5:])):
        with pytest.raises(InputError, match="0 and 1 are two parameters"):
            refuse_shared_memory(model(*parts))


def test_the_command_line_does_not_import_peft_to_print_its_help() -> None:
    code = "import sys; sys.argv = ['lockstep', '--help']\nfrom lockstep.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\nassert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
