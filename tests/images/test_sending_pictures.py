"""How pictures are written for vLLM's server, when they are sent again, and which ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import VLLM

from lockstep.engines.http.server_pictures import SentPictures, check_encoded, check_places, encoded, features
from lockstep.engines.protocol import GenerationRequest, RequestKey, Sampling
from lockstep.engines.vllm.pictures import prompt_with_pictures
from lockstep.errors import InputError, ProofError
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


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
@pytest.mark.parametrize("place", [0, 1])
def test_vllm_reads_the_tensors_that_it_would_get_in_process(name: str, place: int) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    shown = pictures(0, 1)
    read = decode_mm_kwargs_item(encoded(shown.pictures[place]))
    whole = prompt_with_pictures([7, 7], shown)["mm_kwargs"]["image"][place]
    assert read.keys() == whole.keys()
    assert torch.equal(read[name].data, whole[name].data)
    assert read[name].data.dtype == whole[name].data.dtype
    assert type(read[name].field) is type(whole[name].field)
    assert read[name].field.keep_on_cpu == whole[name].field.keep_on_cpu


test_vllm_reads_the_tensors_that_it_would_get_in_process.pytestmark += VLLM  # type: ignore[attr-defined]


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
    assert missing(SentPictures(), pictures(0, 0, 1), 9 * BYTES) == [pictures(0).digests[0], pictures(1).digests[0]]


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
