"""LoRA and QLoRA on the command line, with the field names of TRL's `ModelConfig`.

Comes from: the command line, together with `RunArguments`. Goes to: a trainer's constructor.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from lockstep.cli.fields.arguments import RunArguments
from lockstep.errors import InputError
from lockstep.training.config.option import COUNT, Bounds, option
from lockstep.training.config.options import with_key


@dataclasses.dataclass
class AdaptedRunArguments(RunArguments):
    """A run's model, data and reward, and the adapter that is trained instead of all weights."""

    use_peft: bool = option(False, "Train a LoRA adapter on the frozen model.", group="adapter", common=True)
    lora_r: int = option(16, "Rank of the adapter's matrices.", group="adapter", common=True, bounds=COUNT)
    lora_alpha: int = option(32, "The adapter counts alpha / r times.", group="adapter", bounds=COUNT)
    lora_dropout: float = option(
        0.0, "Kept with the adapter, and off in training: the engine has none.", group="adapter", bounds=Bounds(0, 1)
    )
    lora_target_modules: list[str] | None = option(
        None, "Layers that get it, or all-linear. Default: PEFT's for the model.", group="adapter"
    )
    lora_modules_to_save: list[str] | None = option(None, "Modules trained as a whole beside it.", group="adapter")
    use_rslora: bool = option(False, "Count it alpha / √r times (rsLoRA).", group="adapter")
    use_dora: bool = option(False, "Train magnitudes beside it (DoRA).", group="adapter")
    load_in_4bit: bool = option(False, "Hold the frozen weights in 4 bits (QLoRA).", group="adapter")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "Kind of 4 bits.", group="adapter")
    use_bnb_nested_quant: bool = option(False, "Quantise their scales too.", group="adapter")


def check_adapter(given: AdaptedRunArguments) -> None:
    """Check the fields of the adapter.

    Raises:
        InputError: an adapter field is set without `use_peft`, or a field of the 4-bit format without `load_in_4bit`.
    """
    _refuse_without(
        given, "use_peft", [f.name for f in dataclasses.fields(given) if f.name not in {*_GENERAL, "use_peft"}]
    )
    _refuse_without(given, "load_in_4bit", ["bnb_4bit_quant_type", "use_bnb_nested_quant"])


def adapter_arguments(given: AdaptedRunArguments) -> dict[str, Any]:
    """`peft_config` and `quantization_config` for a trainer; an empty dict if `use_peft` is off.

    Raises:
        InputError: as `check_adapter`.
    """
    check_adapter(given)
    if not given.use_peft:
        return {}
    from peft import LoraConfig

    names = given.lora_target_modules
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=given.lora_r,
        lora_alpha=given.lora_alpha,
        lora_dropout=given.lora_dropout,
        target_modules="all-linear" if names == ["all-linear"] else names,
        modules_to_save=given.lora_modules_to_save,
        use_rslora=given.use_rslora,
        use_dora=given.use_dora,
    )
    return {"peft_config": lora, "quantization_config": _four_bits(given) if given.load_in_4bit else None}


def settings_of(given: AdaptedRunArguments) -> dict[str, Any]:
    """The fields that identify a run. The adapter fields are included only if `use_peft` is on."""
    aside = with_key(type(given), "bookkeeping")
    return {
        name: value
        for name, value in dataclasses.asdict(given).items()
        if (given.use_peft or name in _GENERAL) and name not in aside
    }


_GENERAL = {f.name for f in dataclasses.fields(RunArguments)}


def _four_bits(given: AdaptedRunArguments) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=given.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=given.use_bnb_nested_quant,
    )


def _refuse_without(given: AdaptedRunArguments, switch: str, names: list[str]) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(given)}
    said = [name for name in names if getattr(given, name) != defaults[name]]
    if said and not getattr(given, switch):
        raise InputError(f"{said[0]} has no effect without {switch}; set {switch}, or leave {said[0]} out")
