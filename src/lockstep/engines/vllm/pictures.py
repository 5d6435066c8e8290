"""Pictures in vLLM's form: the prompt with the very tensors that the trainer has made, past vLLM's own image processor.

A prompt whose placeholders are repeated already must not go to vLLM with pictures as `multi_modal_data`: vLLM 0.32.0 repeats the
placeholders a second time and says nothing. `mm_input` takes processed pictures instead. The digest of a picture is its key in
vLLM's caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.images.pictures import Picture, PromptPictures

_TENSORS = {"pixel_values", "image_grid_thw"}
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


def prompt_with_pictures(prompt_ids: list[int], pictures: PromptPictures) -> Any:
    """The prompt of a request, as `LLMEngine.add_request` takes it."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    shown = pictures.pictures
    pixels, grids = torch.cat([picture.pixel_values for picture in shown]), torch.stack([p.grid for p in shown])
    counts = torch.tensor([len(picture.pixel_values) for picture in shown])
    of_pixels, of_pictures = MultiModalFieldConfig.flat_from_sizes, MultiModalFieldConfig.batched
    if shown[0].in_tiles:
        tensors: Any = {"pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, 0], dtype=torch.long)}
        fields = {name: of_pixels("image", counts) for name in tensors}
        tensors |= {"num_patches": counts}
        fields |= {"num_patches": of_pictures("image", keep_on_cpu=True)}
    else:
        tensors = {"pixel_values": pixels, "image_grid_thw": grids}
        fields = {
            "pixel_values": of_pixels("image", counts),
            "image_grid_thw": of_pictures("image", keep_on_cpu=True),
        }
    places = []
    for own in pictures.places_of_each:
        length = int(own[-1] - own[0]) + 1
        is_embed = torch.zeros(length, dtype=torch.bool)
        is_embed[own - own[0]] = True
        # Marks may stand between the placeholders of a picture. vLLM must not put a part of it in their place.
        places.append(PlaceholderRange(int(own[0]), length, None if is_embed.all() else is_embed))
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(tensors, fields),
        {"image": list(pictures.digests)},
        {"image": places},
    )


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
            # Another program's pictures may have other tensors, or pixels in half precision.
            if item.keys() >= _TENSORS and item["pixel_values"].data.dtype == torch.float32:
                pixels, grid = (item[name].data.cpu().contiguous() for name in ("pixel_values", "image_grid_thw"))
                self.digests[key] = Picture(pixels, grid, 0).digest
                self.digests.move_to_end(key)
                if len(self.digests) > _RECORDED:
                    self.digests.popitem(last=False)
        return found


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
