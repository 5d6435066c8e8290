"""Makes the ids and the pictures of a prompt: the model's image processor runs here, once per prompt, and nowhere else.

The chat template writes one placeholder per picture. It is repeated here, in ids, as often as the picture has tokens. The processor
of the whole model is not used: it would tokenize the text a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.images.pictures import Picture, PromptPictures, expanded
from lockstep.images.reading import images_of_row
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import render_prompt, template_of


class ImagePrompts:
    """Reads prompts with pictures for one model.

    Args:
        model: the policy, of a family that reads pictures (`models/vision.py`). Its function for positions is called once per
            prompt with pictures.
        path: directory or hub id with the model's image processor.
        chat_template_kwargs: further arguments of the chat template.

    Raises:
        InputError: the model has no image processor.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        config: Any = model.config
        try:
            self._processor = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"model {path} comes without a usable image processor: {error}") from error
        self._model, self._tokenizer = model, tokenizer
        self._template = template_of(tokenizer, chat_template_kwargs)
        self._placeholder = int(config.image_token_id)
        self._merged = int(config.vision_config.spatial_merge_size) ** 2

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that must not be sampled: an engine would put a picture, or a part of one, in the place of such a token."""
        config: Any = self._model.config
        return tuple(sorted({int(config.image_token_id), int(config.video_token_id)}))

    def read(self, row: Mapping[str, Any]) -> tuple[Ids, PromptPictures | None]:
        """The ids of a row's prompt with their placeholders repeated, and its pictures; None: the row has none.

        Raises:
            InputError: a picture cannot be opened or processed, the prompt cannot be tokenized, or its text has not one
                placeholder per picture.
        """
        prompt, images = images_of_row(row)
        ids = whole_numbers(render_prompt(prompt, self._tokenizer, template=self._template, images=True))
        placeholders = int((ids == self._placeholder).sum())
        if placeholders != len(images):
            raise InputError(
                f"the prompt has {placeholders} placeholders for {len(images)} pictures: the chat template does not write one per "
                "image part, or a prompt of plain text does not contain them"
            )
        if not images:
            return ids, None
        pictures = tuple(self._processed(image) for image in images)
        ids, starts = expanded(ids, self._placeholder, pictures)
        positions, delta = self._positions(ids, pictures)
        return ids, PromptPictures(pictures, starts, self._placeholder, positions, delta)

    def _processed(self, image: Image.Image) -> Picture:
        try:
            found = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise InputError(f"a picture of {image.width} × {image.height} pixels cannot be used: {error}") from error
        grid = found["image_grid_thw"][0]
        return Picture(found["pixel_values"].float().contiguous(), grid, int(grid.prod()) // self._merged)

    @torch.no_grad()
    def _positions(self, ids: Ids, pictures: tuple[Picture, ...]) -> tuple[Any, int]:
        """Position ids of a prompt, and what is added to the index of the tokens after it."""
        row = torch.tensor(ids)[None]
        grids = torch.stack([picture.grid for picture in pictures])
        marks = (row == self._placeholder).int()
        positions, delta = self._model.base_model.get_rope_index(row, mm_token_type_ids=marks, image_grid_thw=grids)
        return positions[:, 0].numpy(), int(delta)
