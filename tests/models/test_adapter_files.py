"""A saved adapter meets the base that it was trained on, and no other. A file that is not whole is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.models.adapters import BASE_FILE, base_digest, load_adapted, write_base
from lockstep.models.policy import load_policy
from lockstep.models.resolve import resolve_model

IDS = torch.arange(6).unsqueeze(0)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "base")


def adapted(base: Any, seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    settings = {
        "r": 4,
        "target_modules": ["q_proj", "up_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    return peft.get_peft_model(base, peft.LoraConfig(**settings, **fields))


def keep(model: Any, base: Path, folder: Path, digest: str | None = None) -> Path:
    """The adapter as a trainer saves it, with the tokenizer beside it."""
    found = base_digest(model) if digest is None else digest
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    write_base(folder, model, found)
    return folder


def test_an_adapter_on_a_base_that_was_merged_in_memory_is_merged_with_that_base_only(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = adapted(load_policy(str(saved)), seed=1).merge_and_unload()
    base.save_pretrained(tmp_path / "made")
    model = adapted(base)
    adapter = keep(model, saved, tmp_path / "adapter")
    assert main(["merge", str(adapter), str(tmp_path / "whole")]) == 2
    assert not (tmp_path / "whole").exists()
    *_, line = capsys.readouterr().err.splitlines()
    assert "was trained on another base than" in line
    assert "save it with save_pretrained and give its directory with --base" in line
    assert main(["merge", str(adapter), str(tmp_path / "whole"), "--base", str(tmp_path / "made")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_another_program_is_taken_with_a_word(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = keep(adapted(load_policy(str(saved))), saved, tmp_path / "adapter")
    (adapter / BASE_FILE).unlink()
    assert main(["merge", str(adapter), str(tmp_path / "whole")]) == 0
    assert f"has no {BASE_FILE}" in capsys.readouterr().err


def test_biases_that_lora_trains_are_not_another_base(saved: Path, tmp_path: Path) -> None:
    base = load_policy(str(saved))
    digest, model = base_digest(base), adapted(base, modules_to_save=["lm_head"], bias="all")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    loaded, is_compared = load_adapted(str(saved), keep(model, saved, tmp_path / "adapter", digest))
    assert is_compared
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "loaded",
    [
        {"dtype": torch.bfloat16},
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
        {
            "dtype": torch.bfloat16,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
            ),
        },
    ],
    ids=["bf16", "4 bits", "4 bits of bf16"],
)
def test_an_adapter_meets_the_values_that_training_computed_with(
    saved: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    model = adapted(load_policy(str(saved), loaded))
    digest = base_digest(model)
    found, is_compared = load_adapted(str(saved), keep(model, saved, tmp_path / "adapter"))
    assert is_compared
    assert base_digest(found) == digest != base_digest(load_policy(str(saved)))
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert not getattr(found.config, "quantization_config", None)


def _without(adapter: Path, name: str) -> None:
    tensors = load_file(adapter / WEIGHTS)
    save_file({key: tensor for key, tensor in tensors.items() if name not in key}, adapter / WEIGHTS)


def _with(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)


def _one_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).view(-1)[0] = torch.nan


def _foreign(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors[name.replace("layers.0", "layers.77")] = tensors[name].clone()


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name][:, :1].clone()


def _config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda a: _without(a, "up_proj.lora_B"), "its file lacks"),
        (lambda a: _without(a, "lm_head"), "its file lacks"),
        (lambda a: _with(a, _foreign), "has weights that the base has no place for"),
        (lambda a: _with(a, _one_nan), "NaN or infinite"),
        (lambda a: _with(a, _other_shape), "cannot be loaded onto"),
        (lambda a: _config(a, r=8), "cannot be loaded onto"),
        (lambda a: _config(a, lora_alpha=0), "scales .* by 0"),
        (lambda a: _config(a, lora_alpha=math.nan), "scales .* by nan"),
        (lambda a: _config(a, peft_type="NOPE"), "has the peft_type 'NOPE'"),
        (lambda a: (a / "adapter_config.json").write_text("[]"), "cannot be read .TypeError"),
        (lambda a: (a / "adapter_config.json").write_text("[" * 100_000), "cannot be read .RecursionError"),
        (lambda a: (a / WEIGHTS).write_bytes(b"not a file"), "cannot be loaded onto"),
        (lambda a: (a / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
        (lambda a: (a / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda a: (a / BASE_FILE).write_text("{}"), "cannot be read"),
        (lambda a: (a / BASE_FILE).write_text('{"digest": "1", "dtype": "nn"}'), "cannot be read"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(
    saved: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    adapter = keep(adapted(load_policy(str(saved)), modules_to_save=["lm_head"]), saved, tmp_path / "adapter")
    damage(adapter)
    with pytest.raises(InputError, match=said):
        load_adapted(str(saved), adapter)


def test_a_directory_with_an_adapter_is_no_model_also_if_a_model_lies_beside_it(
    saved: Path, tmp_path: Path
) -> None:
    adapter = keep(adapted(load_policy(str(saved))), saved, tmp_path / "adapter")
    both = shutil.copytree(saved, tmp_path / "both")
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    for folder in (adapter, both):
        with pytest.raises(InputError, match="holds an adapter"):
            resolve_model(str(folder))
    # A hub id passes there.
    with pytest.raises(InputError, match="is an adapter, not a whole model"):
        load_policy(str(both))
