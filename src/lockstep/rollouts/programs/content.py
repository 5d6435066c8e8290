"""What a tool or an environment gives the model to read: text and pictures, in order.

A `Content` is made of what the user's code returned. It is made in the thread of that code, because a picture is
opened and processed there. Then it becomes a part of a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from lockstep.errors import InputError
from lockstep.images.data_urls import to_data_url
from lockstep.images.pictures import Picture
from lockstep.threads import is_coroutine_function
from lockstep.tokens import chat as template
from lockstep.tokens.picture_ids import picture_part


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An image that the model sees.

    Attributes:
        url: the image as a `data:` URL, for messages that are kept.
        picture: the image as the model takes it.
    """

    url: str
    picture: Picture


# Opens and processes the images that user code gave in one result: each opened image, and the image as the model takes it.
Process = Callable[[Sequence[Any]], Iterable[tuple[Image.Image, Picture]]]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Text and images, in order."""

    parts: tuple[str | Seen, ...]

    @property
    def text(self) -> str:
        """The text alone."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> int:
        """The number of images."""
        return sum(not isinstance(part, str) for part in self.parts)

    def shown(self, longest: int) -> template.Content:
        """The content of a message, as the chat template takes it.

        Args:
            longest: number of characters after which each text is cut.
        """
        return self._content(longest, lambda seen: picture_part(seen.picture))

    def kept(self, longest: int) -> template.Content:
        """The content of a message that is kept, in JSON types. `longest` as in `shown`."""
        return self._content(longest, lambda seen: {"type": "image", "image": seen.url})

    def _content(self, longest: int, of_image: Callable[[Seen], dict[str, Any]]) -> template.Content:
        if all(isinstance(part, str) for part in self.parts):
            return self.text[:longest]
        return [
            {"type": "text", "text": part[:longest]} if isinstance(part, str) else of_image(part) for part in self.parts
        ]


def content_of(result: Any, process: Process) -> Content:
    """What the model reads of a tool's result: an image, content blocks, or else `str(result)`, as in TRL.

    Raises:
        InputError: a block is neither text nor an image, or an image cannot be read.
    """
    if isinstance(result, Image.Image):
        return content_of_blocks([{"type": "image", "image": result}], process)
    if isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result):
        return content_of_blocks(result, process)
    return Content((printable(str(result)),))


def content_of_blocks(blocks: Sequence[Mapping[str, Any]], process: Process) -> Content:
    """What the model reads of content blocks.

    Raises:
        InputError: a block is neither text nor an image, or an image cannot be read.
    """
    images = [block.get("image") for block in blocks if block.get("type") == "image"]
    # Nothing is opened if a block is wrong.
    texts = [None if block.get("type") == "image" else _text(block) for block in blocks]
    seen = (Seen(to_data_url(found), picture) for found, picture in (process(images) if images else ()))
    return Content(tuple(next(seen) if text is None else text for text in texts))


def giving(function: Callable[..., Any], made: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function whose result is made into something else in the same place: in its thread, or in its event loop."""
    if is_coroutine_function(function):

        async def awaited(**given: Any) -> Any:
            return made(await function(**given))

        return functools.update_wrapper(awaited, function, updated=())

    def called(**given: Any) -> Any:
        return made(function(**given))

    return functools.update_wrapper(called, function, updated=())


def printable(text: str) -> str:
    """Text that a tokenizer can encode: half characters (lone surrogates) become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def shows_no_images(images: Sequence[Any]) -> Iterable[tuple[Image.Image, Picture]]:
    """The function `process` of a run whose model sees no images.

    Raises:
        InputError: always.
    """
    raise InputError("this run shows no images to the model; give text")


def _text(block: Mapping[str, Any]) -> str:
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return printable(block["text"])
    raise InputError(f"a content block of type {block.get('type')!r:.40} is not supported; give text or images")
