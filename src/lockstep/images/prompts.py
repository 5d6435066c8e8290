"""Makes the ids and the pictures of a prompt, once per prompt.

The chat template writes one placeholder per picture. Here it gives way to the ids that stand for the picture
(`images/processing.py`). The processor of the whole model is not used: it would tokenize the text a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.images.limits import NO_LIMITS, PictureLimits
from lockstep.images.pictures import Picture, PromptPictures, expanded
from lockstep.images.processing import InPatches, InTiles
from lockstep.images.reading import images_of_row
from lockstep.models.vision import reads_tiles
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import render_prompt, template_of


class ImagePrompts:
    """Reads prompts with pictures for one model.

    Args:
        model: the policy, of a family that reads pictures (`models/vision.py`). Its function for positions is called once per
            prompt with pictures.
        path: directory or hub id with the model's image processor.
        chat_template_kwargs: further arguments of the chat template.
        limits: limits on the pictures.

    Raises:
        InputError: the model has no image processor, the tokenizer lacks an id that stands beside pictures, or a limit does not
            fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        chat_template_kwargs: dict[str, Any] | None = None,
        limits: PictureLimits = NO_LIMITS,
    ) -> None:
        config: Any = model.config
        try:
            processor = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"model {path} comes without a usable image processor: {error}") from error
        limits.set_sizes(processor, config)
        self._model, self._tokenizer, self._limits = model, tokenizer, limits
        self._template = template_of(tokenizer, chat_template_kwargs)
        self._placeholder = int(config.image_token_id)
        kind = InTiles(processor, config, tokenizer) if reads_tiles(config) else InPatches(processor, config)
        self._process: InPatches | InTiles = kind

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that must not be sampled: an engine would put a picture, or a part of one, in the place of such a token."""
        known = (getattr(self._model.config, name, None) for name in ("image_token_id", "video_token_id"))
        return tuple(sorted({int(token) for token in known if token is not None}))

    def read(self, row: Mapping[str, Any]) -> tuple[Ids, PromptPictures | None]:
        """The ids of a row's prompt with their placeholders repeated, and its pictures; None: the row has none.

        Raises:
            InputError: a picture cannot be opened or processed, there are too many, the prompt cannot be tokenized, or its text
                has not one placeholder per picture.
        """
        prompt, images = images_of_row(row)
        self._limits.check_count(len(images))
        ids = whole_numbers(render_prompt(prompt, self._tokenizer, template=self._template, images=True))
        placeholders = int((ids == self._placeholder).sum())
        if placeholders != len(images):
            raise InputError(
                f"the prompt has {placeholders} placeholders for {len(images)} pictures: the chat template does not write one per "
                "image part, or a prompt of plain text does not contain them"
            )
        if not images:
            return ids, None
        processed = [self._process(image) for image in images]
        pictures = tuple(picture for picture, _ in processed)
        ids, places = expanded(ids, self._placeholder, [own for _, own in processed])
        if pictures[0].in_tiles:
            return ids, PromptPictures(pictures, places, self._placeholder)
        return ids, PromptPictures(pictures, places, self._placeholder, *self._positions(ids, pictures))

    @torch.no_grad()
    def _positions(self, ids: Ids, pictures: tuple[Picture, ...]) -> tuple[Any, int]:
        """Position ids of a prompt, and what is added to the index of the tokens after it.

        Raises:
            InputError: two pictures stand side by side. The model's function would take them for one.
        """
        parts = ids == self._placeholder
        if np.count_nonzero(parts[1:] & ~parts[:-1]) + parts[0] != len(pictures):
            raise InputError(
                "two pictures stand side by side, without any text between them: write the model's marks around each picture, as "
                "its chat template does, or a space between them"
            )
        row = torch.tensor(ids)[None]
        grids = torch.stack([picture.grid for picture in pictures])
        marks = (row == self._placeholder).int()
        positions, delta = self._model.base_model.get_rope_index(row, mm_token_type_ids=marks, image_grid_thw=grids)
        return positions[:, 0].numpy(), int(delta)
