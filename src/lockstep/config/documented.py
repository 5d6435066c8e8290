"""Writes the fields of a config class into its docstring, so that `help(GRPOConfig)` and notebooks show them."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TypeVar

from transformers import TrainingArguments

from lockstep.config.table import with_key

Config = TypeVar("Config")


_WIDTH = 110


def documented(config: type[Config]) -> type[Config]:
    """Class decorator: add a section `Args`, without refused fields and those of `transformers.TrainingArguments`."""
    aside = {f.name for f in dataclasses.fields(TrainingArguments)}
    aside |= with_key(config, "only").keys() | with_key(config, "no_effect").keys()
    own = [f for f in dataclasses.fields(config) if f.init and f.name not in aside]  # type: ignore[arg-type]
    lines = [_line(field) for field in own]
    about = (config.__doc__ or "").rstrip()
    config.__doc__ = "\n".join(
        [about, "", "    Args: all fields of `transformers.TrainingArguments`, and", *lines, "    "]
    )
    return config


def _line(field: dataclasses.Field[object]) -> str:
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    said = " ".join(str(field.metadata.get("help", "")).split())
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    return textwrap.fill(
        f"{field.name} ({kind}{default}): {said}", _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12
    )
