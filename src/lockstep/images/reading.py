"""Finds the pictures of a dataset's row and opens them: the columns `image` and `images`, and image parts of messages.

The conventions are TRL's: a column holds one picture or a list of them, and fills the image parts that have no picture of their
own. If no message has image parts, the pictures stand before the text of the first message of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lockstep.errors import InputError
from lockstep.images.data_urls import bytes_of_data_url, is_data_url, to_data_url
from lockstep.images.files import check_together, in_rgb
from lockstep.images.urls import NO_URLS, is_url
from lockstep.tokens.picture_ids import HasPictureIds, picture_part

COLUMNS = ("image", "images")
Message = dict[str, Any]


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of pictures, or messages with image parts."""
    if any(name in row for name in COLUMNS):
        return True
    prompt = row.get("prompt")
    contents = (
        [message.get("content") for message in prompt if isinstance(message, Mapping)]
        if isinstance(prompt, list)
        else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and _is_image(part) for part in parts)


def images_of_row(row: Mapping[str, Any]) -> tuple[Any, list[Image.Image]]:
    """As `parts_of_row`, with the pictures opened.

    Raises:
        InputError: as in `parts_of_row`; or a picture cannot be opened, or they are too large together.
    """
    prompt, found = parts_of_row(row)
    check_sizes(found)
    return prompt, [opened(image) for image in found]


def parts_of_row(row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The prompt of a row without its pictures, and the pictures in the order in which the prompt shows them.

    Returns:
        The prompt: text as it stands, or messages in which each picture is a part `{"type": "image"}`. The pictures are as given.

    Raises:
        InputError: the image parts without a picture are not as many as the column's pictures.
    """
    given = _of_columns(row)
    prompt = row["prompt"]
    if not isinstance(prompt, list):
        return prompt, given
    if given and not any(_is_image(part) for message in prompt for part in _parts(message)):
        prompt = _before_first_user(prompt, len(given))
    found: list[Any] = []
    left = iter(given)
    messages = [_bare(message, left, found) for message in prompt]
    if (more := sum(1 for _ in left)) or None in found:
        parts = len(given) - more + found.count(None)
        raise InputError(
            f"the messages have {parts} image parts without a picture, and the columns hold {len(given)} pictures: give one "
            "picture per image part"
        )
    return messages, found


def with_images(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row's prompt, with each image in its part, as TRL's functions get them.

    Args:
        row: has messages as its prompt.
    """
    messages, images = parts_of_row(row)
    left = iter(images)
    return _each_part(messages, lambda part: {**part, "image": next(left)} if _is_image(part) else dict(part))


def with_pictures(messages: Sequence[Message], pictures: Iterable[HasPictureIds]) -> list[Message]:
    """Messages as `images_of_row` gives them, with the processed pictures in their image parts.

    Args:
        pictures: one per image part, in order.
    """
    left = iter(pictures)

    def filled(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [picture_part(next(left)) if _is_image(part) else part for part in content]}

    return [filled(message) for message in messages]


def with_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each image is a `data:` URL, so that JSON can hold them. An image part without an image stays as it is.

    Raises:
        InputError: an image cannot be opened.
    """

    def own(part: Any) -> Any:
        image = part.get("image") if isinstance(part, Mapping) else None
        return part if image is None else {**part, "image": _as_data_url(image)}

    return _each_part(messages, own)


def with_image_urls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for an agent: each image is a `data:` URL, and those in messages are parts of OpenAI's chat completions API.

    Raises:
        InputError: an image cannot be opened.
    """
    found = _each_image_of_columns(row, _as_data_url)
    if isinstance(row["prompt"], list):
        found["prompt"] = _each_part(
            with_data_urls(with_images(row)),
            lambda part: {"type": "image_url", "image_url": {"url": part["image"]}} if _is_image(part) else part,
        )
    return found


def _each_image_of_columns(row: Mapping[str, Any], own: Callable[[Any], Any]) -> dict[str, Any]:
    """A row with what `own` returns for each image of its columns."""
    found = dict(row)
    for name in COLUMNS:
        if isinstance(row.get(name), list | tuple):
            found[name] = [own(image) for image in row[name]]
        elif row.get(name) is not None:
            found[name] = own(row[name])
    return found


def _as_data_url(image: Any) -> str:
    return image if is_data_url(image) else to_data_url(opened(image))


def with_opened_images(messages: Sequence[Message]) -> list[Message]:
    """Messages whose images are `data:` URLs, with the opened images in their place (TRL's form)."""

    def own(part: Any) -> Any:
        kept = isinstance(part, Mapping) and is_data_url(part.get("image"))
        return {**part, "image": opened(part["image"])} if kept else part

    return _each_part(messages, own)


def with_fetched(row: Mapping[str, Any], fetch: Callable[[str], str]) -> dict[str, Any]:
    """A row in which each URL of an image has given way to what `fetch` returns for it.

    Raises:
        InputError: the URL or a redirect is not allowed, the file is too large or no image, or it does not come in time.
    """

    def own(image: Any) -> Any:
        found = image.get("path") if isinstance(image, Mapping) and image.get("bytes") is None else image
        return fetch(found) if isinstance(found, str) and is_url(found) else image

    def part_with_file(part: Any) -> Any:
        known = as_image_part(part) if isinstance(part, Mapping) else {}
        return {**known, "image": own(known["image"])} if known.get("image") is not None else part

    found = _each_image_of_columns(row, own)
    if isinstance(row.get("prompt"), list):
        found["prompt"] = _each_part(row["prompt"], part_with_file)
    return found


def as_image_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message, with an image as TRL writes it where the part has the URL of one as in OpenAI's APIs."""
    if part.get("type") != "image_url":
        return dict(part)
    url = part.get("image_url")
    return {"type": "image", "image": url.get("url") if isinstance(url, Mapping) else url}


def text_of_content(content: Any) -> str:
    """The content of a message as text, with a word in place of each image."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part.get("text") or "<image>" for part in content)


def opened(image: Any) -> Image.Image:
    """A picture in RGB.

    Args:
        image: a PIL image, a path, the bytes of an image file, a `data:` URL, or a mapping with `bytes` or `path` (as in
            `datasets`).

    Raises:
        InputError: it is something else, a URL (`images/urls.py` fetches those), or cannot be read (`images/files.py`).
    """
    return in_rgb(_given(image))


def check_sizes(images: Iterable[Any]) -> None:
    """Check pictures that are read together, before any is decoded.

    Args:
        images: each as in `opened`.

    Raises:
        InputError: one of them cannot be read, or they are too large together.
    """
    check_together(map(_given, images))


def _given(image: Any) -> bytes | str | Path | Image.Image:
    if isinstance(image, Mapping):
        image = image.get("bytes") if image.get("bytes") is not None else image.get("path")
    if isinstance(image, str) and is_data_url(image):
        image = bytes_of_data_url(image)
    if is_url(image):
        # Nothing is fetched here: no URL is allowed.
        NO_URLS.check(image)
    if isinstance(image, bytes | str | Path | Image.Image):
        return image
    raise InputError(f"a picture is a {type(image).__name__}; it must be a PIL image, a path, or the bytes of a file")


def _each_part(messages: Sequence[Message], own: Callable[[Any], Any]) -> list[Message]:
    """Messages with another part in place of each part of their contents."""
    return [
        {**m, "content": [own(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def _of_columns(row: Mapping[str, Any]) -> list[Any]:
    one, several = row.get("image"), row.get("images")
    if one is not None and several:
        raise InputError("a row has pictures in both columns, image and images; use one of them")
    if one is not None:
        return [one]
    if several is None or isinstance(several, list | tuple):
        return list(several or [])
    raise InputError(f"the column images holds a {type(several).__name__}; it must be a list of pictures")


def _before_first_user(messages: list[Message], count: int) -> list[Message]:
    for place, message in enumerate(messages):
        if message.get("role") == "user":
            parts = [{"type": "image"} for _ in range(count)]
            shown = {**message, "content": [*parts, *_parts(message)]}
            return [*messages[:place], shown, *messages[place + 1 :]]
    raise InputError("a row has pictures and no message of the user that could show them")


def _bare(message: Message, left: Any, found: list[Any]) -> Message:
    """A message whose image parts have no pictures. The pictures are appended to `found`; None: there was none left."""
    if not isinstance(message.get("content"), list):
        return message
    parts: list[dict[str, Any]] = []
    for part in _parts(message):
        if _is_image(part):
            own = part.get("image")
            found.append(own if own is not None else next(left, None))
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _parts(message: Any) -> list[dict[str, Any]]:
    """The parts of a message's content. Text alone is one part.

    Raises:
        InputError: a part is neither text nor a picture.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content if isinstance(content, list) else []:
        # `datasets` gives every part all keys of any part.
        own = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
        own = as_image_part(own)
        if own.get("type") not in ("text", "image") or (own["type"] == "text" and not isinstance(own.get("text"), str)):
            raise InputError(
                f"a message has a part {part!r:.100}; only text and images are supported (an image is given as "
                "{'type': 'image', 'image': …}, or with its URL as {'type': 'image_url', 'image_url': {'url': …}})"
            )
        parts.append(own)
    return parts


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")
