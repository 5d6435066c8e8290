"""Finds and opens the pictures of a data set's row, and makes small copies of them.

The pictures are in the columns `image` and `images`, and in image parts of messages. The conventions are TRL's: a
column holds one picture or a list of them, and fills the image parts that have no picture of their own. If no message
has image parts, the pictures stand before the text of the first message of the user.

Data sets decode their pictures with `images/files.py`, because `datasets` itself opens every format that Pillow knows.
Small copies, as `data:` URLs of a few kilobytes, stand beside prompts of evaluations and beside rollouts.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, IterableDataset
from datasets import Image as ImageFeature
from datasets.iterable_dataset import _BaseExamplesIterable
from PIL import ExifTags, Image, ImageOps

from lockstep.errors import InputError
from lockstep.images.files import check_together, in_rgb, open_header
from lockstep.images.urls import NO_URLS, bytes_of_data_url, is_data_url, is_url, to_data_url
from lockstep.tokens.chat import HasPictureIds, picture_part

COLUMNS = ("image", "images")
Message = dict[str, Any]


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of pictures, or messages with image parts."""
    if any(name in row for name in COLUMNS):
        return True
    prompt = row.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and _is_image(part) for part in parts)


def images_of_row(row: Mapping[str, Any]) -> tuple[Any, list[Image.Image]]:
    """As `parts_of_row`, with the pictures opened. Raises as it, and as `check_sizes` and `opened`."""
    prompt, found = parts_of_row(row)
    check_sizes(found)
    return prompt, [opened(image) for image in found]


def parts_of_row(row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The prompt of a row without its pictures, and the pictures in the order in which the prompt shows them.

    Returns:
        The prompt: text as it stands, or messages in which each picture is a part `{"type": "image"}`. The pictures are
            as given.

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
            f"the messages have {parts} image parts without a picture, and the columns hold {len(given)} "
            "pictures: give one picture per image part"
        )
    return messages, found


def with_images(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row's prompt, with each image in its part, as TRL's functions get them."""
    messages, images = parts_of_row(row)
    left = iter(images)
    return _each_part(messages, lambda part: {**part, "image": next(left)} if _is_image(part) else dict(part))


def with_pictures(messages: Sequence[Message], pictures: Iterable[HasPictureIds]) -> list[Message]:
    """Messages as `images_of_row` gives them, with the processed pictures, one each, in their image parts."""
    left = iter(pictures)
    return _each_part(messages, lambda part: picture_part(next(left)) if _is_image(part) else part)


def with_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each image is a `data:` URL, so that JSON can hold them. Raises as `opened`."""

    def own(part: Any) -> Any:
        image = part.get("image") if isinstance(part, Mapping) else None
        return part if image is None else {**part, "image": _as_data_url(image)}

    return _each_part(messages, own)


def with_image_urls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for an agent: each image is a `data:` URL, in messages as in OpenAI's chat completions API."""

    def own(part: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": part["image"]}} if _is_image(part) else part

    found = _each_image_of_columns(row, _as_data_url)
    if isinstance(row["prompt"], list):
        found["prompt"] = _each_part(with_data_urls(with_images(row)), own)
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
    """A row in which each URL of an image has given way to what `fetch` returns for it."""

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
        image: a PIL image, a path, the bytes of an image file, a `data:` URL, or a mapping with `bytes` or `path` (as
            in `datasets`).

    Raises:
        InputError: it is something else, a URL (`images/urls.py` fetches those), or cannot be read (`images/files.py`).
    """
    return in_rgb(_given(image))


def check_sizes(images: Iterable[Any]) -> None:
    """Check pictures that are read together, each as in `opened`, before any is decoded (`check_together`)."""
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
    kind = type(image).__name__
    raise InputError(f"a picture is a {kind}; it must be a PIL image, a path, or the bytes of a file")


def _each_part(messages: Sequence[Message], own: Callable[[Any], Any]) -> list[Message]:
    """Messages with another part in place of each part of their contents."""

    def changed(message: Message) -> Message:
        content = message.get("content")
        return {**message, "content": list(map(own, content))} if isinstance(content, list) else message

    return list(map(changed, messages))


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
    """The parts of a message's content; an `InputError` for what is no text and no picture. Text alone is one part."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content if isinstance(content, list) else []:
        # `datasets` gives every part all keys of any part.
        own = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
        own = as_image_part(own)
        is_text = own.get("type") == "text" and isinstance(own.get("text"), str)
        if not is_text and own.get("type") != "image":
            raise InputError(
                f"a message has a part {part!r:.100}; only text and images are supported (an image is given as "
                "{'type': 'image', 'image': …}, or with its URL as {'type': 'image_url', 'image_url': {'url': …}})"
            )
        parts.append(own)
    return parts


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def has_pictures(data: Any) -> bool:
    """Whether a column of a data set or a stream holds pictures, at any depth, or did before the user's own `map`."""
    given = [data.features] if isinstance(data, Dataset | IterableDataset) else []
    if isinstance(data, IterableDataset):
        given += _features_in(data._ex_iterable)
    return any(_own(feature) is not feature for features in given for feature in (features or {}).values())


def with_own_decoder(data: Any) -> Any:
    """A data set or a stream that gives the same rows, and reads their pictures as `images/files.py` allows.

    A picture that a row names by a URL stays `{"bytes": None, "path": URL}`: `image_urls` says which are fetched.
    Reading a row raises an InputError if a picture cannot be read, or if those of the row are too large together.
    """
    if not has_pictures(data):
        return data
    made = copy.copy(data)
    # `cast` would write all rows anew.
    made._info = data.info.copy()
    # A stream after `map` does not know its columns.
    made._info.features = None if data.features is None else _checked(data.features)
    if isinstance(data, IterableDataset):
        made._ex_iterable = _with_checked(data._ex_iterable)
    return made


def _features_in(rows: _BaseExamplesIterable) -> Iterator[Features]:
    """The columns of each step of a stream: `map`, `filter` and others decode the pictures of the step before."""
    for value in vars(rows).values():
        if isinstance(value, Features):
            yield value
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, _BaseExamplesIterable):
                yield from _features_in(inner)


def _with_checked(rows: Any) -> Any:
    """A copy of the steps of a stream in which each decodes with ours."""
    if isinstance(rows, Features):
        return _checked(rows)
    if isinstance(rows, list):
        return list(map(_with_checked, rows))
    if not isinstance(rows, _BaseExamplesIterable):
        return rows
    made = copy.copy(rows)
    vars(made).update({name: _with_checked(value) for name, value in vars(rows).items()})
    return made


def _checked(features: Features) -> _CheckedFeatures:
    return _CheckedFeatures({name: _own(feature) for name, feature in features.items()})


class _CheckedFeatures(Features):
    """Features of rows whose pictures are checked together, before the first is decoded."""

    def decode_example(self, example: dict[str, Any], token_per_repo_id: Any = None) -> dict[str, Any]:
        _check_row(list(example.values()))
        return super().decode_example(example, token_per_repo_id)

    def decode_batch(
        self, batch: dict[str, list[Any]], token_per_repo_id: Any = None
    ) -> dict[str, list[Any]]:
        # A stream of tables reads its rows by batches.
        for row in zip(*batch.values(), strict=True):
            _check_row(list(row))
        return super().decode_batch(batch, token_per_repo_id)

    def __reduce__(self) -> Any:
        return _CheckedFeatures, (dict(self),)


@dataclass
class _CheckedImage(ImageFeature):
    _type: str = field(default="Image", init=False, repr=False)

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        if not isinstance(value, dict) or (file := _file(value)) is None:
            return value
        image: Image.Image = open_header(file)
        try:
            # From here on as in `datasets`, so that a function of the user gets the same image.
            image.load()
            if image.getexif().get(ExifTags.Base.Orientation) is not None:
                image = ImageOps.exif_transpose(image)
            return image.convert(self.mode) if self.mode and self.mode != image.mode else image
        except Exception as error:  # Pillow raises errors of many kinds for damaged files.
            raise InputError(f"a picture cannot be read: {error}") from error


def _own(feature: Any) -> Any:
    """A feature in which every kind of picture is ours; the same object if it has none."""
    if type(feature) is ImageFeature:
        return _CheckedImage(mode=feature.mode, decode=feature.decode)
    if isinstance(feature, dict):
        found = {name: _own(inner) for name, inner in feature.items()}
        return feature if all(found[name] is inner for name, inner in feature.items()) else found
    if isinstance(feature, list):
        several = [_own(inner) for inner in feature]
        return feature if all(own is inner for own, inner in zip(several, feature, strict=True)) else several
    if is_dataclass(feature) and not isinstance(feature, type) and hasattr(feature, "feature"):
        inner = _own(feature.feature)
        return feature if inner is feature.feature else replace(feature, feature=inner)
    return feature


def _check_row(values: list[Any]) -> None:
    check_together(file for file in map(_file, _pictures_in(values)) if file is not None)


def _file(value: dict[str, Any]) -> bytes | str | None:
    """The bytes or the path of an encoded picture; None: it is a URL."""
    if value["bytes"] is not None:
        return value["bytes"]
    return None if value["path"] is None or is_url(value["path"]) else value["path"]


def _pictures_in(value: Any) -> list[dict[str, Any]]:
    """The encoded pictures of a row, in order."""
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"}:
            return [value]
        value = list(value.values())
    return [found for inner in value for found in _pictures_in(inner)] if isinstance(value, list) else []


# The longest side in pixels, the most bytes of one file, and the most images of one prompt or rollout.
_SIDE, _BYTES, _MOST = 96, 8192, 8
_QUALITIES = (75, 50, 25)


def thumbnails_of_row(source: Any, columns: Mapping[str, Any]) -> list[str]:
    """Small copies of the images of a row, in the order in which its prompt, `source`, shows them."""
    _, images = parts_of_row({**columns, "prompt": source})
    return _thumbnails(images)


def thumbnails_of_messages(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Small copies of the images in messages that a rollout has kept."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return _thumbnails(part["image"] for part in parts if part.get("image") is not None)


def _thumbnails(images: Iterable[Any]) -> list[str]:
    return [_thumbnail(opened(image)) for image, _ in zip(images, range(_MOST), strict=False)]


def _thumbnail(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((_SIDE, _SIDE))
    if max(small.size) < _SIDE // 2:
        # Single pixels of a tiny image stay visible.
        scale = _SIDE // max(small.size)
        small = small.resize((small.width * scale, small.height * scale), Image.Resampling.NEAREST)
    for quality in _QUALITIES:
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        if len(file.getvalue()) <= _BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
