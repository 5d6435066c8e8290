"""Pictures in vLLM's form: the prompt with the very tensors that the trainer has made, past vLLM's own image processor.

A prompt whose placeholders are repeated already must not go to vLLM with pictures as `multi_modal_data`: vLLM 0.32.0 repeats the
placeholders a second time and says nothing. `mm_input` takes processed pictures instead. A tile goes to vLLM as a picture of its
own (`Picture.pieces`): the placeholders of a vLLM picture then stand side by side, which is all that a request to a server can say
of them. The digest of a piece is its key in vLLM's caches.
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
        # The trainer's pixels are normalised already.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": cache_gb,
        "limit_mm_per_prompt": {"video": 0},
        "skip_mm_profiling": True,
    }


def piece_tensors(piece: Picture) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a piece of a picture, by vLLM's names.

    Returns:
        Those with one row per patch or tile, and those that describe the whole piece.
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

    shown = pictures.in_pieces
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems({"image": [item(piece) for piece in shown.pictures]}),
        {"image": list(shown.digests)},
        {"image": [PlaceholderRange(*place) for place in piece_places(shown)]},
    )


def piece_places(shown: PromptPictures) -> list[tuple[int, int]]:
    """Index in the prompt's ids of the first placeholder of each piece, and the number of its placeholders.

    Args:
        shown: pictures in pieces.

    Raises:
        LockstepError: other ids stand between the placeholders of a piece. vLLM would put a part of the piece in their place.
    """
    places = [(int(own[0]), len(own)) for own in shown.places_of_each]
    if any(own[-1] - own[0] >= len(own) for own in shown.places_of_each):
        raise LockstepError(
            "other ids stand between the placeholders of a tile, and vLLM would take them for placeholders"
        )
    return places


def holds_no_pictures(worker: Any) -> bool:
    """Whether a worker keeps no picture that was computed from older weights."""
    return not worker.model_runner.encoder_cache


def picture_cache_bytes(model_config: Any) -> int:
    """Bytes of the cache in which vLLM's engine keeps the tensors of pictures by their digest; 0: it has none."""
    found = model_config.multimodal_config
    # In vLLM's other kinds of caches, a request cannot name a picture by its digest alone.
    return int(found.mm_processor_cache_gb * (1 << 30)) if found and found.mm_processor_cache_type == "lru" else 0


class PictureRecorder:
    """Stands before the encoder of a worker, and records the digest of the tensors of every picture that it encodes.

    Args:
        batch: vLLM's method that gives the keys and the tensors of the pictures that the next step encodes.
    """

    def __init__(self, batch: Callable[..., Any]) -> None:
        self._batch = batch
        # Digest of the encoded tensors by the key that vLLM's caches have for them.
        self.digests: OrderedDict[str, str] = OrderedDict()

    def batch(self, *args: Any) -> Any:
        """vLLM's method, with the same result."""
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
    """The piece of a picture that vLLM encodes. None: these are the tensors of another program, or a tile is padded."""
    found: dict[str, torch.Tensor] = {name: t.cpu().contiguous() for name, t in tensors.items() if hasattr(t, "cpu")}
    pixels = found.get("pixel_values")
    if pixels is None or pixels.dtype != torch.float32:
        return None
    piece = Picture(pixels, found.get("image_grid_thw", torch.tensor([1, 0, 0])), 0)
    rows, single = piece_tensors(piece)
    due = rows | single
    is_ours = found.keys() == due.keys() and all(torch.equal(found[name], due[name]) for name in due)
    return piece if is_ours else None


def record_pictures(worker: Any) -> None:
    """Put a recorder before the encoder of a vLLM worker, once. Each of vLLM's two model runners has a method of its own for it."""
    runner = worker.model_runner
    if hasattr(runner, "lockstep_pictures"):
        return
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    owner, name = (runner, "_batch_mm_inputs_from_scheduler") if second is None else (second, "prepare_mm_inputs")
    if hasattr(owner, name):
        runner.lockstep_pictures = recorder = PictureRecorder(getattr(owner, name))
        setattr(owner, name, recorder.batch)


def recorded_digests(worker: Any, digests: Sequence[str]) -> dict[str, str | None]:
    """For each digest, the digest of the tensors that a worker has encoded under it; None: it has encoded none."""
    recorder = getattr(worker.model_runner, "lockstep_pictures", None)
    return {digest: None if recorder is None else recorder.digests.get(digest) for digest in digests}
