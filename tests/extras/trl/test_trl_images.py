"""TRL's own trainer on our engines with images: the engine computes with the pixels that TRL's trainer computes with.

The model is an Idefics3, because the processors of the other families need torchvision, which this environment leaves
out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import start
from datasets import Dataset
from seeing import make_seeing_tokenizer, picture, save_seeing
from transformers import AutoImageProcessor, AutoModelForImageTextToText, Idefics3Processor

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError, LockstepError
from lockstep.extras.trl.trl_inputs import TrlPictures
from lockstep.extras.trl.vllm_generation import LockstepGeneration
from lockstep.rollouts.wire import decode, encode

trl = pytest.importorskip("trl", reason="TRL is not installed here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", "idefics3")


def processor_of(folder: str) -> Idefics3Processor:
    tokenizer = make_seeing_tokenizer("idefics3")
    tokenizer.pad_token = tokenizer.eos_token
    images = AutoImageProcessor.from_pretrained(folder)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def test_trls_trainer_learns_from_images(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl.trainer.grpo_trainer

    seen: list[list[int]] = []
    engine: Any = start("transformers", folder)
    sample = engine.generate

    def counted(requests: Any, *rest: Any) -> Any:
        seen.append([len(r.pictures.pictures) for r in requests])
        return sample(requests, *rest)

    monkeypatch.setattr(engine, "generate", counted)
    monkeypatch.setattr(
        trl.trainer.grpo_trainer, "VLLMGeneration", partial(LockstepGeneration, engine=engine)
    )
    prompt = [{"role": "user", "content": "what is it"}]
    rows = [
        {"prompt": prompt, "images": [picture(i), picture(i + 50, 16, 16)][: 1 + i % 2]} for i in range(8)
    ]
    fields: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2}
    fields |= {"max_completion_length": 6, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none"}
    fields |= {"bf16": False, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "use_vllm": True}
    trainer = trl.GRPOTrainer(
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=by_length,
        args=trl.GRPOConfig(output_dir=str(tmp_path), vllm_mode="colocate", **fields),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor_of(folder),
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert {count for counts in seen for count in counts} == {1, 2}
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    # TRL's own measure, from its forward with its own pixels, over all tokens of a step.
    assert len(logs) == 2
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in logs)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert any("vision_model" in name for name in moved)
    assert trainer.vllm_generation.proof.push.version == 2


def test_images_that_are_not_those_of_the_ids_are_refused(folder: str) -> None:
    engine: Engine = start("transformers", folder)
    processor = processor_of(folder)
    generation = LockstepGeneration(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        accelerator=Accelerator(cpu=True),
        processing_class=processor,
        engine=engine,
    )
    with pytest.raises(
        InputError, match="prompt 1 has 0 ids that stand for parts of images, and its 1 images have 20"
    ):
        generation.generate([[5, 6], [7, 8]], [None, [picture(0, 16, 16)]], 2)
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    with pytest.raises(InputError, match="prompt 0 has 1 ids"):
        generation.generate([[5, placeholder]], None, 2)


def test_each_picture_goes_to_the_rank_with_the_engine_once_and_unchanged(folder: str) -> None:
    processor = processor_of(folder)
    reader = TrlPictures(AutoModelForImageTextToText.from_pretrained(folder), processor)
    one, two = picture(0), picture(1, 16, 16)
    images = [[one, two], [one, two], None, [two]]
    mark = "<image>"
    prompts = [
        processor(text=mark * len(own or []) + "what", images=own)["input_ids"][0] if own else [5, 6]
        for own in images
    ]
    part = reader.part(prompts, images)
    assert len(part["pictures"]) == 2
    placed = reader.placed(decode(encode(part)))
    assert [ids.tolist() for ids, _ in placed] == [list(ids) for ids in prompts]
    assert not placed[2][1]
    shown = [own for _, own in placed if own]
    pixels = [
        processor.image_processor(images=[image], return_tensors="pt")["pixel_values"][0]
        for image in (one, two)
    ]
    for own, expected in zip(shown, (pixels, pixels, pixels[1:]), strict=True):
        assert all(
            torch.equal(p.pixel_values, found) for p, found in zip(own.pictures, expected, strict=True)
        )
    (first, _) = part["pictures"].values()
    first["pixel_values"] = first["pixel_values"] + 1
    with pytest.raises(LockstepError, match="a picture changed on its way"):
        reader.placed(part)
