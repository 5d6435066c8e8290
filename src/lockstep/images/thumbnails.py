"""Small copies of images for reports, as `data:` URLs of a few kilobytes.

They stand beside prompts of evaluations and beside rollouts. `report/page/pictures.py` shows them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from PIL import Image

from lockstep.images.reading import opened, parts_of_row

# The longest side in pixels, the most bytes of one file, and the most images of one prompt or rollout.
_SIDE, _BYTES, _MOST = 96, 8192, 8
_QUALITIES = (75, 50, 25)


def thumbnails_of_row(source: Any, columns: Mapping[str, Any]) -> list[str]:
    """Small copies of the images of a row, in the order in which its prompt shows them.

    Args:
        source: the prompt of the row.
        columns: its other columns.
    """
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
