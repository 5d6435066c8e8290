"""Trainers of the tiny vision-language models, and the faults that all engines' tests put into runs with pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from PIL import Image
from seeing import make_seeing, make_seeing_tokenizer, mixed_rows, picture
from transformers import AutoConfig

import lockstep
from lockstep.errors import ProofError
from lockstep.images.packs import PackPictures
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.images.prompts import ImagePrompts
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.run.trainers.online import OnlineTrainer


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) % 3 + ids[0] % 5) for ids in completion_ids]


def same_grid_rows(*, pictures: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """Four rows with the same text and pictures of the same size: their ids are equal, only pixels differ."""
    prompt = [{"role": "user", "content": "what is it"}]
    return [
        {"prompt": prompt, "images": [picture(seed + 10 * i + j) for j in range(pictures)]} for i in range(4)
    ]


def look(model: Any, folder: Path, rows: list[dict[str, Any]] | None = None, **given: Any) -> GRPOTrainer:
    """A GRPO trainer on rows with pictures, in fp32."""
    names = (
        "engine",
        "peft_config",
        "quantization_config",
        "tools",
        "callbacks",
        "environment_factory",
        "rollout_func",
        "agent",
        "processing_class",
    )
    arguments = {name: given.pop(name) for name in names if name in given}
    reward = given.pop("reward_funcs", by_length)
    base = {
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 8,
    }
    base |= {"bf16": False, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": []}
    config = lockstep.GRPOConfig(
        output_dir=str(folder / "run"), **{**base, "learning_rate": 1e-3, "seed": 3, **given}
    )
    data = Dataset.from_list(rows if rows is not None else mixed_rows())
    return lockstep.GRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=data, **arguments)


def adapter(family: str, where: str) -> peft.LoraConfig:
    """LoRA on the attention of the language part, or on all linear layers."""
    part = "language_model" if "qwen" in family else "text_model"
    targets = rf".*{part}.*\.(q_proj|v_proj)" if where == "language" else "all-linear"
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")


def tower_of(family: str, name: str) -> bool:
    """Whether a parameter belongs to the vision tower or its projector."""
    return any(
        f".{part}." in name for part in (["visual"] if "qwen" in family else ["vision_model", "connector"])
    )


def gaps(trainer: OnlineTrainer) -> list[float]:
    return [
        entry["parity/max_abs_gap"] for entry in trainer.state.log_history if "parity/max_abs_gap" in entry
    ]


def learn_two_steps(trainer: OnlineTrainer) -> None:
    """Train. Both steps are proven, with the largest gap of the tests of text."""
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < 1e-3


def broken(model: Any, folder: Path, *rows: Any, **given: Any) -> str:
    """The name of the proof that ends a run."""
    with pytest.raises(ProofError) as found:
        look(model, folder, *rows, **given).train()
    return found.value.check


def other_pixels(pictures: PromptPictures) -> PromptPictures:
    """Pictures of the same grid with other pixels, under the same digest as the true ones."""
    changed = []
    for own in pictures.pictures:
        other = replace(own, pixel_values=own.pixel_values.flip(-1))
        other.__dict__["digest"] = own.digest
        changed.append(other)
    return replace(pictures, pictures=tuple(changed))


def resized_rows(seed: int = 0) -> list[dict[str, Any]]:
    """Rows like those of `same_grid_rows`, with pictures that the image processor must resize."""
    prompt = [{"role": "user", "content": "what is it"}]
    return [{"prompt": prompt, "image": picture(seed + i, 29, 19)} for i in range(4)]


def another_resize(folder: str, rows: list[dict[str, Any]]) -> Callable[[PromptPictures], PromptPictures]:
    """The pictures of `rows` as another resize makes them, of the same size and under the digests of the true ones."""
    family = AutoConfig.from_pretrained(folder).model_type
    true, other = (ImagePrompts(make_seeing(family), make_seeing_tokenizer(family), folder) for _ in range(2))
    other.processor.resample = Image.Resampling.NEAREST
    known: dict[str, Picture] = {}
    for row in rows:
        for own, changed in zip(*(reader.read(row)[1].pictures for reader in (true, other)), strict=True):
            for one, two in zip((own, *own.pieces), (changed, *changed.pieces), strict=True):
                assert one.grid.tolist() == two.grid.tolist()
                two.__dict__["digest"] = one.digest
                known[one.digest] = two

    def changed(shown: PromptPictures) -> PromptPictures:
        return replace(shown, pictures=tuple(known[p.digest] for p in shown.pictures))

    return changed


def expanded_twice(ids: list[int], shown: PromptPictures) -> list[int]:
    """The ids of a prompt whose placeholders are repeated once more, as vLLM's own processor would do it."""
    return [i for token in ids for i in ([token, token] if token == shown.placeholder else [token])]


def wrong_order(pictures: PromptPictures) -> PromptPictures:
    """The pictures of a prompt from the last to the first."""
    return replace(pictures, pictures=pictures.pictures[::-1])


def leave_pixels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer scores text and placeholders only (Online DPO in public trainers)."""
    monkeypatch.setattr(PackPictures, "arguments", lambda *given: {})


def count_positions_in_one_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer counts tokens, as a model of transformers does without `mm_token_type_ids`."""
    from lockstep.images import packs

    def flat(shown: Any, nodes: Any, size: int) -> torch.Tensor:
        found = torch.zeros(3, size, dtype=torch.long)
        for own in nodes:
            found[:, own] = torch.arange(len(own))
        return found

    monkeypatch.setattr(packs, "position_ids", flat)


IN_THE_TRAINER = {
    "pixels left out in the trainer": leave_pixels_out,
    "positions in one dimension": count_positions_in_one_dimension,
}
