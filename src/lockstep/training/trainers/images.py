"""Decides whether a run has pictures, and refuses what is not supported with them yet, before a model is loaded.

The constructor of the trainers calls these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from lockstep.errors import InputError
from lockstep.images.prompts import ImagePrompts
from lockstep.images.reading import COLUMNS, has_images
from lockstep.models.adapters import causal_model
from lockstep.models.policy import BAD_FILES
from lockstep.models.resolve import resolve_model
from lockstep.models.vision import FAMILIES, reads_pictures
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.forward.policy import OpenedPolicy


def unsupported_with_images(args: OnlineConfig, *, has_agent: bool) -> dict[str, bool]:
    """Features that are not supported with pictures, and whether a run uses each.

    Args:
        has_agent: whether an agent makes the rollouts.
    """
    return {
        "use_liger_kernel": bool(args.use_liger_kernel),
        "an agent": has_agent,
    }


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
                    f"the {name} dataset has a column {min(columns)!r}: images are not supported for this model; drop the column, "
                    f"or give a model that reads images ({', '.join(FAMILIES)})"
                )
            # Parts of messages are refused where they are rendered, with the name of the row.
            continue
        if found := [feature for feature, used in in_use.items() if used]:
            raise InputError(
                f"not supported with images yet: {'; '.join(found)}. Leave it out, or drop the images (docs/guides/images.md "
                "lists what works)"
            )


def image_prompts(
    opened: OpenedPolicy, args: OnlineConfig, datasets: Mapping[str, Any], *, acting: bool
) -> ImagePrompts | None:
    """Reads the pictures of a run; None: it has none, or cannot show any.

    Args:
        acting: whether rollouts have tools, environments or a function, which may give pictures that no dataset has. Where such a
            run cannot show pictures, a tool that gives one gives an error to the model.

    Raises:
        InputError: the model has no image processor, or a limit on pictures does not fit it.
    """
    model, arguments = causal_model(opened.model), args.chat_template_kwargs
    in_data = any(map(has_pictures, datasets.values()))
    if not reads_pictures(model.config) or not (in_data or acting):
        return None
    try:
        return ImagePrompts(model, opened.tokenizer, opened.path, arguments, args.picture_limits)  # type: ignore[arg-type]
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
    if not isinstance(model, str):
        return reads_pictures(causal_model(model).config)
    try:
        return reads_pictures(AutoConfig.from_pretrained(resolve_model(model), local_files_only=True))
    except BAD_FILES:
        # Loading the model says what is wrong with it. If it reads no pictures, `load_prompts` refuses them.
        return True
