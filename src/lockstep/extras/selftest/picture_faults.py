"""Faults of pictures, on a stage whose prompts show two pictures each: T3 and its relatives.

The pictures of all prompts have one size, so that nothing but their pixels tells them apart. A fault in what the
engine sees keeps the digest of the true picture (`Disguised`): otherwise the digests in the answer would show it
before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

import lockstep.images.packs as packs_module
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.extras.selftest.seams import Fault, Patch, each_answer_becomes, each_request_becomes, is_vllm
from lockstep.extras.verify.stage import Stage
from lockstep.images.packs import PackPictures
from lockstep.images.pictures import Picture, PromptPictures
from lockstep.tokens.arrays import whole_numbers

Pictures = tuple[Picture, ...]


@dataclass(frozen=True, eq=False)
class Disguised(Picture):
    """A picture that has the digest of another picture of its size."""

    true: Picture | None = None

    @property
    def digest(self) -> str:
        assert self.true is not None
        return self.true.digest

    @property
    def pieces(self) -> Pictures:
        assert self.true is not None
        plain = Picture(self.pixel_values, self.grid, self.tokens).pieces
        return tuple(disguised(own, true) for own, true in zip(plain, self.true.pieces, strict=True))


def disguised(picture: Picture, true: Picture) -> Disguised:
    return Disguised(picture.pixel_values, picture.grid, picture.tokens, true=true)


def _engine_sees(stage: Stage, other: Callable[[PromptPictures, str], Pictures]) -> Patch:
    """Under the digests of a prompt's pictures, the engine sees what `other` gives for them and the prompt's name."""

    def changed(request: GenerationRequest) -> GenerationRequest:
        shown = request.pictures
        if not shown:
            return request
        seen = zip(other(shown, request.key.prompt_id), shown.pictures, strict=True)
        disguises = tuple(disguised(picture, true) for picture, true in seen)
        return replace(request, pictures=replace(shown, pictures=disguises))

    return each_request_becomes(stage, changed)


def _another_rows(stage: Stage) -> Patch:
    shown = {p.prompt_id: p.pictures.pictures for p in stage.prompts if p.pictures}
    names = list(shown)
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    return _engine_sees(stage, lambda true, name: shown[following[name]])


def _same_size(stage: Stage) -> Patch:
    def mirrored(picture: Picture) -> Picture:
        return replace(picture, pixel_values=picture.pixel_values.flip(-1))

    return _engine_sees(stage, lambda true, name: tuple(map(mirrored, true.pictures)))


def _another_resize(stage: Stage) -> Patch:
    """The pictures of the data were made smaller, and larger again, before they were processed for the engine."""
    reader = stage.trainer.source.reader

    def coarse(image: Image.Image) -> Image.Image:
        width, height = image.size
        small = image.resize((width // 2, height // 2), Image.Resampling.NEAREST)
        return small.resize((width, height), Image.Resampling.NEAREST)

    seen: dict[str, Pictures] = {}
    for prompt in stage.prompts:
        images = [coarse(image) for image in prompt.columns["images"]]
        _, shown = reader.read({"prompt": prompt.source, "images": images})
        seen[prompt.prompt_id] = shown.pictures
    return _engine_sees(stage, lambda true, name: seen[name])


def _wrong_order(stage: Stage) -> Patch:
    return _engine_sees(stage, lambda true, name: true.pictures[::-1])


def _expanded_twice(stage: Stage) -> Patch:
    """Placeholders are repeated again. The prompt keeps its length, so that it fits."""

    def twice(request: GenerationRequest) -> GenerationRequest:
        if not request.pictures:
            return request
        repeats = np.where(request.prompt_ids == request.pictures.placeholder, 2, 1)
        ids = whole_numbers(np.repeat(request.prompt_ids, repeats)[: len(request.prompt_ids)])
        return replace(request, prompt_ids=ids)

    return each_request_becomes(stage, twice)


def _left_out(stage: Stage) -> Patch:
    return patch.object(PackPictures, "arguments", lambda *given: {})


def _in_one_dimension(stage: Stage) -> Patch:
    def flat(shown: Any, nodes: Any, size: int) -> torch.Tensor:
        found = np.zeros((3, size), dtype=np.int64)
        for own in nodes:
            found[:, own] = np.arange(len(own))
        return torch.from_numpy(found)

    return patch.object(packs_module, "position_ids", flat)


def _placeholder_sampled(stage: Stage) -> Patch:
    def sampled(answer: Completion) -> Completion:
        if not answer.pictures:
            return answer
        ids = whole_numbers([answer.pictures.placeholder, *answer.token_ids[1:]])
        return replace(answer, token_ids=ids)

    return each_answer_becomes(stage, sampled)


def _cache_kept(stage: Stage) -> Patch:
    """vLLM keeps pictures that older weights of the tower have computed."""
    return patch.object(stage.engine.llm.llm_engine, "reset_encoder_cache", lambda: None)  # type: ignore[attr-defined]


def _only_vllm(why: str) -> Callable[[Stage], str]:
    return lambda stage: "" if is_vllm(stage) else why


def _has_axes(stage: Stage) -> str:
    known = [p.pictures.positions for p in stage.prompts if p.pictures]
    return "" if known and known[0] is not None else "this model counts the parts of a picture as any text"


_COUNTED = _only_vllm("the model's own forward counts its placeholders")
_NOT_KEPT = _only_vllm("this engine keeps no pictures")
PICTURE_FAULTS = (
    Fault("T3", "placeholders of pictures repeated twice", _expanded_twice, _COUNTED),
    Fault("T3b", "the engine sees the pictures of another row", _another_rows),
    Fault("T3c", "the engine sees other pictures of the same size", _same_size),
    Fault("T3d", "the engine's pictures were resized in another way", _another_resize),
    Fault("T3e", "the engine sees the pictures of a prompt in the wrong order", _wrong_order),
    Fault("T3f", "the trainer leaves the pixels out", _left_out),
    Fault("T3g", "the trainer counts the parts of a picture in one dimension", _in_one_dimension, _has_axes),
    Fault("T3h", "a placeholder of pictures is sampled", _placeholder_sampled),
    Fault("W6b", "pictures computed from older weights outlive a push", _cache_kept, _NOT_KEPT),
)
