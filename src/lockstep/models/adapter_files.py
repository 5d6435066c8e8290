"""What lies beside a saved adapter about its base, and loads an adapter onto that base and onto no other.

PEFT keeps only the base's name. A base that was changed in memory has the name of the files that it came from, and files of a name
change. Therefore a trainer writes the base's digest (`models/base_digest.py`) into each directory with an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from lockstep.errors import InputError
from lockstep.files import replace_text
from lockstep.model_files import load_adapter
from lockstep.models.adapters import causal_model
from lockstep.models.base_digest import base_digest
from lockstep.models.loaded_checks import check_finite, listed
from lockstep.models.policy import BAD_FILES, first_line, load_policy
from lockstep.models.quantised import dequantised, is_quantised

BASE_FILE = "lockstep_base.json"
# What PEFT writes: in each line, one of the names.
_FILES = (("adapter_config.json",), ("adapter_model.safetensors", "adapter_model.bin"))


@dataclass(frozen=True, slots=True)
class Base:
    """The base that an adapter was trained on.

    Attributes:
        digest: the `base_digest` of the values that it computed with.
        dtype: torch's name of the dtype in which its files were loaded.
        quantization_config: how its weights were rounded to 4 bits when they were loaded; None: they were not.
    """

    digest: str
    dtype: str
    quantization_config: Mapping[str, Any] | None = None


def write_base(folder: Path, policy: PreTrainedModel, digest: str) -> None:
    """Write beside a saved adapter which base it was trained on.

    Args:
        policy: the model with the adapter.
        digest: of the base when training began. LoRA's `bias` trains parts of the base itself.
    """
    inner = causal_model(policy)
    rounded = getattr(inner.config, "quantization_config", None)
    about = Base(digest, str(inner.dtype).removeprefix("torch."), None if rounded is None else rounded.to_dict())
    replace_text(folder / BASE_FILE, json.dumps(asdict(about), indent=1) + "\n")


def read_base(folder: Path) -> Base | None:
    """The base of a saved adapter; None: another program has written the adapter, and does not say.

    Raises:
        InputError: the file cannot be read.
    """
    path = folder / BASE_FILE
    if not path.exists():
        return None
    try:
        base = Base(**json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(getattr(torch, base.dtype), torch.dtype):
            raise ValueError(f"{base.dtype} is no dtype")
        return base
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); copy the adapter again") from error


def load_adapted(base: str, adapter: Path) -> tuple[Any, bool]:
    """The model that an adapter was trained as, in float32.

    Of a base in 4 bits, it has the values that the codes stand for: training computed with these.

    Args:
        base: directory or hub id of the base (`models/resolve.py`).

    Returns:
        The `peft.PeftModel`, and whether its base was compared with the one of the training.

    Raises:
        InputError: the base is another one; the adapter has no file, or its file lacks weights, has others or has NaN.
    """
    # PEFT would look for a missing file on the hub, under the directory's name.
    for either in _FILES:
        if not any((adapter / name).is_file() for name in either):
            raise InputError(f"adapter {adapter} has no {either[0]}; copy or save the adapter again")
    about = read_base(adapter)
    model = _load_base(base, about)
    if about is not None and (found := base_digest(model)) != about.digest:
        raise InputError(
            f"adapter {adapter} was trained on another base than {base}: the digest of its base's weights is {about.digest}, and "
            f"that of {base} is {found}. If the base was changed in memory before the training (for example an earlier adapter was "
            "merged), make it again, save it with save_pretrained and give its directory with --base; otherwise give the base's "
            "old files with --base"
        )
    try:
        adapted, report = load_adapter(model, str(adapter))
    except KeyError as error:
        # PEFT looks up modules that are trained as a whole.
        raise InputError(_unfit(adapter, f"lacks {error.args[0]}")) from error
    except BAD_FILES as error:
        raise InputError(f"adapter {adapter} cannot be loaded onto {base}: {first_line(error)}") from error
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    lacking = sorted(trained.keys() & set(report.missing_keys))
    unknown = sorted(report.unexpected_keys)
    for names, what in ((lacking, "lacks"), (unknown, "has weights that the base has no place for:")):
        if names:
            raise InputError(_unfit(adapter, f"{what} {listed(names)}"))
    check_finite(f"adapter {adapter}", trained.items())
    return adapted, about is not None


def _unfit(adapter: Path, what: str) -> str:
    return f"adapter {adapter}: its file {what}; copy or save the adapter again, or correct its adapter_config.json"


def _load_base(base: str, about: Base | None) -> PreTrainedModel:
    loaded = {"dtype": getattr(torch, about.dtype) if about is not None else torch.float32}
    model = load_policy(base, loaded).float()
    if about is None or about.quantization_config is None:
        return model
    rounding = BitsAndBytesConfig.from_dict(dict(about.quantization_config))
    codes = load_policy(base, {**loaded, "quantization_config": rounding})
    values = dict(codes.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            given = values[name]
            parameter.copy_(dequantised(given) if is_quantised(given) else given)
    return model
