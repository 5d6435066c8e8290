"""Configs and processors of vision-language models, for the models that TRL's tests on images name.

TRL's programs that make these models have the sizes, and read the rest from the published models;
`scripts/trl_stand_ins/hub.py` gives them what is here instead. The processors need torchvision. `load_torchvision`
imports it, also where it is a CUDA build beside a CPU build of torch. Without torchvision no such model is made, and
TRL's tests on images fail for both columns.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers

QWEN_VOCABULARY = 151_936
# Marks of images that Qwen's vocabulary does not have. Each family gets a copy of its tokenizer with these.
OTHER_MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<start_of_image>",
    "<end_of_image>",
)
FIRST_OTHER = 151_669
_MARK_IDS = {mark: FIRST_OTHER + place for place, mark in enumerate((*OTHER_MARKS, "<image_soft_token>"))}
_QWEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
# By family: the ids of its marks in the config. Sizes come from TRL's programs.
_IDS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": _QWEN_IDS,
    "Qwen2VL": _QWEN_IDS,
    "Qwen3_5": _QWEN_IDS,
    "Qwen3_5Moe": _QWEN_IDS,
    "LlavaNext": {"image_token_index": _MARK_IDS["<image>"]},
    "Llava": {"image_token_index": _MARK_IDS["<image>"]},
    "Idefics2": {"image_token_id": _MARK_IDS["<image>"]},
    "Gemma3": {
        "boi_token_index": _MARK_IDS["<start_of_image>"],
        "eoi_token_index": _MARK_IDS["<end_of_image>"],
        "image_token_index": _MARK_IDS["<image_soft_token>"],
    },
}
# What the published models have and the defaults of transformers do not.
_PUBLISHED_TOWERS: dict[str, dict[str, Any]] = {
    "Gemma3": {"patch_size": 14, "vision_use_head": False},
    "Llava": {"intermediate_size": 32, "image_size": 336, "patch_size": 14},
    "LlavaNext": {"intermediate_size": 32, "image_size": 336, "patch_size": 14},
    "Idefics2": {"intermediate_size": 32, "image_size": 980, "patch_size": 14},
}
# One turn of the user with its images, in the form of most families. Qwen's template is TRL's own.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ "
    "message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ "
    "part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_torchvision() -> bool:
    """Import torchvision, and say whether it is there.

    The C++ operators of a CUDA build cannot be loaded beside a CPU build of torch. Its import then fails, because it
    describes two of them. With their schemas defined, it succeeds, and everything that needs no C++ works, for
    example resizing images.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
    return True


def published_config(kind: Any, family: str, fields: dict[str, Any]) -> Any:
    """The config that the published model of a family would have, with some fields changed by one of TRL's programs.

    Args:
        kind: the class of the model.
        family: its family, for example `Qwen2VL`.
        fields: the fields that the program changes, those of the parts in `text_config` and `vision_config`.
    """
    words = {
        "vocab_size": QWEN_VOCABULARY,
        "eos_token_id": 151_645,
        "pad_token_id": 151_643,
        "bos_token_id": None,
    }
    if "vision_config" not in fields:
        return kind.config_class(**{**words, **fields})
    own = kind.config_class()
    text = {
        **words,
        "model_type": own.text_config.model_type,
        "tie_word_embeddings": False,
        **fields["text_config"],
    }
    tower = {
        "model_type": own.vision_config.model_type,
        **_PUBLISHED_TOWERS.get(family, {}),
        **fields["vision_config"],
    }
    top = {**_IDS[family], "tie_word_embeddings": False, **fields}
    return kind.config_class(**{**top, "text_config": text, "vision_config": tower})


def processor_of(family: str, tokenizer: Any, template: Callable[[str], str]) -> Any:
    """The processor of a family.

    Args:
        family: for example `Qwen2VL`.
        tokenizer: Qwen's tokenizer.
        template: gives TRL's chat template of a name.

    Raises:
        KeyError: the family has no stand-in here.
    """
    if family not in _IDS:
        raise KeyError(f"no stand-in for the processor of {family}")
    tokenizer = copy.deepcopy(tokenizer)
    kind: Any = getattr(
        transformers, "Qwen3VLProcessor" if family.startswith("Qwen3_5") else f"{family}Processor"
    )
    if family.startswith("Qwen"):
        name = {"Qwen3_5": "qwen3_5_nothink", "Qwen3_5Moe": "qwen3_6"}.get(family, "qwen2_5_vl")
        # The largest size is small: the rows' images are small too, and TRL's models have no limit of their own.
        own = {"patch_size": 16} if family.startswith("Qwen3_5") else {}
        images = transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}, **own
        )
        videos: Any = transformers.Qwen3VLVideoProcessor if own else transformers.Qwen2VLVideoProcessor
        return kind(images, tokenizer, videos(), chat_template=template(name))
    tokenizer.add_tokens([*OTHER_MARKS, "<image_soft_token>"], special_tokens=True)
    if family == "Gemma3":
        marks = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
        for mark, token in marks.items():
            tokenizer._special_tokens_map[mark] = token
            tokenizer.init_kwargs[mark] = token
            setattr(tokenizer, mark, token)
            setattr(tokenizer, f"{mark}_id", _MARK_IDS[token])
        images = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896}, do_pan_and_scan=False)
        return kind(
            images, tokenizer, _PLAIN_TEMPLATE.replace("IMAGE", "<start_of_image>"), image_seq_length=256
        )
    plain = _PLAIN_TEMPLATE.replace("IMAGE", "<image>")
    if family == "Idefics2":
        images = transformers.Idefics2ImageProcessor(
            size={"shortest_edge": 378, "longest_edge": 980}, do_image_splitting=False
        )
        return kind(images, tokenizer, image_seq_len=64, chat_template=plain)
    own_sizes = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    if family == "LlavaNext":
        images = transformers.LlavaNextImageProcessor(**own_sizes)
    else:
        images = transformers.CLIPImageProcessor(**own_sizes)
    return kind(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=plain,
    )
