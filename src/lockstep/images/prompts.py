"""Makes the ids and the pictures of a prompt, once, and finds the places of pictures in a whole conversation.

The chat template writes one placeholder per picture. It gives way to the ids that stand for the picture
(`tokens/chat.py`). The processor of the whole model is not used: it would tokenize the text a second time. The image
processor runs nowhere else, and obeys the limits of the config: the engine needs none of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError, ProofError
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.images.reading import (
    check_sizes,
    images_of_row,
    opened,
    parts_of_row,
    with_fetched,
    with_pictures,
)
from lockstep.images.urls import NO_URLS, ImageUrls, is_url
from lockstep.model_files import load_files
from lockstep.models.policy import reads_tiles
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import render_prompt, template_of, with_picture_ids


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits on pictures. None: there is no such limit beside those of the model's image processor.

    Attributes:
        min_pixels, max_pixels: smallest and largest area of a picture after resizing, in pixels.
        per_prompt: largest number of pictures of a prompt, and of a conversation with its later turns.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    per_prompt: int | None = None

    def set_sizes(self, processor: Any, config: PreTrainedConfig) -> None:
        """Give the limits of sizes to a model's image processor.

        Raises:
            InputError: the family has no such limit, or it is smaller than the smallest picture of the model.
        """
        if self.min_pixels is not None or self.max_pixels is not None:
            set_sizes = self._set_tiles if reads_tiles(config) else self._set_patches
            set_sizes(processor)

    def check_count(self, count: int) -> None:
        """Check (`InputError`) the number of pictures of a prompt, or of a whole conversation."""
        if self.per_prompt is not None and count > self.per_prompt:
            raise InputError(
                f"{count} pictures, and limit_mm_per_prompt allows {self.per_prompt} per conversation: raise "
                "it, or show fewer"
            )

    def _set_patches(self, processor: Any) -> None:
        smallest = (processor.patch_size * processor.merge_size) ** 2
        low = self.min_pixels or min(processor.size["shortest_edge"], self.max_pixels or math.inf)
        high = self.max_pixels or max(processor.size["longest_edge"], low)
        if high < smallest:
            raise InputError(
                f"max_pixels={high}, and the smallest picture of this model has {smallest} pixels: raise it to that"
            )
        # These names of transformers mean areas here.
        processor.size = {"shortest_edge": int(low), "longest_edge": int(high)}

    def _set_tiles(self, processor: Any) -> None:
        side = processor.max_image_size["longest_edge"]
        if self.min_pixels is not None or self.max_pixels is None:
            raise InputError(
                "min_pixels is not supported for models that cut pictures into tiles: they enlarge every "
                "picture to the `size` of their preprocessor_config.json; leave it out"
            )
        if (tiles := math.isqrt(self.max_pixels) // side) < 1:
            raise InputError(
                f"max_pixels={self.max_pixels}, and one tile of this model has {side**2} pixels: raise it to that"
            )
        # A picture is resized so that its longer side has this length, and each side then is a whole number of tiles.
        processor.size = {"longest_edge": min(tiles * side, processor.size["longest_edge"])}


NO_LIMITS = PictureLimits()


class InPatches:
    """Pictures of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one placeholder per square of merged patches."""

    def __init__(self, processor: Any, config: PreTrainedConfig) -> None:
        whole: Any = config
        self._processor, self._placeholder = processor, int(whole.image_token_id)
        self._merged = int(whole.vision_config.spatial_merge_size) ** 2

    def __call__(self, image: Image.Image) -> Picture:
        """The picture, with the ids that stand for it; an `InputError` if the processor cannot use the image."""
        found = _processed(self._processor, image)
        grid = found["image_grid_thw"][0]
        tokens = int(grid.prod()) // self._merged
        ids = whole_numbers(np.full(tokens, self._placeholder))
        return Picture(found["pixel_values"].float().contiguous(), grid, tokens, ids)


class InTiles:
    """Pictures of SmolVLM and Idefics3: tiles of one size, and the whole picture in small as the last tile.

    Each tile has an equal number of placeholders. Marks before them name the row and the column of the tile.

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
                f"a picture of {image.width} × {image.height} pixels has a tile with padding, or one whose "
                "values are all 0, which the model takes for padding: use the model's own "
                "preprocessor_config.json (docs/guides/images.md)"
            )
        rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
        height, width = (side // self._patch for side in pixels.shape[-2:])
        parts = [self._placeholder] * (height * width // self._scale**2)
        ids = self._stand_in(rows, columns, parts)
        return Picture(pixels, torch.tensor([1, rows, columns]), len(parts) * len(pixels), ids)

    def _stand_in(self, rows: int, columns: int, parts: list[int]) -> Ids:
        """The ids of `rows` × `columns` tiles and of the whole picture after them, with `parts` for each tile."""
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
                f"the tokenizer has no token {mark}, which stands beside pictures: use the tokenizer that "
                "came with the model, or smaller pictures (`size` in preprocessor_config.json)"
            )
        return found

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _processed(processor: Any, image: Image.Image, **more: Any) -> Any:
    try:
        return processor(images=[image], return_tensors="pt", **more)
    except ValueError as error:
        size = f"{image.width} × {image.height} pixels"
        raise InputError(f"a picture of {size} cannot be used: {error}") from error


# Makes the ids of a row's prompt.
IdsOf = Callable[[Mapping[str, Any]], Sequence[int] | Ids]


class ImagePrompts:
    """Reads prompts with pictures for one model.

    Args:
        model: the policy. Its function for positions is called once per prompt with pictures.
        path: directory or hub id with the model's image processor.
        chat_template_kwargs: further arguments of the chat template.
        processor: the image processor; None: the one in `path`.

    Attributes:
        processor: the image processor, with the limits.

    Raises:
        InputError: the model has no image processor, the tokenizer lacks an id that stands beside pictures, or a limit
            does not fit the model.
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
            # A copy, because the limits are set on it.
            given = copy.deepcopy(processor)
            processor = load_files(AutoImageProcessor, path) if given is None else given
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
        """Ids that must not be sampled: an engine would put a picture, or a part of one, in their place."""
        known = (getattr(self._model.config, name, None) for name in ("image_token_id", "video_token_id"))
        return tuple(sorted({int(token) for token in known if token is not None}))

    @property
    def placeholder(self) -> int:
        """The id that stands for a part of a picture."""
        return self._placeholder

    def picture(self, image: Image.Image) -> Picture:
        """An opened image, processed; an `InputError` if the processor cannot use it. Any thread may call it."""
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
        """Images that are read together, as the model takes them. Otherwise as `opened_pictures`."""
        return [picture for _, picture in self.opened_pictures(images)]

    def files_and_pictures(self, urls: Sequence[str]) -> list[tuple[str, Picture]]:
        """The file of each URL as a `data:` URL, and the image for the model. Otherwise as `opened_pictures`."""
        return [(file, self.picture(opened(file))) for file in self.fetched(urls)]

    def with_files(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row without URLs: the file of each has taken its place, as a `data:` URL. Raises as `ImageUrls.fetch`."""
        return with_fetched(row, self._urls.fetch)

    def check_count(self, count: int) -> None:
        """Check the number of pictures of a prompt, or of a whole conversation (`PictureLimits.check_count`)."""
        self._limits.check_count(count)

    def read(self, row: Mapping[str, Any], ids_of: IdsOf | None = None) -> tuple[Ids, PromptPictures | None]:
        """The ids of a row's prompt with the ids of its pictures, and its pictures; None: the row has none.

        Args:
            ids_of: makes the ids of a row whose messages contain processed pictures, for example with tools; None: they
                are the prompt's alone.

        Raises:
            InputError: a picture cannot be opened or processed, there are too many, the prompt cannot be tokenized, or
                its text has not one placeholder per picture.
        """
        prompt, images = images_of_row(self.with_files(row))
        self.check_count(len(images))
        pictures = [self._process(image) for image in images]
        if isinstance(prompt, list):
            prompt = with_pictures(prompt, pictures)
            if ids_of is not None:
                plain = ids_of({**row, "prompt": prompt})
            else:
                plain = render_prompt(prompt, self._tokenizer, template=self._template, images=True)
            ids = whole_numbers(plain)
        else:
            plain = render_prompt(prompt, self._tokenizer) if ids_of is None else ids_of(row)
            ids = with_picture_ids(whole_numbers(plain), self._placeholder, pictures)
        return ids, self.placed(ids, pictures)

    def messages_of(self, row: Mapping[str, Any], pictures: PromptPictures | None) -> list[dict[str, Any]]:
        """The messages of a row's prompt, with its processed pictures, which `read` gave, in them."""
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
                f"the ids of a conversation have {len(places)} placeholders, and its {len(pictures)} pictures "
                f"have {due}",
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
        """Position ids of all ids, and what is added to the index of the tokens after it."""
        # The model's function would take two pictures side by side for one.
        parts = ids == self._placeholder
        if np.count_nonzero(parts[1:] & ~parts[:-1]) + parts[0] != len(pictures):
            raise InputError(
                "two pictures stand side by side, without any text between them: write the model's marks "
                "around each picture, as its chat template does, or a space between them"
            )
        row = torch.tensor(ids)[None]
        shown = {"image_grid_thw": torch.stack([picture.grid for picture in pictures])}
        marks = (row == self._placeholder).int()
        positions, delta = self._model.base_model.get_rope_index(row, mm_token_type_ids=marks, **shown)
        return positions[:, 0].numpy(), int(delta)
