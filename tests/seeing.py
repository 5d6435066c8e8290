"""Tiny vision-language models with their image processors, made offline, and pictures for them."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny import CONTEXT, draw_biases, make_tokenizer
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# What families with tiles write beside the tiles. The largest picture of the tests has four tiles and the whole one.
TILE_MARKS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
]
PATCH, MERGE = 4, 2
TILE = 16

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 0,
    "bos_token_id": None,
}
TOWER = {"hidden_size": 64, "intermediate_size": 96, "patch_size": PATCH}
PATCHES = {**TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "spatial_merge_size": MERGE}
TILES = {**TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": TILE}


def make_seeing_tokenizer(family: str = "qwen2_5_vl") -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the marks of a family's pictures, and a template for messages of parts."""
    tokenizer = make_tokenizer()
    tiles = is_in_tiles(family)
    tokenizer.add_special_tokens({"additional_special_tokens": TILE_MARKS if tiles else MARKS})
    image = "<image>" if tiles else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{image}"
        "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def make_seeing(
    family: str = "qwen2_5_vl", *, tied: bool = False, seed: int = 0, scale: float = 0.3
) -> PreTrainedModel:
    """A vision-language model of two layers and a tower of two blocks.

    Qwen2.5-VL's first block attends within windows. Qwen3-VL's first block gives vectors to the first layer.
    """
    torch.manual_seed(seed)
    config = _config(family, tied, scale)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    draw_biases(model, scale)
    return model


def is_in_tiles(family: str) -> bool:
    """Whether a family cuts pictures into tiles."""
    return family in ("smolvlm", "idefics3")


def _config(family: str, tied: bool, scale: float) -> PreTrainedConfig:
    ids = make_seeing_tokenizer(family).convert_tokens_to_ids
    if is_in_tiles(family):
        own = SmolVLMConfig if family == "smolvlm" else Idefics3Config
        return own(
            text_config={
                **SIZES,
                "model_type": "llama",
                "initializer_range": scale,
                "tie_word_embeddings": tied,
            },
            vision_config={**TILES, "initializer_range": scale},
            image_token_id=ids("<image>"),
            scale_factor=MERGE,
            tie_word_embeddings=tied,
            pad_token_id=0,
            eos_token_id=0,
        )
    start, end, image, video = map(ids, MARKS)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {**SIZES, "initializer_range": scale, "rope_parameters": rope}
    tower = {**PATCHES, "initializer_range": scale}
    shared = {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    shared |= {"tie_word_embeddings": tied, "eos_token_id": 0}
    if family == "qwen3_vl":
        text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_interleaved": True}}
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        return Qwen3VLConfig(text_config=text, vision_config=tower, **shared)
    if family == "qwen2_vl":
        # The width of its tower is `embed_dim`; its `hidden_size` is the width of the language part.
        own = {
            name: tower[name]
            for name in ("depth", "num_heads", "patch_size", "spatial_merge_size", "initializer_range")
        }
        own |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 3}
        return Qwen2VLConfig(text_config=text, vision_config=own, **shared)
    tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, **shared)


def save_seeing(folder: Path, family: str = "qwen2_5_vl", **given: Any) -> str:
    """A directory with the model, its tokenizer and its image processor."""
    make_seeing(family, **given).save_pretrained(folder)
    make_seeing_tokenizer(family).save_pretrained(folder)
    return save_processor(folder, family)


def save_processor(folder: Path, family: str) -> str:
    """Write a family's image processor into a directory, and return its name."""
    if is_in_tiles(family):
        own = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
        own(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}).save_pretrained(folder)
    else:
        size = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(folder)
    return str(folder)


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """Noise. It has `width` × `height` / 64 placeholders in a prompt."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def mixed_rows(first: int = 0) -> list[dict[str, Any]]:
    """Rows with no picture, one, two of different sizes, and one between texts."""
    a, b, c, d = (
        picture(first + i, *size) for i, size in enumerate([(24, 16), (16, 16), (16, 32), (24, 16)])
    )
    text = {"type": "text", "text": "what is it"}
    image = {"type": "image"}
    return [
        {"prompt": [{"role": "user", "content": [text]}], "images": []},
        {"prompt": [{"role": "user", "content": [image, text]}], "images": [a]},
        {"prompt": [{"role": "user", "content": [image, text, image]}], "images": [b, c]},
        {"prompt": [{"role": "user", "content": [text, image, text]}], "images": [d]},
    ]


# By family: the file of vLLM, the class of the model in it, and the class that says how many tokens a picture may have.
IN_VLLM = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLProcessingInfo"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessingInfo"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VLProcessingInfo"),
    "smolvlm": ("smolvlm", "SmolVLMForConditionalGeneration", "SmolVLMProcessingInfo"),
    "idefics3": ("idefics3", "Idefics3ForConditionalGeneration", "Idefics3ProcessingInfo"),
}


def let_vllm_see(family: str = "qwen2_5_vl") -> None:
    """Register vLLM's own model of a family without torchvision, which this environment leaves out.

    vLLM imports a function for the sizes of pictures from a file of transformers, and that file imports torchvision
    by name. While it is imported, empty modules stand in place of torchvision. Pixels come from the trainer, so vLLM
    resizes no picture and calls nothing of torchvision. For the same reason it cannot ask its processor how many
    tokens a picture may have, and is told.
    """
    from vllm import ModelRegistry

    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        outer, _, own = name.rpartition(".")
        if outer:
            setattr(sys.modules[outer], own, sys.modules[name])
    file, model, sizes = IN_VLLM[family]
    try:
        module = importlib.import_module(f"vllm.model_executor.models.{file}")
    finally:
        for name in missing:
            del sys.modules[name]
    getattr(module, sizes).get_mm_max_tokens_per_item = lambda self, seq_len, mm_counts: {"image": 64}
    ModelRegistry.register_model(model, getattr(module, model))


def seeing_plugin(folder: Path, family: str = "qwen2_5_vl") -> str:
    """A value of PYTHONPATH with which every process of a vLLM server calls `let_vllm_see`: a plugin of vLLM."""
    plugin = folder / "seeing-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: seeing\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nseeing = seeing_family:see\n")
    call = f"import seeing\n\ndef see():\n    seeing.let_vllm_see({family!r})\n"
    (folder / "seeing_family.py").write_text(call)
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
