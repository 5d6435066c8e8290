"""Names become models; an error names what is not a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import save_model

from lockstep.errors import InputError
from lockstep.models.packaged import packaged_model_dir
from lockstep.models.policy import load_policy
from lockstep.models.resolve import resolve_model


def test_directories_and_hub_ids_resolve(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model("someone/some-model") == "someone/some-model"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "a/b/c"])
def test_a_path_that_is_no_directory_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        resolve_model(name)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot load a causal language model"):
        load_policy(str(tmp_path))


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="quantised"):
        load_policy(str(folder))


@pytest.mark.real_model
def test_the_packaged_model_answers() -> None:
    from transformers import AutoTokenizer

    folder = str(packaged_model_dir())
    assert resolve_model("SmolLM2-135M-Instruct") == folder
    model, tokenizer = load_policy(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("pass", "False"),
        ("torch.set_float32_matmul_precision('high')", "True"),
        ("torch.set_float32_matmul_precision('highest')", "False"),
        # The one of transformers' `tf32: true`. After it, `torch.get_float32_matmul_precision` raises an error.
        ("torch.backends.fp32_precision = 'tf32'", "True"),
    ],
)
def test_whether_a_gpu_rounds_float32_is_known_after_every_setting(setting: str, expected: str) -> None:
    code = f"import torch; from lockstep.devices import cuda_rounds_float32; {setting}; print(cuda_rounds_float32())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == expected
