"""The one place that opens the file of a picture: which formats are read, and how large a picture may be.

Pillow chooses a decoder by the content of a file, whatever its name says. For some formats the decoder is another
program: Ghostscript for EPS. Therefore only the formats of `FORMATS` are opened, and the size in a file's header is
compared with the limits before anything is decoded: a few kilobytes can decode to gigabytes.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from lockstep.errors import InputError

# Their decoders are parts of Pillow, and their headers have the size of what is decoded.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Pillow's name of a JPEG file with several pictures, as some cameras write it. Only the first is decoded.
_SEVERAL = "MPO"
# Most pixels of one picture, and of all pictures of a row, of a call, or of what a tool returns.
LARGEST, LARGEST_TOGETHER = 1 << 26, 1 << 28
_TILE_WIDTH, _TILE_HEIGHT = 322, 323

File = bytes | str | Path


def open_header(file: File) -> ImageFile:
    """A picture whose header is read and checked, and which is not decoded yet. The caller closes it.

    Raises:
        InputError: it is no file, has a format that is not read, is damaged, or has more pixels than `LARGEST`.
    """
    if not isinstance(file, bytes):
        _check_path(file)
    try:
        found = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        advice = f"make it smaller ({LARGEST} pixels are read)"
        raise InputError(f"a picture is too large: {error}; {advice}") from error
    except UnidentifiedImageError as error:
        advice = f"give a file in one of the formats {', '.join(FORMATS)}"
        raise InputError(f"a picture cannot be read: {advice}") from error
    except Exception as error:  # Pillow raises errors of many kinds for damaged files.
        raise InputError(f"a picture cannot be read: {error}") from error
    try:
        _check(found)
    except BaseException:
        found.close()
        raise
    return found


def _check_path(path: str | Path) -> None:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        # Base64 without its head is longer than a path may be.
        advice = "; base64 begins with data:image/png;base64," if len(str(path)) > 255 else ""
        raise InputError(f"a picture cannot be read: {str(path)[:100]}: {why}{advice}") from error
    if not stat.S_ISREG(found.st_mode):
        # Opening a pipe would wait for ever.
        raise InputError(f"a picture cannot be read: {str(path)[:200]} is not a file")


def in_rgb(picture: File | Image.Image) -> Image.Image:
    """A picture, decoded in RGB. Raises as `open_header`."""
    if isinstance(picture, Image.Image):
        _check(picture)
        return _converted(picture)
    with open_header(picture) as found:
        return _converted(found)


def check_together(pictures: Iterable[File | Image.Image]) -> None:
    """Check the pictures of a row, of a call, or of what a tool returns, before any is decoded.

    Raises:
        InputError: one of them cannot be read, or they have more pixels together than `LARGEST_TOGETHER`.
    """
    total = 0
    for picture in pictures:
        if isinstance(picture, Image.Image):
            _check(picture)
            width, height = picture.size
        else:
            with open_header(picture) as found:
                width, height = found.size
        total += width * height
        if total > LARGEST_TOGETHER:
            raise InputError(
                f"pictures that are read together have {total} pixels or more, and {LARGEST_TOGETHER} are "
                "read: show fewer, or make them smaller"
            )


def _check(picture: Image.Image) -> None:
    """Raise an InputError if the header says that a picture is not read here. Drawn pixels have no format."""
    width, height = picture.size
    if isinstance(picture, ImageFile):
        if picture.format not in (*FORMATS, _SEVERAL):
            raise InputError(
                f"a picture has the format {picture.format}, which is not read here: give one of "
                f"{', '.join(FORMATS)}, or image.convert('RGB')"
            )
        # Each tile is decoded whole, however small the picture is.
        tags = getattr(picture, "tag_v2", {})
        tile = (tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0))
        if all(isinstance(side, int) for side in tile):
            width, height = max((width, height), tile, key=lambda sides: sides[0] * sides[1])
    if width * height > LARGEST:
        raise InputError(
            f"a picture has {width} × {height} pixels, and {LARGEST} are read: make it smaller, as a model's "
            "image processor does"
        )


def _converted(picture: Image.Image) -> Image.Image:
    try:
        return picture.convert("RGB")
    except Exception as error:  # As in `open_header`.
        raise InputError(f"a picture cannot be read: {error}") from error
