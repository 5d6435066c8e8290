"""Decides whether a run has pictures, and refuses what is not supported with them yet, before a model is loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, ProcessorMixin

from lockstep.errors import InputError
from lockstep.images.prompts import ImagePrompts
from lockstep.images.reading import COLUMNS, has_images
from lockstep.images.urls import ImageUrls
from lockstep.model_files import load_files
from lockstep.models.adapters import causal_model
from lockstep.models.policy import BAD_FILES
from lockstep.models.resolve import resolve_model
from lockstep.models.vision import FAMILIES, reads_pictures
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.forward.policy import OpenedPolicy


def parts_of_processor(given: Any) -> tuple[Any, Any]:
    """A trainer's `processing_class` as a tokenizer and an image processor; None: it has none. TRL's scripts give both as one."""
    if not isinstance(given, ProcessorMixin):
        return given, None
    tokenizer: Any = getattr(given, "tokenizer", None)
    if tokenizer is not None and given.chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = given.chat_template
    return tokenizer if tokenizer is not None else given, getattr(given, "image_processor", None)


def unsupported_with_images(args: OnlineConfig) -> dict[str, bool]:
    """Features that are not supported with pictures, and whether a run uses each."""
    return {"use_liger_kernel": bool(args.use_liger_kernel)}


def check_images(datasets: Mapping[str, Any], model: Any, in_use: Mapping[str, bool]) -> None:
    """Refuse pictures that the model cannot read, or that the run cannot show it yet.

    Args:
        datasets: by name; None: there is no such dataset.
        model: the trainer's argument: a name or a loaded model.
        in_use: for each feature that is not supported with pictures, whether the run uses it.

    Raises:
        InputError: a dataset has pictures, and the model reads none or the run uses such a feature.
    """
    for name, data in datasets.items():
        if not has_pictures(data):
            continue
        if not _may_read_pictures(model):
            if columns := set(COLUMNS) & set(data.column_names):
                # TRL would show the images to the model. If they were ignored, the model would answer without having seen them.
                raise InputError(
                    f"the {name} dataset has a column {min(columns)!r}: images are not supported for this model "
                    f"({_family(model)}); drop the column, or give a model that reads images ({', '.join(FAMILIES)})"
                )
            # Parts of messages are refused where they are rendered, with the name of the row.
            continue
        if found := [feature for feature, used in in_use.items() if used]:
            raise InputError(
                f"not supported with images yet: {'; '.join(found)}. Leave it out, or drop the images (docs/guides/images.md "
                "lists what works)"
            )


def image_prompts(
    opened: OpenedPolicy, args: OnlineConfig, datasets: Mapping[str, Any], processor: Any = None, *, acting: bool
) -> ImagePrompts | None:
    """Reads the pictures of a run; None: it has none, or cannot show any.

    Args:
        processor: the image processor; None: the model's own.
        acting: whether rollouts have tools, environments, a function or an agent, which may give pictures that no dataset has.
            Where such a run cannot show pictures, a tool that gives one gives an error to the model, and an agent gets an error.

    Raises:
        InputError: the model has no image processor, or a limit on pictures does not fit it.
    """
    model, arguments = causal_model(opened.model), args.template_arguments
    in_data = any(map(has_pictures, datasets.values()))
    if not reads_pictures(model.config) or not (in_data or acting):
        return None
    try:
        urls = ImageUrls(args.image_urls or ())
        return ImagePrompts(model, opened.tokenizer, opened.path, arguments, args.picture_limits, urls, processor)
    except InputError:
        # A model that comes without an image processor may still be trained on text.
        if in_data:
            raise
        return None


def has_pictures(data: Any) -> bool:
    """Whether a dataset has a column of pictures, or messages with image parts."""
    if data is None:
        return False
    if set(COLUMNS) & set(data.column_names):
        # Its rows need not be decoded.
        return True
    # The contents of a dataset's messages are of one kind: text, or lists of parts.
    first = data[0]["prompt"]
    in_parts = isinstance(first, list) and any(
        isinstance(m, Mapping) and isinstance(m.get("content"), list) for m in first
    )
    return in_parts and any(has_images({"prompt": prompt}) for prompt in data["prompt"])


def _may_read_pictures(model: Any) -> bool:
    """Whether the model reads pictures, as far as its config is on this machine."""
    config = _config(model)
    # Loading the model says what is wrong with it. If it reads no pictures, `load_prompts` refuses them.
    return config is None or reads_pictures(config)


def _family(model: Any) -> str:
    config = _config(model)
    return config.model_type if config is not None else "unknown"


def _config(model: Any) -> PreTrainedConfig | None:
    """The config of a trainer's model; None: it cannot be read."""
    if not isinstance(model, str):
        return causal_model(model).config
    try:
        return load_files(AutoConfig, resolve_model(model), local_files_only=True)
    except BAD_FILES:
        return None
