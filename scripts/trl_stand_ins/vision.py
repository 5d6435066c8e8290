"""Tiny vision-language models with their processors, for the models that TRL's tests on images name.

`scripts/trl_stand_ins/hub.py` calls `make_seeing` for each of them. Their processors need torchvision. `load_torchvision` imports
it, also where it is a CUDA build beside a CPU build of torch. Without torchvision no such model is made, and TRL's tests on images
fail for both columns.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers

# The marks of images in Qwen's vocabulary, and marks of other families at ids that no test writes.
QWEN_MARKS = {
    "<|vision_start|>": 151_652,
    "<|vision_end|>": 151_653,
    "<|vision_pad|>": 151_654,
    "<|image_pad|>": 151_655,
    "<|video_pad|>": 151_656,
}
OTHER_MARKS = {
    "<image>": 151_700,
    "<fake_token_around_image>": 151_701,
    "<end_of_utterance>": 151_702,
    "<start_of_image>": 151_703,
    "<end_of_image>": 151_704,
    "<image_soft_token>": 151_705,
}
IMAGE_MARKS = QWEN_MARKS | OTHER_MARKS
_SIDE, _PATCH = 56, 14
_WORDS = 151_936
_TEXT: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 151_645,
    "bos_token_id": None,
    "pad_token_id": 151_643,
}
_TOWER: dict[str, Any] = {
    # SigLIP has a head that no model here uses.
    "vision_use_head": False,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": _PATCH,
}
_QWEN_TEXT = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]}}
_QWEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
# By family: the sizes of the text part, those of the tower, and further fields of the config.
_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": (
        _QWEN_TEXT,
        {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 16}
        | {"fullatt_block_indexes": [1]},
        _QWEN_IDS,
    ),
    "Qwen2VL": (
        _QWEN_TEXT,
        {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 2},
        _QWEN_IDS,
    ),
    "LlavaNext": (_TEXT, _TOWER, {"image_token_index": 151_700, "image_grid_pinpoints": [[_SIDE, _SIDE]]}),
    "Llava": (_TEXT, _TOWER, {"image_token_index": 151_700}),
    "Idefics2": (_TEXT, _TOWER, {"image_token_id": 151_700}),
    "Gemma3": (
        {**_TEXT, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        _TOWER,
        {
            "boi_token_index": 151_703,
            "eoi_token_index": 151_704,
            "image_token_index": 151_705,
            "mm_tokens_per_image": 16,
        },
    ),
}
# One turn of the user with its images, in the form of most families. Qwen's template is TRL's own.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_torchvision() -> bool:
    """Import torchvision, and say whether it is there.

    The C++ operators of a CUDA build cannot be loaded beside a CPU build of torch. Its import then fails, because it describes two
    of them. With their schemas defined, it succeeds, and everything that needs no C++ works, for example resizing images.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
    return True


def save_seeing(family: str, tokenizer: Any, snapshot: Path) -> bool:
    """Write a model of a family with its processor, and say whether this family can be made here."""
    if family not in _CONFIGS:
        return False
    text, tower, fields = _CONFIGS[family]
    kind: Any = getattr(transformers, f"{family}ForConditionalGeneration")
    own = kind.config_class()
    torch.manual_seed(0)
    config = kind.config_class(
        text_config={**text, "model_type": own.text_config.model_type},
        vision_config={**tower, "model_type": own.vision_config.model_type},
        **{"tie_word_embeddings": False, "eos_token_id": 151_645, "pad_token_id": 151_643, **fields},
    )
    model = kind(config).to(torch.float32)
    model.generation_config.eos_token_id = 151_645
    model.generation_config.pad_token_id = 151_643
    model.save_pretrained(snapshot)
    processor_of(family, tokenizer).save_pretrained(snapshot)
    return True


def processor_of(family: str, tokenizer: Any) -> Any:
    """The processor of a family."""
    import trl

    sizes = {"height": _SIDE, "width": _SIDE}
    kind: Any = getattr(transformers, f"{family}Processor")
    if family.startswith("Qwen"):
        template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_vl.jinja").read_text()
        images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84})
        return kind(images, tokenizer, transformers.Qwen2VLVideoProcessor(), chat_template=template)
    if family == "Gemma3":
        marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        tokenizer = type(tokenizer)(
            tokenizer_object=tokenizer.backend_tokenizer,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            extra_special_tokens=marks,
        )
        images = transformers.Gemma3ImageProcessor(size=sizes, do_pan_and_scan=False)
        return kind(images, tokenizer, _PLAIN_TEMPLATE.replace("IMAGE", "<start_of_image>"), image_seq_length=16)
    template = _PLAIN_TEMPLATE.replace("IMAGE", "<image>")
    if family == "Idefics2":
        sides = {"shortest_edge": _SIDE, "longest_edge": _SIDE}
        images = transformers.Idefics2ImageProcessor(size=sides, do_image_splitting=False)
        return kind(images, tokenizer, image_seq_len=64, chat_template=template)
    own = {"size": {"shortest_edge": _SIDE}, "crop_size": sizes}
    if family == "LlavaNext":
        images = transformers.LlavaNextImageProcessor(**own, image_grid_pinpoints=[[_SIDE, _SIDE]])
    else:
        images = transformers.CLIPImageProcessor(**own)
    return kind(
        images,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
