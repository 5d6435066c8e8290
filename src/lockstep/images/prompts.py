"""Reads the prompts of a run: makes ids and pictures, once, and finds the places of pictures in a whole conversation.

The chat template writes one placeholder per picture. It gives way to the ids that stand for the picture
(`tokens/chat.py`). The processor of the whole model is not used: it would tokenize the text a second time. The image
processor runs nowhere else, and obeys the limits of the config: the engine needs none of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError, ProofError
from lockstep.images.content import NO_IMAGES, Content, Process, refusing, stand_in
from lockstep.images.pictures import NO_PICTURES, Picture, PromptPictures
from lockstep.images.reading import (
    COLUMNS,
    Message,
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
from lockstep.tokens.chat import Template, pictures_in, render_prompt, template_of, with_picture_ids
from lockstep.tokens.extension import Extension


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


class PromptReader:
    """Reads the prompts of a run that shows text alone.

    Args:
        chat_template_kwargs: further arguments of the chat template.
        add_special_tokens: whether prompts that are text get the tokenizer's special tokens.

    Attributes:
        shows_pictures: whether prompts, or messages in later turns, may have pictures.
        placeholder: the id that stands for a part of a picture; None: the run shows no pictures.
        processor: the model's image processor, with the limits; None: the run shows no pictures.
    """

    shows_pictures = False
    placeholder: int | None = None
    processor: Any = None

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._arguments, self._add_special_tokens = chat_template_kwargs, add_special_tokens

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that must not be sampled: an engine would put a picture, or a part of one, in their place."""
        return ()

    @cached_property
    def _template(self) -> Template | None:
        return template_of(self.tokenizer, self._arguments, self.placeholder)

    def check_columns(self, dataset: str, names: Collection[str]) -> None:
        """Check (`InputError`) that a dataset has no column of pictures that would not be shown."""
        if shown := set(COLUMNS) & set(names):
            # TRL would show the images to the model. If they were ignored, it would answer without having seen them.
            raise InputError(
                f"the {dataset} dataset has a column {min(shown)!r}: images are not supported here, because the "
                "model reads none or the run began without any; drop the column"
            )

    def check_count(self, count: int) -> None:
        """Check (`InputError`) the number of pictures of a prompt, or of a whole conversation."""

    def check_said(self, messages: Sequence[Message], said: Iterable[Content]) -> None:
        """Check (`InputError`) the number of pictures of messages, with those of what is said after them."""
        if more := sum(content.pictures for content in said):
            self.check_count(len(pictures_in(messages)) + more)

    def with_files(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row without URLs: the file of each has taken its place, as a `data:` URL. Raises as `ImageUrls.fetch`."""
        return dict(row)

    def read(self, row: Mapping[str, Any], ids_of: IdsOf | None = None) -> tuple[Ids, PromptPictures]:
        """The ids of a row's prompt, with the ids of its pictures, and its pictures.

        Args:
            ids_of: makes the ids of a row whose messages contain processed pictures, for example with tools; None: they
                are the prompt's alone.

        Raises:
            InputError: the prompt cannot be tokenized; a picture cannot be opened or processed, there are too many, or
                the text has not one placeholder per picture.
        """
        return whole_numbers((ids_of or self.ids)(row)), NO_PICTURES

    def ids(self, row: Mapping[str, Any]) -> Ids:
        """The ids of a row's prompt alone. Its messages may contain processed pictures."""
        plain = render_prompt(
            row["prompt"],
            self.tokenizer,
            template=self._template,
            images=self.shows_pictures,
            add_special_tokens=self._add_special_tokens,
        )
        return whole_numbers(plain)

    def messages_of(self, row: Mapping[str, Any], pictures: PromptPictures) -> list[Message]:
        """The messages of a row's prompt, with the processed pictures, which `read` gave, in them."""
        return list(row["prompt"])

    def picture(self, image: Image.Image) -> Picture:
        """An opened image, processed; an `InputError` if the processor cannot use it. Any thread may call it."""
        raise InputError(NO_IMAGES)

    def fetched(self, images: Sequence[Any]) -> list[Any]:
        """Images that are read together, each URL with its file in its place, as a `data:` URL. Any thread may call it.

        Raises:
            InputError: the run shows no images; a URL is not allowed, or cannot be fetched; or the pictures are too
                large together.
        """
        if images:
            raise InputError(NO_IMAGES)
        return []

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

    def in_turns(self, extensions: Iterable[Extension]) -> Process:
        """`opened_pictures` for messages in later turns: it refuses if a chat template cannot show them there."""
        return self.opened_pictures

    def placed(self, ids: Ids, pictures: Sequence[Picture]) -> PromptPictures:
        """The pictures of a prompt or of a whole conversation, with their places and positions.

        Args:
            ids: (N,) all ids, those of the pictures included.
            pictures: in the order of their ids.

        Raises:
            ProofError: the ids have more or fewer placeholders than the pictures.
        """
        return NO_PICTURES

    def shown_by(self, messages: Sequence[Message], ids: Ids) -> PromptPictures:
        """The pictures of all messages of a conversation, placed in its ids."""
        return self.placed(ids, pictures_in(messages))


class ImagePrompts(PromptReader):
    """Reads prompts with pictures for one model.

    Args:
        model: the policy. Its function for positions is called once per prompt with pictures.
        path: directory or hub id with the model's image processor.
        processor: the image processor; None: the one in `path`.

    Raises:
        InputError: the model has no image processor, the tokenizer lacks an id that stands beside pictures, or a limit
            does not fit the model.
    """

    shows_pictures = True
    placeholder: int

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        chat_template_kwargs: dict[str, Any] | None = None,
        limits: PictureLimits = NO_LIMITS,
        urls: ImageUrls = NO_URLS,
        processor: Any = None,
        *,
        add_special_tokens: bool = True,
    ) -> None:
        super().__init__(tokenizer, chat_template_kwargs, add_special_tokens=add_special_tokens)
        config: Any = model.config
        try:
            # A copy, because the limits are set on it.
            given = copy.deepcopy(processor)
            processor = load_files(AutoImageProcessor, path) if given is None else given
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"model {path} comes without a usable image processor: {error}") from error
        limits.set_sizes(processor, config)
        self._model, self._limits, self._urls = model, limits, urls
        self.processor = processor
        self.placeholder = int(config.image_token_id)
        kind = InTiles(processor, config, tokenizer) if reads_tiles(config) else InPatches(processor, config)
        self._process: InPatches | InTiles = kind

    @property
    def banned_ids(self) -> tuple[int, ...]:
        known = (getattr(self._model.config, name, None) for name in ("image_token_id", "video_token_id"))
        return tuple(sorted({int(token) for token in known if token is not None}))

    def picture(self, image: Image.Image) -> Picture:
        return self._process(image)

    def fetched(self, images: Sequence[Any]) -> list[Any]:
        found = [self._urls.fetch(image) if is_url(image) else image for image in images]
        check_sizes(found)
        return found

    def in_turns(self, extensions: Iterable[Extension]) -> Process:
        trial = stand_in([self.placeholder])
        reasons = (extension.why_no_pictures(trial) for extension in extensions)
        return next((refusing(reason) for reason in reasons if reason is not None), self.opened_pictures)

    def check_columns(self, dataset: str, names: Collection[str]) -> None:
        pass

    def with_files(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return with_fetched(row, self._urls.fetch)

    def check_count(self, count: int) -> None:
        self._limits.check_count(count)

    def read(self, row: Mapping[str, Any], ids_of: IdsOf | None = None) -> tuple[Ids, PromptPictures]:
        prompt, images = images_of_row(self.with_files(row))
        self.check_count(len(images))
        pictures = [self._process(image) for image in images]
        made = ids_of or self.ids
        if isinstance(prompt, list):
            ids = whole_numbers(made({**row, "prompt": with_pictures(prompt, pictures)}))
        else:
            ids = with_picture_ids(whole_numbers(made(row)), self.placeholder, pictures)
        return ids, self.placed(ids, pictures)

    def messages_of(self, row: Mapping[str, Any], pictures: PromptPictures) -> list[Message]:
        messages, _ = parts_of_row(row)
        return with_pictures(messages, pictures.pictures)

    def placed(self, ids: Ids, pictures: Sequence[Picture]) -> PromptPictures:
        places = whole_numbers(np.flatnonzero(ids == self.placeholder))
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
            return NO_PICTURES
        if pictures[0].in_tiles:
            return PromptPictures(tuple(pictures), places, self.placeholder)
        return PromptPictures(tuple(pictures), places, self.placeholder, *self._positions(ids, pictures))

    @torch.no_grad()
    def _positions(self, ids: Ids, pictures: Sequence[Picture]) -> tuple[Any, int]:
        """Position ids of all ids, and what is added to the index of the tokens after it."""
        # The model's function would take two pictures side by side for one.
        parts = ids == self.placeholder
        if np.count_nonzero(parts[1:] & ~parts[:-1]) + parts[0] != len(pictures):
            raise InputError(
                "two pictures stand side by side, without any text between them: write the model's marks "
                "around each picture, as its chat template does, or a space between them"
            )
        row = torch.tensor(ids)[None]
        shown = {"image_grid_thw": torch.stack([picture.grid for picture in pictures])}
        marks = (row == self.placeholder).int()
        positions, delta = self._model.base_model.get_rope_index(row, mm_token_type_ids=marks, **shown)
        return positions[:, 0].numpy(), int(delta)
