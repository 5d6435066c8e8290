"""Makes the ids and the pictures of a prompt, once per prompt, and finds the places of pictures in a whole conversation.

The chat template writes one placeholder per picture. It gives way to the ids that stand for the picture (`images/processing.py`,
`tokens/picture_ids.py`). The processor of the whole model is not used: it would tokenize the text a second time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError, ProofError
from lockstep.images.limits import NO_LIMITS, PictureLimits
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.images.processing import InPatches, InTiles
from lockstep.images.reading import check_sizes, images_of_row, opened, parts_of_row, with_fetched, with_pictures
from lockstep.images.urls import NO_URLS, ImageUrls, is_url
from lockstep.model_files import load_files
from lockstep.models.vision import reads_tiles
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import render_prompt, template_of
from lockstep.tokens.picture_ids import with_picture_ids

# Makes the ids of a row's prompt.
IdsOf = Callable[[Mapping[str, Any]], Sequence[int] | Ids]


class ImagePrompts:
    """Reads prompts with pictures for one model.

    Args:
        model: the policy, of a family that reads pictures (`models/vision.py`). Its function for positions is called once per
            prompt with pictures.
        path: directory or hub id with the model's image processor.
        chat_template_kwargs: further arguments of the chat template.
        limits: limits on the pictures.
        urls: fetches pictures that are given by their URLs.
        processor: the image processor; None: the one in `path`.

    Raises:
        InputError: the model has no image processor, the tokenizer lacks an id that stands beside pictures, or a limit does not
            fit the model.

    Attributes:
        processor: the image processor, with the limits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        chat_template_kwargs: dict[str, Any] | None = None,
        limits: PictureLimits = NO_LIMITS,
        urls: ImageUrls = NO_URLS,
        processor: Any = None,
    ) -> None:
        config: Any = model.config
        try:
            # The limits are set on it.
            processor = load_files(AutoImageProcessor, path) if processor is None else copy.deepcopy(processor)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"model {path} comes without a usable image processor: {error}") from error
        limits.set_sizes(processor, config)
        self._model, self._tokenizer, self._limits, self._urls = model, tokenizer, limits, urls
        self.processor = processor
        self._placeholder = int(config.image_token_id)
        self._template = template_of(tokenizer, chat_template_kwargs, self._placeholder)
        kind = InTiles(processor, config, tokenizer) if reads_tiles(config) else InPatches(processor, config)
        self._process: InPatches | InTiles = kind

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that must not be sampled: an engine would put a picture, or a part of one, in the place of such a token."""
        known = (getattr(self._model.config, name, None) for name in ("image_token_id", "video_token_id"))
        return tuple(sorted({int(token) for token in known if token is not None}))

    @property
    def placeholder(self) -> int:
        """The id that stands for a part of a picture."""
        return self._placeholder

    def picture(self, image: Image.Image) -> Picture:
        """An opened image, processed. Any thread may call it.

        Raises:
            InputError: the processor cannot use it.
        """
        return self._process(image)

    def fetched(self, images: Sequence[Any]) -> list[Any]:
        """Images that are read together, each URL with its file in its place, as a `data:` URL. Any thread may call it.

        Raises:
            InputError: a URL is not allowed, or cannot be fetched; or the pictures are too large together.
        """
        found = [self._urls.fetch(image) if is_url(image) else image for image in images]
        check_sizes(found)
        return found

    def opened_pictures(self, images: Sequence[Any]) -> Iterator[tuple[Image.Image, Picture]]:
        """Each image in RGB, and as the model takes it; one is decoded at a time. Any thread may call it.

        Raises:
            InputError: an image cannot be fetched or decoded, or the processor cannot use it.
        """
        for file in self.fetched(images):
            found = opened(file)
            yield found, self.picture(found)

    def pictures(self, images: Sequence[Any]) -> list[Picture]:
        """Images that are read together, as the model takes them. Any thread may call it.

        Raises:
            InputError: an image cannot be fetched or decoded, or the processor cannot use it.
        """
        return [picture for _, picture in self.opened_pictures(images)]

    def files_and_pictures(self, urls: Sequence[str]) -> list[tuple[str, Picture]]:
        """The file of each URL as a `data:` URL, and the image as the model takes it. Any thread may call it.

        Raises:
            InputError: an image cannot be fetched or decoded, or the processor cannot use it.
        """
        return [(file, self.picture(opened(file))) for file in self.fetched(urls)]

    def with_files(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row without URLs: the file of each has taken its place, as a `data:` URL.

        Raises:
            InputError: a URL is not allowed, or cannot be fetched.
        """
        return with_fetched(row, self._urls.fetch)

    def check_count(self, count: int) -> None:
        """Check the number of pictures of a prompt, or of a whole conversation.

        Raises:
            InputError: there are more than `limit_mm_per_prompt` allows.
        """
        self._limits.check_count(count)

    def read(self, row: Mapping[str, Any], ids_of: IdsOf | None = None) -> tuple[Ids, PromptPictures | None]:
        """The ids of a row's prompt with the ids of its pictures, and its pictures; None: the row has none.

        Args:
            ids_of: makes the ids of a row whose messages contain processed pictures, for example with tools; None: they are the
                prompt's alone.

        Raises:
            InputError: a picture cannot be opened or processed, there are too many, the prompt cannot be tokenized, or its text
                has not one placeholder per picture.
        """
        prompt, images = images_of_row(self.with_files(row))
        self.check_count(len(images))
        pictures = [self._process(image) for image in images]
        if isinstance(prompt, list):
            prompt = with_pictures(prompt, pictures)
            if ids_of is not None:
                ids = whole_numbers(ids_of({**row, "prompt": prompt}))
            else:
                ids = whole_numbers(render_prompt(prompt, self._tokenizer, template=self._template, images=True))
        else:
            plain = render_prompt(prompt, self._tokenizer) if ids_of is None else ids_of(row)
            ids = with_picture_ids(whole_numbers(plain), self._placeholder, pictures)
        return ids, self.placed(ids, pictures)

    def messages_of(self, row: Mapping[str, Any], pictures: PromptPictures | None) -> list[dict[str, Any]]:
        """The messages of a row's prompt, with its processed pictures in them.

        Args:
            row: has messages as its prompt.
            pictures: what `read` gave for the row.
        """
        messages, _ = parts_of_row(row)
        return with_pictures(messages, pictures.pictures if pictures is not None else ())

    def placed(self, ids: Ids, pictures: Sequence[Picture]) -> PromptPictures | None:
        """The pictures of a prompt or of a whole conversation, with their places and positions; None: there are none.

        Args:
            ids: (N,) all ids, those of the pictures included.
            pictures: in the order of their ids.

        Raises:
            ProofError: the ids have more or fewer placeholders than the pictures.
        """
        places = whole_numbers(np.flatnonzero(ids == self._placeholder))
        due = sum(picture.tokens for picture in pictures)
        if len(places) != due:
            raise ProofError(
                "placeholder",
                f"the ids of a conversation have {len(places)} placeholders, and its {len(pictures)} pictures have {due}",
                "a placeholder was sampled, or the ids of a picture were changed",
                "this is a defect of Lockstep: report it with this message",
            )
        if not pictures:
            return None
        if pictures[0].in_tiles:
            return PromptPictures(tuple(pictures), places, self._placeholder)
        return PromptPictures(tuple(pictures), places, self._placeholder, *self._positions(ids, pictures))

    @torch.no_grad()
    def _positions(self, ids: Ids, pictures: Sequence[Picture]) -> tuple[Any, int]:
        """Position ids of all ids, and what is added to the index of the tokens after it.

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
