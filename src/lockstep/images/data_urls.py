"""Images as text: `data:` URLs, which JSON can hold and a browser shows.

Messages that a program keeps of a rollout contain images in this form; reward functions get the opened images again.
Nothing here uses the network.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

from PIL import Image

from lockstep.errors import InputError
from lockstep.images.files import open_header

_START, _ENCODED = "data:image/", ";base64"


def is_data_url(given: Any) -> bool:
    """Whether a value is an image as a `data:` URL."""
    return isinstance(given, str) and given.startswith(_START)


def to_data_url(image: Image.Image) -> str:
    """An image as a `data:` URL of a PNG file. No pixel changes."""
    file = io.BytesIO()
    # The lowest level of compression takes a fifth of the time of the default.
    image.save(file, "PNG", compress_level=1)
    return f"{_START}png{_ENCODED},{base64.b64encode(file.getvalue()).decode()}"


def file_as_data_url(content: bytes) -> str:
    """The bytes of an image file as a `data:` URL.

    Raises:
        InputError: they are not the bytes of an image that can be read.
    """
    with open_header(content) as file:
        kind = Image.MIME.get(file.format or "", "")
    kind = kind.removeprefix("image/") or "unknown"
    return f"{_START}{kind}{_ENCODED},{base64.b64encode(content).decode()}"


def bytes_of_data_url(url: str) -> bytes:
    """The bytes of the file in a `data:` URL.

    Raises:
        InputError: it is not the base64 text of an image.
    """
    kind, comma, content = url.partition(",")
    try:
        if not comma or not kind.startswith(_START) or not kind.endswith(_ENCODED):
            raise ValueError("it does not begin with data:image/…;base64,")
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InputError(f"a data: URL of an image cannot be read: {error}") from error
