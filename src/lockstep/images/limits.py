"""Limits on the pictures of a run: their sizes, and their number per conversation.

They come from the config. The trainer processes all pictures, so the engine needs no limits of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from lockstep.errors import InputError
from lockstep.models.vision import reads_tiles


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
            InputError: the family has no such limit, or the limit is smaller than the smallest picture of the model.
        """
        if self.min_pixels is None and self.max_pixels is None:
            return
        if reads_tiles(config):
            self._set_tiles(processor)
        else:
            self._set_patches(processor)

    def check_count(self, count: int) -> None:
        """Check the number of pictures of a prompt, or of a whole conversation.

        Raises:
            InputError: there are too many.
        """
        if self.per_prompt is not None and count > self.per_prompt:
            raise InputError(
                f"{count} pictures, and limit_mm_per_prompt allows {self.per_prompt} per conversation: raise it, or show fewer"
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
                "min_pixels is not supported for models that cut pictures into tiles: they enlarge every picture to the `size` of "
                "their preprocessor_config.json; leave it out"
            )
        if (tiles := math.isqrt(self.max_pixels) // side) < 1:
            raise InputError(
                f"max_pixels={self.max_pixels}, and one tile of this model has {side**2} pixels: raise it to that"
            )
        # A picture is resized so that its longer side has this length, and each side then is a whole number of tiles.
        processor.size = {"longest_edge": min(tiles * side, processor.size["longest_edge"])}


NO_LIMITS = PictureLimits()
