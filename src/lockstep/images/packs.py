"""How pictures enter a forward: as arguments of the model's own forward, or as parts of a pack.

All parts of all pictures have the same placeholder id. While the paths of a pack are compared, each part therefore has
a number of its own in place of the id: two nodes are one node only if they are the same part of the same picture, by
its digest. The trainer computes each picture of a pack once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lockstep.images.pictures import NO_PICTURES, Picture, PromptPictures

Ints = NDArray[np.int64]
# Larger than any id, and small enough for the sorting of paths, which compares 32 bits.
_FIRST = 1 << 30


def model_inputs(shown: Iterable[PromptPictures], input_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The arguments by which a model of transformers takes pictures in its own forward; none without pictures.

    Args:
        shown: the pictures of each row.
        input_ids: (B, L) ids. Their placeholders are those of the pictures.
    """
    known = [pictures for pictures in shown if pictures]
    if not known:
        return {}
    inputs = _pixel_inputs([picture for pictures in known for picture in pictures.pictures], input_ids.device)
    if known[0].positions is None:
        return inputs
    # Without these marks the model would count positions in one dimension, and say nothing.
    return {**inputs, "mm_token_type_ids": (input_ids == known[0].placeholder).int()}


@dataclass(frozen=True, slots=True)
class PackPictures:
    """The pictures of one pack. It is false if there are none.

    Attributes:
        pictures: each picture once, however many sequences show it.
        rows: (F,) int64, for each placeholder of the pack's ids the row of its vector among those of all `pictures`.
        positions: (axes, T) position ids of the pack's nodes; None: the model counts them as those of any text.
    """

    pictures: tuple[Picture, ...] = ()
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    positions: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self.pictures)

    def position_ids(self, of_text: torch.Tensor) -> torch.Tensor:
        """The position ids of the pack's nodes: (B, L) those of text, or (axes, B, L) the model's own."""
        return of_text if self.positions is None else self.positions.unflatten(1, of_text.shape)

    def arguments(self, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
        """The arguments by which the model puts pictures in the place of the pack's placeholders."""
        if not self.pictures:
            return {}
        found = model.base_model.get_image_features(**_pixel_inputs(self.pictures, device), return_dict=True)
        rows = self.rows.to(device)
        # The model fills its placeholders in the order of the ids with these vectors.
        if self.pictures[0].in_tiles:
            parts: torch.Tensor = found.pooler_output
            found.pooler_output = parts.flatten(0, 1)[rows].unflatten(0, (-1, parts.shape[1]))
        else:
            found.pooler_output = (torch.cat(tuple(found.pooler_output))[rows],)
        # Qwen3-VL adds further vectors of each part to the states of its first layers.
        if layers := getattr(found, "deepstack_features", None):
            found.deepstack_features = [(torch.cat(tuple(parts))[rows],) for parts in layers]
        return {"mm_encoder_outputs": {"image": found}}


NO_PACK_PICTURES = PackPictures()


class PictureNumbers:
    """Numbers for all parts of the pictures that some sequences show."""

    def __init__(self, shown: Sequence[PromptPictures]) -> None:
        known = [pictures for pictures in shown if pictures]
        self._pictures = list({p.digest: p for pictures in known for p in pictures.pictures}.values())
        sizes = np.array([p.tokens for p in self._pictures], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = dict(zip((p.digest for p in self._pictures), self._ends - sizes, strict=True))
        self._placeholder = known[0].placeholder if known else NO_PICTURES.placeholder

    def path(self, ids: Ints, shown: PromptPictures) -> Ints:
        """Ids that show pictures, with the number of each part in place of its id."""
        if not shown:
            return ids
        path = np.array(ids, dtype=np.int64)
        for picture, places in zip(shown.pictures, shown.places_of_each, strict=True):
            number = _FIRST + self._starts[picture.digest]
            path[places] = np.arange(number, number + picture.tokens)
        return path

    def split(
        self, numbered: Ints, shown: Sequence[PromptPictures], nodes: Sequence[Ints]
    ) -> tuple[Ints, PackPictures]:
        """The ids of a pack's nodes, which are numbered as in `path`, and the pack's pictures.

        `shown` and `nodes` are as in `position_ids`.
        """
        if not self._pictures:
            return numbered, NO_PACK_PICTURES
        is_part = numbered >= _FIRST
        parts = numbered[is_part] - _FIRST
        if not len(parts):
            return numbered, NO_PACK_PICTURES
        owners = np.searchsorted(self._ends, parts, side="right")
        present, places = np.unique(owners, return_inverse=True)
        pictures = tuple(self._pictures[i] for i in present)
        sizes = np.array([p.tokens for p in pictures])
        own_starts = np.cumsum(sizes) - sizes
        all_starts = self._ends[present] - sizes
        rows = parts - all_starts[places] + own_starts[places]
        ids = np.where(is_part, self._placeholder, numbered)
        return ids, PackPictures(pictures, torch.from_numpy(rows), position_ids(shown, nodes, ids.size))


def position_ids(shown: Sequence[PromptPictures], nodes: Sequence[Ints], size: int) -> torch.Tensor | None:
    """(axes, size) position ids of a pack's nodes; None: the model counts them as those of any text.

    Args:
        shown: the pictures of each sequence of the pack.
        nodes: the nodes of each sequence's path, among all nodes of the pack.
    """
    known = next(pictures.positions for pictures in shown if pictures)
    if known is None:
        return None
    found = np.zeros((len(known), size), dtype=np.int64)
    for pictures, own in zip(shown, nodes, strict=True):
        found[:, own] = pictures.positions_of(len(own)) if pictures else np.arange(len(own))
    return torch.from_numpy(found)


def _pixel_inputs(pictures: Sequence[Picture], device: torch.device) -> dict[str, torch.Tensor]:
    """The pixels of at least one picture of one family, as the vision tower of a model of transformers takes them."""
    pixels = torch.cat([p.pixel_values for p in pictures]).to(device)
    if pictures[0].in_tiles:
        # The model takes rows of tiles, and fills the placeholders of all rows in the order of all tiles.
        return {"pixel_values": pixels[None]}
    return {"pixel_values": pixels, "image_grid_thw": torch.stack([p.grid for p in pictures]).to(device)}
