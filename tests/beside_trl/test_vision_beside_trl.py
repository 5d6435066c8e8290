"""Rows with images beside TRL's trainers: the ids of the prompts, gradients, losses and logged figures are the same.

The model is an Idefics3, because TRL needs the processor of the whole model, and those of the Qwen families and of
SmolVLM need torchvision, which this environment leaves out (`requirements.lock`).

TRL itself runs the script of one method in CI, and of the other one before a release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from conftest import needs_vllm
from datasets import Dataset
from pairs import CLIPS, assert_same_figures, assert_same_gradients, both, decided, shifted_engine
from peft import LoraConfig
from seeing import make_seeing_tokenizer, picture, save_seeing
from transformers import AutoImageProcessor, AutoModelForImageTextToText, Idefics3Processor

import lockstep
from lockstep.contract.protocol import Engine
from lockstep.images.prompts import ImagePrompts

trl = pytest.importorskip("trl", reason="TRL is not installed here")

FIELDS_OF_PAIRS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "num_iterations": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", "idefics3")


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    return shifted_engine(folder)


def processor_of(folder: str) -> Idefics3Processor:
    """What TRL's trainers read images with."""
    tokenizer = make_seeing_tokenizer("idefics3")
    tokenizer.pad_token = tokenizer.eos_token
    images = AutoImageProcessor.from_pretrained(folder)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)


def rows() -> Dataset:
    """Two questions. TRL takes messages whose contents are text, and a column of images."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"what is {i}"}], "image": picture(i, 16, 16)}
            for i in range(2)
        ]
    )


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_rows_with_images_give_the_gradients_and_figures_of_trl(
    method: str, folder: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's trainer makes the prompts with its own processor. Completions are found by the ids of these prompts.

    TRL bans placeholders from sampling and counts them in the softmax of its scores. Here they are banned on both
    sides. The ban is off in this test, so that both trainers score the same distribution.
    """
    monkeypatch.setattr(pairs, "_tokenizer", processor_of)
    monkeypatch.setattr(ImagePrompts, "banned_ids", ())
    fields = FIELDS_OF_PAIRS | (
        {"vllm_importance_sampling_mode": "token_truncate"} if method == "GRPO" else {}
    )
    arguments = {"train_dataset": rows(), "reward_funcs": decided}
    ours, theirs = both(method, folder, tmp_path, engine, fields, **arguments)
    assert_same_gradients(ours, theirs)
    assert any(
        "vision_model" in name and gradient.abs().max() > 0 for name, gradient in ours.gradients[0].items()
    )
    but = frozenset({"sampling/importance_sampling_ratio/"})
    assert_same_figures(ours, theirs, but=but, at_least={"loss", "grad_norm", "reward"} | CLIPS)


def vision_script(
    package: Any, method: str, folder: str, tmp_path: Path, *, adapted: bool = False, **fields: Any
) -> Any:
    """A script in the manner of TRL's vision tests: nothing but the package differs. All rows have several images."""
    base: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
    }
    base |= {"learning_rate": 0.1, "bf16": False, "use_cpu": True, "disable_tqdm": True, **fields}
    config = getattr(package, f"{method}Config")(output_dir=str(tmp_path), **base)
    given: dict[str, Any] = {"reward_funcs": by_length, "args": config, "train_dataset": many()}
    given["processing_class"] = processor_of(folder)
    if adapted:
        given["peft_config"] = LoraConfig(target_modules=["q_proj", "v_proj"])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    trainer = getattr(package, f"{method}Trainer")(model, **given)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] is not None
    return trainer, {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def many() -> Dataset:
    """Several images per prompt, as in TRL's test with several images."""
    prompt = [{"role": "user", "content": "what is it"}]
    return Dataset.from_list(
        [{"prompt": prompt, "images": [picture(i), picture(i + 50, 16, 16)]} for i in range(8)]
    )


GROUPS = {"num_generations": 2, "max_completion_length": 8}
VISION_TESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", GROUPS),
    "GRPO with a reference model": ("GRPO", {**GROUPS, "beta": 0.1}),
    "GRPO with importance sampling": ("GRPO", {**GROUPS, "num_iterations": 2, "steps_per_generation": 1}),
    "GRPO with an adapter": ("GRPO", {**GROUPS, "adapted": True}),
    "RLOO": ("RLOO", GROUPS),
    "RLOO with a reference model": ("RLOO", {**GROUPS, "beta": 0.1}),
    "RLOO with an adapter": ("RLOO", {**GROUPS, "adapted": True}),
    "Online DPO": ("OnlineDPO", {"max_new_tokens": 8, "max_length": 128}),
}


def cases() -> list[Any]:
    """One case per method, and the others, which CI runs with the long tests."""
    return [
        name if " with " not in name else pytest.param(name, marks=pytest.mark.long) for name in VISION_TESTS
    ]


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("name", cases())
def test_trls_vision_tests_pass_with_a_changed_import(name: str, folder: str, tmp_path: Path) -> None:
    method, fields = VISION_TESTS[name]
    trainer, moved = vision_script(lockstep, method, folder, tmp_path, **fields)
    assert moved == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.close()


@pytest.mark.parametrize(
    "name", [pytest.param("GRPO", marks=pytest.mark.long), pytest.param("RLOO", marks=pytest.mark.release)]
)
def test_the_same_script_runs_with_trl(name: str, folder: str, tmp_path: Path) -> None:
    method, fields = VISION_TESTS[name]
    _, moved = vision_script(trl, method, folder, tmp_path, **fields)
    assert moved
