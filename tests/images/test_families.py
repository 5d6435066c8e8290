"""Each family on the transformers engine: two proven steps. And how families with tiles write a picture into a prompt.

The steps of Idefics3 and Qwen2-VL are tested before a release. In CI, `test_vision_beside_trl.py` trains Idefics3, and
`test_families_on_vllm.py` trains Qwen2-VL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from looking import (
    another_resize,
    broken,
    gaps,
    leave_pixels_out,
    look,
    other_pixels,
    resized_rows,
    same_grid_rows,
)
from PIL import Image
from portions import portion
from seeing import TILE, make_seeing, make_seeing_tokenizer, picture, save_seeing
from transformers import AutoImageProcessor, Idefics3Processor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from lockstep.engines import transformers_engine
from lockstep.errors import InputError
from lockstep.images import prompts
from lockstep.images.packs import model_inputs
from lockstep.images.prompts import ImagePrompts
from lockstep.run.trainers.methods import GRPOTrainer

LIMIT = 1e-3
# The tests of the other files are of Qwen2.5-VL.
FAMILIES = ["qwen2_vl", "qwen3_vl", "smolvlm", "idefics3"]


@pytest.fixture(
    scope="module", params=portion(FAMILIES, lambda family: family not in ("idefics3", "qwen2_vl"))
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", family)


def train(folder: str, tmp_path: Path, *rows: Any, **given: Any) -> GRPOTrainer:
    trainer = look(folder, tmp_path, *rows, use_vllm=False, **given)
    trainer.train()
    return trainer


def test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns(
    family: str, folder: str, tmp_path: Path
) -> None:
    before = dict(make_seeing(family).named_parameters())
    trainer = train(folder, tmp_path, beta=0.1)
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    assert all(not torch.equal(p.cpu(), before[name]) for name, p in trainer.model.named_parameters())


def test_pixels_left_out_in_the_trainer_are_found_by_the_gap(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pixels_out(monkeypatch)
    assert broken(folder, tmp_path, use_vllm=False) == "gap"


def test_other_pixels_of_the_same_grid_are_found_by_the_gap(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(shown: Any, ids: torch.Tensor) -> Any:
        return model_inputs([other_pixels(pictures) for pictures in shown], ids)

    monkeypatch.setattr(transformers_engine, "model_inputs", swapped)
    assert broken(folder, tmp_path, same_grid_rows(), use_vllm=False) == "gap"


def test_another_resize_in_the_engine_is_found_by_the_gap(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = resized_rows()
    other = another_resize(folder, rows)
    monkeypatch.setattr(
        transformers_engine, "model_inputs", lambda shown, ids: model_inputs([other(p) for p in shown], ids)
    )
    assert broken(folder, tmp_path, rows, use_vllm=False) == "gap"


def reader_of(folder: str, family: str) -> ImagePrompts:
    return ImagePrompts(make_seeing(family), make_seeing_tokenizer(family), folder)


def row_with(image: Image.Image) -> dict[str, Any]:
    """A row whose picture stands between a letter and a new line."""
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "\nb"}]
    return {"prompt": [{"role": "user", "content": content}], "image": image}


def use_processor(monkeypatch: pytest.MonkeyPatch, folder: str, **changes: Any) -> Any:
    """The image processor of a directory with changed settings, for every reader that is made afterwards."""
    processor = AutoImageProcessor.from_pretrained(folder)
    for name, value in changes.items():
        setattr(processor, name, value)
    monkeypatch.setattr(prompts.AutoImageProcessor, "from_pretrained", lambda path, **more: processor)
    return processor


def test_a_processor_that_a_script_gives_is_used_with_its_tokenizer_as_it_was(tmp_path: Path) -> None:
    """As in TRL's scripts. The model's own image processor would cut the pictures into tiles."""
    folder, tokenizer = save_seeing(tmp_path / "model", "idefics3"), make_seeing_tokenizer("idefics3")
    images, template = AutoImageProcessor.from_pretrained(folder), tokenizer.chat_template
    images.do_image_splitting, tokenizer.chat_template = False, None
    given = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    trainer = train(folder, tmp_path, processing_class=given, max_steps=1, max_pixels=TILE**2)
    shown = [p.pictures for p in trainer.loop.prompts if p.pictures]
    assert {len(picture.pixel_values) for own in shown for picture in own.pictures} == {1}
    assert max(gaps(trainer)) < LIMIT
    assert (images.size["longest_edge"], tokenizer.chat_template) == (2 * TILE, None)
    without = Dataset.from_list([{"prompt": "x"}])
    with pytest.raises(
        InputError, match=r"processing_class is a Idefics3ImageProcessor.*a processor with a tokenizer"
    ):
        GRPOTrainer(folder, [], None, without, processing_class=images)


@pytest.mark.parametrize("name", ["llava", "llava_next", "gemma3", "idefics2", "paligemma"])
def test_other_families_are_refused_by_name_before_a_model_is_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(
        InputError, match=rf"images are not supported for this model \({name}\); .*qwen2_5_vl, qwen3_vl"
    ):
        look(str(tmp_path), tmp_path, same_grid_rows(), use_vllm=False)


# Pictures of four tiles, of two tiles above each other, and of two tiles side by side.
SIZES = [(32, 32), (16, 32), (32, 16)]


@pytest.mark.parametrize("size", SIZES)
def test_ids_and_pixels_of_tiles_are_those_of_the_processor_of_the_whole_model(
    size: tuple[int, int], tmp_path: Path
) -> None:
    """Of Idefics3. SmolVLM's processor needs a package for numbers in words, and torchvision for videos."""
    folder, tokenizer = save_seeing(tmp_path, "idefics3"), make_seeing_tokenizer("idefics3")
    row = row_with(picture(0, *size))
    ids, shown = reader_of(folder, "idefics3").read(row)
    assert shown
    whole = Idefics3Processor(AutoImageProcessor.from_pretrained(folder), tokenizer, image_seq_len=4)
    due = whole(text="<|user|>a<image>\nb<|end|><|assistant|>", images=[row["image"]], return_tensors="pt")
    assert ids.tolist() == due["input_ids"][0].tolist()
    assert torch.equal(shown.pictures[0].pixel_values, due["pixel_values"][0])
    assert due["pixel_attention_mask"].all()


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_ids_of_tiles_are_those_of_smolvlms_own_text(
    size: tuple[int, int], splits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokenizer = save_seeing(tmp_path, "smolvlm"), make_seeing_tokenizer("smolvlm")
    use_processor(monkeypatch, folder, do_image_splitting=splits)
    ids, shown = reader_of(folder, "smolvlm").read(row_with(picture(0, *size)))
    assert shown
    (own,) = shown.pictures
    _, rows, columns = own.grid.tolist()
    assert (rows, columns) == ((size[1] // 16, size[0] // 16) if splits else (0, 0))
    written = get_image_prompt_string(
        rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    due = tokenizer(f"<|user|>a{written}\nb<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert ids.tolist() == due
    assert len(own.pixel_values) == rows * columns + 1
    assert own.tokens == 4 * len(own.pixel_values) == len(shown.places)


def test_a_tile_that_the_model_would_take_for_padding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_seeing(tmp_path, "smolvlm")
    use_processor(monkeypatch, folder, do_normalize=False)
    reader = reader_of(folder, "smolvlm")
    reader.read(row_with(picture(0)))
    with pytest.raises(InputError, match="takes for padding"):
        reader.read(row_with(Image.new("RGB", (16, 16))))


def test_a_tokenizer_without_the_marks_of_tiles_is_refused(tmp_path: Path) -> None:
    path = save_seeing(tmp_path / "seeing", "smolvlm")
    with pytest.raises(InputError, match="no token <fake_token_around_image>"):
        ImagePrompts(make_seeing("smolvlm"), make_seeing_tokenizer("qwen3_vl"), path)
