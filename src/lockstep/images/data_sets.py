"""Lets a data set decode its pictures with `images/files.py`. `datasets` itself opens every format that Pillow knows.

It is done for every data set of a run, before any row is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from datasets import Dataset, Features, IterableDataset
from datasets import Image as ImageFeature
from datasets.iterable_dataset import _BaseExamplesIterable
from PIL import ExifTags, Image, ImageOps

from lockstep.errors import InputError
from lockstep.images.files import check_together, open_header
from lockstep.images.urls import is_url


def has_pictures(data: Any) -> bool:
    """Whether a column of a data set or a stream holds pictures, at any depth, or did before the user's own steps (`map`)."""
    given = [data.features] if isinstance(data, Dataset | IterableDataset) else []
    if isinstance(data, IterableDataset):
        given += _features_in(data._ex_iterable)
    return any(_own(feature) is not feature for features in given for feature in (features or {}).values())


def with_own_decoder(data: Any) -> Any:
    """A data set, or a stream, with pictures, that gives the same rows and reads pictures as `images/files.py` allows.

    A picture that a row names by a URL stays `{"bytes": None, "path": URL}`: `image_urls` says which are fetched.
    Reading a row raises an InputError if a picture cannot be read, or if those of the row are too large together.
    """
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

    def decode_batch(self, batch: dict[str, list[Any]], token_per_repo_id: Any = None) -> dict[str, list[Any]]:
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
