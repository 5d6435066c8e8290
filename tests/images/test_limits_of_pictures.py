"""Limits on the sizes of pictures and on their number per prompt, and the fields that set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from looking import gaps, look
from seeing import make_seeing, make_seeing_tokenizer, picture, save_seeing

from lockstep import GRPOConfig
from lockstep.errors import InputError
from lockstep.images.prompts import ImagePrompts, PictureLimits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A directory with a model by family. The smallest picture has 64 pixels, and a tile 256."""
    base = tmp_path_factory.mktemp("models")
    return {family: save_seeing(base / family, family) for family in ("qwen2_5_vl", "smolvlm")}


def reader(folders: dict[str, str], family: str, *limits: int | None) -> ImagePrompts:
    model, tokenizer = make_seeing(family), make_seeing_tokenizer(family)
    return ImagePrompts(model, tokenizer, folders[family], limits=PictureLimits(*limits))


def row(*pictures: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "see"}], "images": list(pictures)}


@pytest.mark.parametrize(
    ("limits", "size", "area"),
    [
        ((None, None), (32, 32), 1024),
        ((None, 256), (32, 32), 256),
        ((None, 300), (64, 64), 256),
        ((None, 4096), (64, 64), 4096),
        ((512, None), (8, 8), 576),
        ((64, 64), (32, 32), 64),
        # The model's own upper limit is 1024: a smallest size above it moves it.
        ((2048, None), (32, 32), 2304),
    ],
)
def test_areas_of_pictures_in_patches_stay_within_the_limits(
    limits: tuple[int | None, int | None], size: tuple[int, int], area: int, folders: dict[str, str]
) -> None:
    ids, shown = reader(folders, "qwen2_5_vl", *limits).read(row(picture(0, *size)))
    assert shown
    # A patch has 4 × 4 pixels, and a placeholder stands for four patches.
    assert len(shown.pictures[0].pixel_values) * 16 == area
    assert (ids == shown.placeholder).sum() == area / 64


@pytest.mark.parametrize(("most", "tiles"), [(None, 4), (1024, 4), (1023, 0), (256, 0), (9999, 4)])
def test_the_tiles_of_a_picture_stay_within_the_limit(
    most: int | None, tiles: int, folders: dict[str, str]
) -> None:
    """Beside them there is the whole picture in one tile. A larger limit than the model's own changes nothing."""
    _, shown = reader(folders, "smolvlm", None, most).read(row(picture(0, 64, 64)))
    assert shown
    assert len(shown.pictures[0].pixel_values) == tiles + 1


@pytest.mark.parametrize(
    ("family", "limits", "message"),
    [
        ("qwen2_5_vl", (None, 63), "max_pixels=63, and the smallest picture of this model has 64"),
        ("smolvlm", (None, 255), "max_pixels=255, and one tile of this model has 256"),
        ("smolvlm", (64, None), "min_pixels is not supported for models that cut pictures into tiles"),
        ("smolvlm", (64, 1024), "min_pixels is not supported for models that cut pictures into tiles"),
    ],
)
def test_limits_that_the_model_cannot_keep_are_refused(
    family: str, limits: tuple[int | None, int | None], message: str, folders: dict[str, str]
) -> None:
    with pytest.raises(InputError, match=message):
        reader(folders, family, *limits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_pixels": 0}, "max_pixels=0; it must be 1 or more"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 is above max_pixels=8"),
        ({"limit_mm_per_prompt": {"image": 0}}, "must be .*N of 1 or more"),
        ({"limit_mm_per_prompt": {"image": True}}, "must be .*N of 1 or more"),
        ({"limit_mm_per_prompt": {"video": 1}}, "only pictures are supported"),
        ({"limit_mm_per_prompt": {"image": 1, "video": 1}}, "only pictures are supported"),
        ({"limit_mm_per_prompt": {}}, "only pictures are supported"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        GRPOConfig(output_dir=str(tmp_path), **fields)


def test_a_run_keeps_the_limits_of_its_config(folders: dict[str, str], tmp_path: Path) -> None:
    rows = [row(picture(i, 32, 32)) for i in range(4)]
    # As on the command line.
    limits = {"max_pixels": 256, "limit_mm_per_prompt": '{"image": 1}'}
    trainer = look(folders["qwen2_5_vl"], tmp_path, rows, use_vllm=False, max_steps=1, **limits)
    trainer.train()
    assert max(gaps(trainer)) < 1e-3
    assert {p.pictures.pictures[0].tokens for p in trainer.loop.prompts if p.pictures} == {4}
    with pytest.raises(InputError, match=r"prompt train/1: 2 pictures, and limit_mm_per_prompt allows 1"):
        look(
            folders["qwen2_5_vl"],
            tmp_path,
            [rows[0], row(picture(0), picture(1))] * 2,
            use_vllm=False,
            **limits,
        )
