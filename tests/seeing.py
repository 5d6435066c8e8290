"""A tiny vision-language model with its image processor, made offline, and pictures for it."""

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
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PATCH, MERGE = 4, 2


def make_seeing_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the marks of pictures, and a template for messages of parts."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_seeing(*, tied: bool = False, seed: int = 0, scale: float = 0.3) -> PreTrainedModel:
    """A Qwen2.5-VL with two layers and a tower of two blocks (one within windows, one over the whole picture)."""
    tokenizer = make_seeing_tokenizer()
    start, end, image, video = (tokenizer.convert_tokens_to_ids(mark) for mark in MARKS)
    text = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "initializer_range": scale,
        "eos_token_id": 0,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": scale,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=tied,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    draw_biases(model, scale)
    return model


def save_seeing(folder: Path, **given: Any) -> str:
    """A directory with the model, its tokenizer and its image processor."""
    make_seeing(**given).save_pretrained(folder)
    make_seeing_tokenizer().save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(folder)
    return str(folder)


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """Noise. It has `width` × `height` / 64 placeholders in a prompt."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def mixed_rows(first: int = 0) -> list[dict[str, Any]]:
    """Rows with no picture, one, two of different sizes, and one between texts."""
    a, b, c, d = (picture(first + i, *size) for i, size in enumerate([(24, 16), (16, 16), (16, 32), (24, 16)]))
    text = {"type": "text", "text": "what is it"}
    image = {"type": "image"}
    return [
        {"prompt": [{"role": "user", "content": [text]}], "images": []},
        {"prompt": [{"role": "user", "content": [image, text]}], "images": [a]},
        {"prompt": [{"role": "user", "content": [image, text, image]}], "images": [b, c]},
        {"prompt": [{"role": "user", "content": [text, image, text]}], "images": [d]},
    ]


def let_vllm_see() -> None:
    """Register vLLM's own Qwen2.5-VL without torchvision, which this environment leaves out (`requirements.lock`).

    vLLM imports a function for the sizes of pictures from a file of transformers, and that file imports torchvision by name. While
    it is imported, empty modules stand in place of torchvision. Pixels come from the trainer, so vLLM resizes no picture and calls
    nothing of torchvision. For the same reason it cannot ask its processor how many tokens a picture may have, and is told.
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
    try:
        module = importlib.import_module("vllm.model_executor.models.qwen2_5_vl")
    finally:
        for name in missing:
            del sys.modules[name]
    module.Qwen2_5_VLProcessingInfo.get_mm_max_tokens_per_item = lambda self, seq_len, mm_counts: {"image": 16}
    ModelRegistry.register_model("Qwen2_5_VLForConditionalGeneration", module.Qwen2_5_VLForConditionalGeneration)


def seeing_plugin(folder: Path) -> str:
    """A value of PYTHONPATH with which every process of a vLLM server calls `let_vllm_see`: it names a plugin of vLLM."""
    plugin = folder / "seeing-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: seeing\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nseeing = seeing:let_vllm_see\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
