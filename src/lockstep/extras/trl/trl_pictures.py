"""The images that TRL's trainers pass to their generation object, as the pictures of our engines.

TRL's processor has already put each image's ids into the prompt. Each rank runs that processor's image processor over
its images, and sends the pixels to the rank with the engine, each picture once. The engine then computes with the
pixels that the trainer computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError, LockstepError
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.images.prompts import ImagePrompts
from lockstep.models.adapters import causal_model
from lockstep.models.vision import FAMILIES, reads_pictures
from lockstep.rollouts.across_ranks.pictures_wire import picture_from_wire, picture_to_wire
from lockstep.tokens.arrays import Ids, whole_numbers

# The ids of one prompt, with the pictures that are in them.
Shown = tuple[Ids, PromptPictures | None]


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor for text and images, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


class TrlPictures:
    """Reads one trainer's images.

    Args:
        model: the trained model.
        processing_class: TRL's `processing_class`.

    Raises:
        InputError: the tokenizer lacks a mark that stands beside the model's pictures.
    """

    def __init__(self, model: torch.nn.Module, processing_class: Any) -> None:
        processor = getattr(processing_class, "image_processor", None)
        inner: PreTrainedModel = causal_model(model)
        self._prompts: ImagePrompts | None = None
        if processor is not None and reads_pictures(inner.config):
            self._prompts = ImagePrompts(
                inner, tokenizer_of(processing_class), inner.config.name_or_path, processor=processor
            )

    def part(self, prompts: Sequence[Sequence[int]], images: Sequence[Any] | None) -> dict[str, Any]:
        """One rank's prompts and pictures, in JSON types and arrays.

        Raises:
            InputError: a prompt is not a list of token ids, the model reads no images, an image cannot be used, or a prompt has not
                the ids of its images.
        """
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, str) or not all(isinstance(token, int) for token in prompt):
                raise InputError(f"prompt {row} is not a list of token ids: {prompt!r:.80}")
        rows = [list(row or ()) for row in images] if images is not None else [[] for _ in prompts]
        pictures: dict[str, Picture] = {}
        # TRL repeats one image object for all completions of a prompt.
        known: dict[int, Picture] = {}
        shown: list[list[str]] = []
        for row, (ids, own) in enumerate(zip(prompts, rows, strict=True)):
            for image in own:
                if id(image) not in known:
                    known[id(image)] = self._picture(image)
            found = [known[id(image)] for image in own]
            self._check(row, ids, found)
            pictures |= {picture.digest: picture for picture in found}
            shown.append([picture.digest for picture in found])
        return {
            "prompts": [list(ids) for ids in prompts],
            "shown": shown,
            "pictures": {digest: picture_to_wire(picture) for digest, picture in pictures.items()},
        }

    def placed(self, part: Mapping[str, Any]) -> list[Shown]:
        """The prompts of a rank's part, with their pictures in their places.

        Raises:
            LockstepError: a picture has changed on its way.
        """
        pictures = {digest: picture_from_wire(found) for digest, found in part["pictures"].items()}
        if any(picture.digest != digest for digest, picture in pictures.items()):
            raise LockstepError("a picture changed on its way to the rank that holds the engine")
        rows = [
            (whole_numbers(ids), [pictures[digest] for digest in shown])
            for ids, shown in zip(part["prompts"], part["shown"], strict=True)
        ]
        if self._prompts is None:
            return [(ids, None) for ids, _ in rows]
        return [(ids, self._prompts.placed(ids, own)) for ids, own in rows]

    def _picture(self, image: Any) -> Picture:
        if self._prompts is None:
            raise InputError(
                "this model is shown no images: give a model of a family that reads them "
                f"({', '.join(FAMILIES)}) and its processor as processing_class, or prompts of text only"
            )
        return self._prompts.picture(image)

    def _check(self, row: int, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        if self._prompts is None:
            return
        found, due = list(ids).count(self._prompts.placeholder), sum(picture.tokens for picture in pictures)
        if found != due:
            raise InputError(
                f"prompt {row} has {found} ids that stand for parts of images, and its {len(pictures)} images have {due}: a "
                "completion sampled such an id, a prompt's text contains one, or a rollout function changed the images"
            )
