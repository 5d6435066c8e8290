"""Computes the pictures of a pack with the model's vision tower, each picture once, and hands them to the model's own forward.

The gradient passes through to the tower. `watch/rescoring.py` computes the same in another way: it lets the model's
forward do everything with the pictures of one row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.images.pictures import pixel_inputs
from lockstep.training.batch.pack import Pack
from lockstep.training.batch.pictures import PackPictures


def picture_arguments(model: PreTrainedModel, pack: Pack, pictures: PackPictures) -> dict[str, Any]:
    """The arguments by which the model puts pictures in the place of a pack's placeholders."""
    inputs = pixel_inputs(pictures.pictures, pack.input_ids.device)
    found = model.base_model.get_image_features(**inputs, return_dict=True)
    rows = pictures.rows.to(pack.input_ids.device)
    # The model fills its placeholders in the order of the ids with these vectors.
    if pictures.pictures[0].in_tiles:
        parts: torch.Tensor = found.pooler_output
        found.pooler_output = parts.flatten(0, 1)[rows].unflatten(0, (-1, parts.shape[1]))
    else:
        found.pooler_output = (torch.cat(tuple(found.pooler_output))[rows],)
    # Qwen3-VL adds further vectors of each part to the states of its first layers.
    if layers := getattr(found, "deepstack_features", None):
        found.deepstack_features = [(torch.cat(tuple(parts))[rows],) for parts in layers]
    return {"mm_encoder_outputs": {"image": found}}
