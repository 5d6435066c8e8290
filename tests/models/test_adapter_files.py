"""A saved adapter meets the base that it was trained on, and no other. A file that is not whole is refused."""

from __future__ import annotations

import json
import math
import os
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
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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


def _with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        change(tensors)
        save_file(tensors, adapter / WEIGHTS)

    return damage


def _without(part: str) -> Callable[[Path], object]:
    return _with(lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])


def _first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    """Another tensor in the place of the first matrix."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if "lora_A" in name)
        tensors[name] = change(tensors[name]).contiguous()

    return _with(damage)


def _value(number: float) -> Callable[[Path], object]:
    return _first(lambda tensor: tensor.clone().index_fill_(0, torch.tensor(0), number))


def _renamed(old: str, new: str) -> Callable[[Path], object]:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return _with(damage)


def _foreign(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors[name.replace("layers.0", "layers.77")] = tensors[name].clone()


def _config(**changes: Any) -> Callable[[Path], object]:
    def damage(adapter: Path) -> None:
        path = adapter / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def _cut(share: float) -> Callable[[Path], object]:
    def damage(adapter: Path) -> None:
        content = (adapter / WEIGHTS).read_bytes()
        (adapter / WEIGHTS).write_bytes(content[: int(len(content) * share)])

    return damage


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in a file's place."""

    def damage(adapter: Path) -> None:
        (adapter / name).unlink()
        make(adapter / name)

    return damage


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda adapter: (adapter / name).write_text(text)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _unreadable(path: Path) -> None:
    # A regular file that can be opened, and whose first byte cannot be read, also not by root.
    path.symlink_to("/proc/self/mem")


@pytest.fixture(scope="module")
def whole(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as a run saves it."""
    model = adapted(load_policy(str(saved)), modules_to_save=["lm_head"])
    return keep(model, saved, tmp_path_factory.mktemp("adapter") / "whole")


OF_A_FILE = [
    (_without("up_proj.lora_B"), "its file lacks"),
    (_without("lm_head"), "its file lacks"),
    (_with(dict.clear), "its file lacks"),
    (_renamed("up_proj", "down_proj"), "its file lacks"),
    (_renamed("lora_A", "lora_C"), "its file lacks"),
    (_with(_foreign), "has weights that the base has no place for"),
    (_value(math.nan), "NaN or infinite"),
    (_value(-math.inf), "NaN or infinite"),
    (_first(lambda tensor: tensor.double() * 1e300), "NaN or infinite"),
    (_first(lambda tensor: tensor.long()), "is torch.int64"),
    (_first(lambda tensor: tensor.bool()), "is torch.bool"),
    (_first(lambda tensor: tensor[:, :1]), "cannot be loaded onto"),
    (_first(lambda tensor: tensor[None]), "has rank 1"),
    (_first(lambda tensor: tensor.sum()), "has rank 0"),
    (_first(lambda tensor: tensor[:2]), "has rank 2, and its adapter_config.json says r=4"),
    *((_cut(share), f"{WEIGHTS} cannot be read") for share in (0, 0.001, 0.5, 0.99)),
    (_text(WEIGHTS, "not a file"), f"{WEIGHTS} cannot be read"),
    (_instead(WEIGHTS, lambda path: None), f"has no {WEIGHTS}"),
    (_instead(WEIGHTS, Path.mkdir), f"{WEIGHTS} is a directory"),
    (_instead(WEIGHTS, _loop), f"{WEIGHTS} is a link to nothing"),
    (_instead(WEIGHTS, os.mkfifo), f"{WEIGHTS} is neither a file nor a directory"),
    (_instead(WEIGHTS, _unreadable), f"{WEIGHTS} cannot be read"),
    (_instead(WEIGHTS, lambda path: torch.save([1], path.with_name("adapter_model.bin"))), "cannot be read"),
    (_config(r=8), "has rank 4, and its adapter_config.json says r=8"),
    (_config(r=0), "r is 0; it must be a number of dimensions"),
    (_config(r="4"), "r is '4'; it must be"),
    (_config(r=10**12), "has rank 4, and its adapter_config.json says r=1000000000000"),
    (_config(rank_pattern={"q_proj": 0}), "r is 0; it must be"),
    (_config(rank_pattern=[1]), "cannot be read"),
    (_config(lora_alpha=10**400), "cannot be loaded onto"),
    *((_config(lora_alpha=alpha), "lora_alpha is .* it must be") for alpha in (0, math.nan, "8", None, True, [8])),
    (_config(alpha_pattern={"up_proj": math.inf}), "lora_alpha is inf; it must be"),
    (_config(use_rslora="false"), "use_rslora is 'false'; it must be true or false"),
    (_config(fan_in_fan_out=1), "fan_in_fan_out is 1; it must be true or false"),
    (_config(target_modules=3), "cannot be loaded onto"),
    (_config(target_modules=["nothing"]), "cannot be loaded onto"),
    (_config(peft_type="NOPE"), "has the peft_type 'NOPE'"),
    (_config(peft_type=["LORA"]), "has the peft_type"),
    (_text(CONFIG, ""), "cannot be read"),
    (_text(CONFIG, "[]"), "cannot be read .TypeError"),
    (_text(CONFIG, '{"peft_type": "LORA", "r": 4}'), "cannot be read .KeyError: 'lora_alpha'"),
    (_text(CONFIG, "[" * 100_000), "nested too deeply"),
    (lambda a: (a / CONFIG).write_bytes(b"\xff\xfe"), "cannot be read"),
    (_instead(CONFIG, lambda path: None), f"has no {CONFIG}"),
    (_instead(CONFIG, Path.mkdir), f"{CONFIG} is a directory"),
    (_instead(CONFIG, _loop), f"{CONFIG} is a link to nothing"),
    (_instead(CONFIG, _unreadable), f"{CONFIG} cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), OF_A_FILE)
def test_an_adapter_that_is_not_whole_is_refused_without_the_digests_of_a_run(
    saved: Path, whole: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    adapter = shutil.copytree(whole, tmp_path / "adapter")
    (adapter / BASE_FILE).unlink()
    damage(adapter)
    with pytest.raises(InputError, match=said) as found:
        load_adapted(str(saved), adapter)
    assert str(adapter) in str(found.value)
    assert len(str(found.value)) <= 500


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_config(lora_alpha=16), CONFIG),
        (_config(use_rslora=True), CONFIG),
        (_first(lambda tensor: tensor * 1.01), WEIGHTS),
        (_renamed("layers.0", "layers.7"), WEIGHTS),
        (_instead(WEIGHTS, lambda path: torch.save({}, path.with_name("adapter_model.bin"))), WEIGHTS),
    ],
)
def test_an_adapter_that_was_changed_since_a_run_saved_it_is_refused_before_the_base_is_loaded(
    saved: Path, whole: Path, tmp_path: Path, damage: Callable[[Path], Any], name: str
) -> None:
    adapter = shutil.copytree(whole, tmp_path / "adapter")
    damage(adapter)
    missing = str(tmp_path / "no-such-base")
    with pytest.raises(InputError, match=f"{name} is not as the run saved it"):
        load_adapted(missing, adapter)
    (adapter / BASE_FILE).unlink()
    with pytest.raises(InputError, match=r"no-such-base|its file|cannot be read"):
        load_adapted(missing, adapter)


def test_an_adapter_may_name_another_place_of_its_base(saved: Path, whole: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(whole, tmp_path / "adapter")
    _config(base_model_name_or_path="/moved/base", revision="main")(adapter)
    _, is_compared = load_adapted(str(saved), adapter)
    assert is_compared


@pytest.mark.parametrize(
    "damage",
    [
        _text(BASE_FILE, "{}"),
        _text(BASE_FILE, '{"digest": "1", "dtype": "nn"}'),
        _text(BASE_FILE, '{"digest": "1", "dtype": "float32", "adapter": [1]}'),
        _instead(BASE_FILE, Path.mkdir),
        _instead(BASE_FILE, _loop),
        _instead(BASE_FILE, _unreadable),
    ],
)
def test_what_a_run_says_of_the_base_is_not_passed_over(
    saved: Path, whole: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    adapter = shutil.copytree(whole, tmp_path / "adapter")
    damage(adapter)
    with pytest.raises(InputError, match=f"{BASE_FILE} cannot be read"):
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
