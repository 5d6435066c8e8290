"""The fields of runs with pictures.

`OnlineConfig` inherits the fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import InputError
from lockstep.images.limits import PictureLimits
from lockstep.images.urls import ImageUrls
from lockstep.training.config.option import option


@dataclass
class ImageFields:
    """The fields of pictures."""

    freeze_vision_tower: bool = option(
        False,
        "Keep the vision tower and its projector as they are; with an adapter, also the adapter in them.",
        group="model",
    )
    min_pixels: int | None = option(
        None,
        "A smaller picture is enlarged to this many pixels. Default: preprocessor_config.json. Not for tiles.",
        group="data",
    )
    max_pixels: int | None = option(
        None, "A larger picture is shrunk to at most this many pixels. Default: preprocessor_config.json.", group="data"
    )
    limit_mm_per_prompt: dict | str | None = option(
        None,
        'Largest number of pictures per conversation, as {"image": 4}. A row with more is refused; a tool\'s result with one '
        "more is an error for the model.",
        group="data",
        mapping=True,
    )
    image_urls: list[str] | None = option(
        None, "Beginnings of URLs from which pictures may be fetched. Default: no picture is fetched.", group="data"
    )

    def check_images(self) -> None:
        """Check the fields.

        Raises:
            InputError: a limit is not a positive number, they contradict each other, or one is for something else than pictures; or
                `image_urls` has something else than beginnings of URLs.
        """
        for name in ("min_pixels", "max_pixels"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise InputError(f"{name}={given}; it must be 1 or more")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InputError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")
        limit = self.limit_mm_per_prompt
        count = limit.get("image") if isinstance(limit, dict) and limit.keys() == {"image"} else None
        if limit is not None and (type(count) is not int or count < 1):
            raise InputError(
                f'limit_mm_per_prompt={limit!r}; it must be {{"image": N}} with N of 1 or more: only pictures are supported'
            )

        if isinstance(self.image_urls, str):
            raise InputError(f"image_urls={self.image_urls!r:.100}; it must be a list of beginnings of URLs")
        ImageUrls(self.image_urls or ())

    @property
    def picture_limits(self) -> PictureLimits:
        """The limits on pictures."""
        limit = self.limit_mm_per_prompt
        return PictureLimits(self.min_pixels, self.max_pixels, limit["image"] if isinstance(limit, dict) else None)
