"""Pictures in vLLM's form. vLLM gets the tensors that the trainer has made, and its own image processor is not used.

The prompt already has one placeholder per image token. If its pictures went to vLLM as `multi_modal_data`, vLLM 0.32.0 would
silently repeat the placeholders a second time. Therefore the processed pictures go to vLLM through `mm_input`. Each tile of a
picture is sent as a separate picture, called a piece (`Picture.pieces`). The placeholders of a piece are consecutive, and a request
to a server can describe only consecutive placeholders. The digest of a piece is its key in vLLM's caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.errors import LockstepError
from lockstep.images.pictures import Picture, PromptPictures

# Number of pictures whose digests a worker remembers.
_RECORDED = 65_536


def picture_arguments(*, cache_gb: int = 0) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, or of vLLM's server, for a model that reads pictures.

    Args:
        cache_gb: GiB of vLLM's cache of inputs. A server needs it: a picture is sent once, and its requests name the digest.
    """
    return {
        # The trainer has already normalised the pixels.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": cache_gb,
        "limit_mm_per_prompt": {"video": 0},
        "skip_mm_profiling": True,
    }


def piece_tensors(piece: Picture) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a piece of a picture, by vLLM's names.

    Returns:
        The tensors with one row per patch or tile, and the tensors that describe the whole piece.
    """
    if not piece.in_tiles:
        return {"pixel_values": piece.pixel_values}, {"image_grid_thw": piece.grid}
    # No tile is padded (`images/processing.py`).
    mask = torch.ones((), dtype=torch.bool).expand_as(piece.pixel_values[:, 0])
    counts = torch.tensor(len(piece.pixel_values))
    return {"pixel_values": piece.pixel_values, "pixel_attention_mask": mask}, {"num_patches": counts}


def prompt_with_pictures(prompt_ids: list[int], pictures: PromptPictures) -> Any:
    """The prompt of a request, as `LLMEngine.add_request` takes it."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    def item(piece: Picture) -> MultiModalKwargsItem:
        rows, single = piece_tensors(piece)
        of_rows = MultiModalFlatField(slices=[slice(0, len(piece.pixel_values))])
        fields = {name: MultiModalFieldElem(tensor, of_rows) for name, tensor in rows.items()}
        of_single = MultiModalBatchedField(keep_on_cpu=True)
        return MultiModalKwargsItem(fields | {n: MultiModalFieldElem(t, of_single) for n, t in single.items()})

    pieces = pictures.in_pieces
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems({"image": [item(piece) for piece in pieces.pictures]}),
        {"image": list(pieces.digests)},
        {"image": [PlaceholderRange(*place) for place in piece_places(pieces)]},
    )


def piece_places(pieces: PromptPictures) -> list[tuple[int, int]]:
    """For each piece, the index of its first placeholder in the prompt's ids, and the number of its placeholders.

    Args:
        pieces: pictures in pieces.

    Raises:
        LockstepError: there are other ids between the placeholders of a piece. vLLM would replace these ids by a part of the piece.
    """
    places = [(int(own[0]), len(own)) for own in pieces.places_of_each]
    if any(own[-1] - own[0] >= len(own) for own in pieces.places_of_each):
        raise LockstepError(
            "there are other ids between the placeholders of a tile, and vLLM would take them for placeholders"
        )
    return places


def holds_no_pictures(worker: Any) -> bool:
    """Whether a worker's encoder cache is empty: it then keeps no encoded picture of older weights."""
    return not worker.model_runner.encoder_cache


def picture_cache_bytes(model_config: Any) -> int:
    """Bytes of the cache in which vLLM's engine keeps the tensors of pictures by their digest; 0: there is no such cache."""
    found = model_config.multimodal_config
    # With vLLM's other kinds of cache, a request cannot name a picture by its digest alone.
    return int(found.mm_processor_cache_gb * (1 << 30)) if found and found.mm_processor_cache_type == "lru" else 0


class PictureRecorder:
    """Records the digest of the tensors of every picture that a worker encodes.

    Args:
        batch: vLLM's method that returns the keys and the tensors of the pictures that the next step encodes.
    """

    def __init__(self, batch: Callable[..., Any]) -> None:
        self._batch = batch
        # The digest of the encoded tensors, by their key in vLLM's caches.
        self.digests: OrderedDict[str, str] = OrderedDict()

    def batch(self, *args: Any) -> Any:
        """Replaces vLLM's method, and returns the same result."""
        found = self._batch(*args)
        keys, items = found[:2]
        for key, (_, item) in zip(keys, items, strict=True):
            if (piece := _piece_in({name: field.data for name, field in item.items()})) is not None:
                self.digests[key] = piece.digest
                self.digests.move_to_end(key)
                if len(self.digests) > _RECORDED:
                    self.digests.popitem(last=False)
        return found


def _piece_in(tensors: Mapping[str, Any]) -> Picture | None:
    """The piece of a picture that has these tensors. None: another program has made the tensors, or a tile is padded."""
    found: dict[str, torch.Tensor] = {name: t.cpu().contiguous() for name, t in tensors.items() if hasattr(t, "cpu")}
    pixels = found.get("pixel_values")
    if pixels is None or pixels.dtype != torch.float32:
        return None
    piece = Picture(pixels, found.get("image_grid_thw", torch.tensor([1, 0, 0])), 0)
    rows, single = piece_tensors(piece)
    expected = rows | single
    is_ours = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return piece if is_ours else None


def record_pictures(worker: Any) -> None:
    """Install a recorder in a vLLM worker, if there is none yet. The two model runners of vLLM prepare pictures in different
    methods."""
    runner = worker.model_runner
    if hasattr(runner, "lockstep_pictures"):
        return
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    owner, name = (runner, "_batch_mm_inputs_from_scheduler") if second is None else (second, "prepare_mm_inputs")
    if hasattr(owner, name):
        runner.lockstep_pictures = recorder = PictureRecorder(getattr(owner, name))
        setattr(owner, name, recorder.batch)


def recorded_digests(worker: Any, digests: Sequence[str]) -> dict[str, str | None]:
    """For each digest in a request, the digest of the tensors that the worker has encoded for it; None: it has encoded none."""
    recorder = getattr(worker.model_runner, "lockstep_pictures", None)
    return {digest: None if recorder is None else recorder.digests.get(digest) for digest in digests}
