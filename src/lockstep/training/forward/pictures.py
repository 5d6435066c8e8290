"""Computes the pictures of a pack with the model's vision tower, each picture once, and hands them to the model's own forward.

`training/forward/scoring.py` calls this module. The gradient passes through to the tower. `parity/rescoring.py` computes the same
in another way: it lets the model's forward do everything with the pictures of one row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lockstep.training.batch.pack import Pack
from lockstep.training.batch.pictures import PackPictures


def picture_arguments(model: PreTrainedModel, pack: Pack, pictures: PackPictures) -> dict[str, Any]:
    """The arguments by which the model puts pictures in the place of a pack's placeholders."""
    shown, device = pictures.pictures, pack.input_ids.device
    pixels = torch.cat([p.pixel_values for p in shown]).to(device)
    grids = torch.stack([p.grid for p in shown]).to(device)
    parts = model.base_model.get_image_features(pixels, grids, return_dict=True).pooler_output
    # The model fills its placeholders in the order of the ids with these vectors.
    vectors = torch.cat(tuple(parts))[pictures.rows.to(device)]
    return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=(vectors,))}}
