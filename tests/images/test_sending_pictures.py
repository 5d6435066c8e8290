"""How pictures are written for vLLM's server, when they are sent again, and which ones are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VLLM

from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.messages import SentPictures, check_encoded, check_places, encoded, features
from lockstep.engines.vllm.port.requests import (
    PictureRecorder,
    piece_places,
    piece_tensors,
    prompt_with_pictures,
)
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.images.pictures import Picture, PromptPictures

BYTES = 4 * 12 * 4 + 3 * 8


def pictures(*seeds: int) -> PromptPictures:
    """Pictures of 4 patches and `BYTES` bytes."""
    shown = tuple(
        Picture(torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)), torch.tensor([1, 2, 2]), 1)
        for seed in seeds
    )
    return PromptPictures(shown, np.arange(len(seeds)), 7, np.zeros((3, len(seeds)), dtype=np.int64), 0)


def missing(sent: SentPictures, shown: PromptPictures, capacity: int) -> list[str]:
    return [picture.digest for picture in sent.missing(shown, capacity)]


def tiles() -> PromptPictures:
    """A picture of two tiles and the whole one, with 1 placeholder each. A mark stands before each tile."""
    pixels = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    return PromptPictures((Picture(pixels, torch.tensor([1, 1, 2]), 3),), np.array([1, 3, 5]), 7)


@pytest.mark.parametrize("kind", ["patches", "tiles"])
def test_vllm_reads_the_tensors_that_it_would_get_in_process(kind: str) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    shown = pictures(0, 1) if kind == "patches" else tiles()
    inputs = prompt_with_pictures([7] * 6, shown)
    assert inputs["mm_hashes"]["image"] == list(shown.in_pieces.digests)
    for piece, whole in zip(shown.in_pieces.pictures, inputs["mm_kwargs"]["image"], strict=True):
        read = decode_mm_kwargs_item(encoded(piece))
        assert read.keys() == whole.keys()
        for name, field in whole.items():
            assert torch.equal(read[name].data, field.data)
            assert read[name].data.dtype == field.data.dtype
            assert type(read[name].field) is type(field.field)
            assert read[name].field.keep_on_cpu == field.field.keep_on_cpu


@pytest.mark.parametrize("kind", ["patches", "tiles"])
def test_vllm_makes_of_all_pieces_what_its_own_fields_make_of_all_pictures(kind: str) -> None:
    """The tensors that a model gets are those of vLLM's own description of the family."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    shown = (pictures(0, 1) if kind == "patches" else tiles()).in_pieces
    pixels, counts = (
        torch.cat([p.pixel_values for p in shown.pictures]),
        [len(p.pixel_values) for p in shown.pictures],
    )
    if kind == "patches":
        tensors = {"pixel_values": pixels, "image_grid_thw": torch.stack([p.grid for p in shown.pictures])}
        single = "image_grid_thw"
    else:
        mask = torch.ones(3, 4, 4, dtype=torch.bool)
        tensors = {"pixel_values": pixels, "pixel_attention_mask": mask, "num_patches": torch.tensor(counts)}
        single = "num_patches"
    fields = {name: MultiModalFieldConfig.flat_from_sizes("image", torch.tensor(counts)) for name in tensors}
    fields[single] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    theirs = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
    ours = prompt_with_pictures([7] * 6, shown)["mm_kwargs"]["image"]
    assert list(ours) == list(theirs)
    for name in tensors:
        made, due = ([item[name] for item in items] for items in (ours, theirs))
        assert torch.equal(made[0].field.reduce_data(made), due[0].field.reduce_data(due))


def test_each_tile_is_a_picture_whose_placeholders_stand_side_by_side() -> None:
    shown = tiles().in_pieces
    assert piece_places(shown) == [(1, 1), (3, 1), (5, 1)]
    assert [p.tokens for p in shown.pictures] == [1, 1, 1]
    assert torch.equal(torch.cat([p.pixel_values for p in shown.pictures]), tiles().pictures[0].pixel_values)
    assert len(set(shown.digests)) == 3
    # A picture of one tile, and one without tiles, are their own only piece.
    assert shown.in_pieces.digests == shown.digests
    assert pictures(0).in_pieces.digests == pictures(0).digests
    with pytest.raises(LockstepError, match="would take them for placeholders"):
        piece_places(replace(tiles(), pictures=(replace(tiles().pictures[0], tokens=3),)))


def test_a_worker_records_the_digest_of_what_it_encodes_and_nothing_of_other_programs() -> None:
    def item(tensors: dict[str, Any]) -> tuple[str, Any]:
        return "image", {name: SimpleNamespace(data=tensor) for name, tensor in tensors.items()}

    def encoded_as(tensors: dict[str, Any]) -> str | None:
        recorder = PictureRecorder(lambda: (["key"], [item(tensors)]))
        assert recorder.batch()[0] == ["key"]
        return recorder.digests.get("key")

    for shown in (pictures(0), tiles()):
        for piece in shown.in_pieces.pictures:
            rows, single = piece_tensors(piece)
            sent = rows | single
            assert encoded_as(sent) == piece.digest
            assert encoded_as({**sent, "pixel_values": -piece.pixel_values}) not in (piece.digest, None)
            assert encoded_as({**sent, "pixel_values": piece.pixel_values.half()}) is None
            assert encoded_as({**sent, "more": torch.zeros(1)}) is None
    # A padded tile would look otherwise to the model, with the same pixels.
    padded = {**sent, "pixel_attention_mask": torch.zeros(1, 4, 4, dtype=torch.bool)}
    assert encoded_as(padded) is None
    assert encoded_as({**sent, "num_patches": torch.tensor(2)}) is None


for needing in (
    test_vllm_reads_the_tensors_that_it_would_get_in_process,
    test_vllm_makes_of_all_pieces_what_its_own_fields_make_of_all_pictures,
):
    needing.pytestmark += VLLM  # type: ignore[attr-defined]


def test_half_of_the_servers_cache_is_counted_on_and_what_was_used_last_stays() -> None:
    sent, capacity = SentPictures(), 4 * BYTES
    a, b, c = pictures(0), pictures(1), pictures(2)
    for shown in (a, b, a, c):
        sent.use(shown, capacity)
    assert missing(sent, a, capacity) == []
    assert missing(sent, b, capacity) == [b.digests[0]]
    assert missing(sent, pictures(2, 1), capacity) == [b.digests[0]]
    sent.forget()
    assert missing(sent, a, capacity) == [a.digests[0]]


def test_a_picture_that_a_prompt_shows_twice_is_sent_once() -> None:
    assert missing(SentPictures(), pictures(0, 0, 1), 9 * BYTES) == [
        pictures(0).digests[0],
        pictures(1).digests[0],
    ]


def test_pictures_that_do_not_fit_into_the_servers_cache_are_refused() -> None:
    assert len(missing(SentPictures(), pictures(0, 1), 4 * BYTES)) == 2
    with pytest.raises(InputError, match=f"have {2 * BYTES} bytes.*--mm-processor-cache-gb"):
        SentPictures().missing(pictures(0, 1), 4 * BYTES - 1)


def test_no_worker_may_have_encoded_anything_else_than_what_was_sent() -> None:
    (picture,) = pictures(0).pictures
    own, other, none = ({picture.digest: found} for found in (picture.digest, "00", None))
    check_encoded([picture], [own, own], "here")
    # The later stages of a pipeline encode no pictures.
    check_encoded([picture], [own, none], "here")
    for wrong in ([own, other], [other, none], [none, none], []):
        with pytest.raises(ProofError, match="the server at here") as found:
            check_encoded([picture], wrong, "here")
        assert found.value.check == "echo"


@pytest.mark.parametrize("wrong", [None, {}, {"image": []}, {"image": [{"offset": 1, "length": 1}]}])
def test_pictures_must_be_at_the_places_for_which_they_were_sent(wrong: Any) -> None:
    seeing = GenerationRequest(RequestKey("a", 0), (7, 5), Sampling(1), 0, pictures(0))
    blind = GenerationRequest(RequestKey("b", 0), (5,), Sampling(1), 0)
    places = features(pictures(0))["mm_placeholders"]
    check_places(seeing, {"mm_placeholders": places})
    check_places(blind, {"mm_placeholders": None})
    for request, answer in ((seeing, wrong), (blind, places)):
        with pytest.raises(ProofError, match=str(request.key)) as found:
            check_places(request, {"mm_placeholders": answer})
        assert found.value.check == "echo"
