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
    grids = torch.stack([picture.grid for picture in shown])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    tensors: Any = {"pixel_values": torch.cat([picture.pixel_values for picture in shown]), "image_grid_thw": grids}
    places = [
        PlaceholderRange(offset=start, length=picture.tokens)
        for start, picture in zip(pictures.starts.tolist(), shown, strict=True)
    ]
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(tensors, fields),
        {"image": list(pictures.digests)},
        {"image": places},
    )


def holds_no_pictures(worker: Any) -> bool:
    """Whether a worker keeps no picture that was computed from older weights."""
    return not worker.model_runner.encoder_cache
