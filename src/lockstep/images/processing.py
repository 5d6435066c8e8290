"""Runs a model's image processor on one picture, and finds the ids that stand for the picture in a prompt.

There are two classes; the family of the model decides. The image processor runs nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.images.pictures import Picture
from lockstep.tokens.arrays import Ids, whole_numbers


class InPatches:
    """Pictures of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one placeholder per square of merged patches.

    Args:
        processor: the model's image processor.
        config: the model's config.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig) -> None:
        whole: Any = config
        self._processor, self._placeholder = processor, int(whole.image_token_id)
        self._merged = int(whole.vision_config.spatial_merge_size) ** 2

    def __call__(self, image: Image.Image) -> Picture:
        """The picture, with the ids that stand for it.

        Raises:
            InputError: the processor cannot use the image.
        """
        found = _processed(self._processor, image)
        grid = found["image_grid_thw"][0]
        tokens = int(grid.prod()) // self._merged
        ids = whole_numbers(np.full(tokens, self._placeholder))
        return Picture(found["pixel_values"].float().contiguous(), grid, tokens, ids)


class InTiles:
    """Pictures of SmolVLM and Idefics3: tiles of one size, and the whole picture in small as the last tile.

    Each tile has an equal number of placeholders. Marks before them name the row and the column of the tile.

    Args:
        processor: the model's image processor.
        config: the model's config.
        tokenizer: its vocabulary contains the marks.

    Raises:
        InputError: the tokenizer lacks a mark.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        whole: Any = config
        self._processor, self._placeholder, self._tokenizer = processor, int(whole.image_token_id), tokenizer
        self._patch, self._scale = int(whole.vision_config.patch_size), int(whole.scale_factor)
        self._around, self._whole = self._mark("<fake_token_around_image>"), self._mark("<global-img>")
        # The newlines stand between marks, where a tokenizer reads them alone.
        self._newline, self._newlines = self._text("\n"), self._text("\n\n")

    def __call__(self, image: Image.Image) -> Picture:
        """The picture, with the ids that stand for it.

        Raises:
            InputError: the processor cannot use the image, or the model would take a part of it for padding.
        """
        found = _processed(self._processor, image, return_row_col_info=True)
        pixels = found["pixel_values"][0].float().contiguous()
        padded = "pixel_attention_mask" in found and not bool(found["pixel_attention_mask"].all())
        if padded or not bool(pixels.flatten(1).any(1).all()):
            raise InputError(
                f"a picture of {image.width} × {image.height} pixels has a tile with padding, or one whose values are all 0, which "
                "the model takes for padding: use the model's own preprocessor_config.json (docs/guides/images.md)"
            )
        rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
        height, width = (side // self._patch for side in pixels.shape[-2:])
        parts = [self._placeholder] * (height * width // self._scale**2)
        ids = self._stand_in(rows, columns, parts)
        return Picture(pixels, torch.tensor([1, rows, columns]), len(parts) * len(pixels), ids)

    def _stand_in(self, rows: int, columns: int, parts: list[int]) -> Ids:
        """The ids of a picture of `rows` × `columns` tiles and the whole picture after them, with `parts` for each tile."""
        ids: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += [self._around, self._mark(f"<row_{row}_col_{column}>"), *parts]
            ids += self._newline if row < rows else self._newlines
        return whole_numbers([*ids, self._around, self._whole, *parts, self._around])

    def _mark(self, mark: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(mark)
        if not isinstance(found, int) or found == self._tokenizer.unk_token_id:
            raise InputError(
                f"the tokenizer has no token {mark}, which stands beside pictures: use the tokenizer that came with the model, or "
                "smaller pictures (`size` in preprocessor_config.json)"
            )
        return found

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _processed(processor: Any, image: Image.Image, **more: Any) -> Any:
    try:
        return processor(images=[image], return_tensors="pt", **more)
    except ValueError as error:
        raise InputError(f"a picture of {image.width} × {image.height} pixels cannot be used: {error}") from error
