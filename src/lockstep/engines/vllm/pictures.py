"""Pictures in vLLM's form: the prompt with the very tensors that the trainer has made, past vLLM's own image processor.

A prompt whose placeholders are repeated already must not go to vLLM with pictures as `multi_modal_data`: vLLM 0.32.0 repeats the
placeholders a second time and says nothing. `mm_input` takes processed pictures instead. The digest of a picture is its key in
vLLM's caches.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.images.pictures import PromptPictures


def picture_arguments() -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a model that reads pictures."""
    return {
        # The trainer's pixels are normalised already.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
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
