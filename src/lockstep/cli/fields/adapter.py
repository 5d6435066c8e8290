"""LoRA and QLoRA on the command line, with the field names of TRL's `ModelConfig`.

Comes from: the command line, together with `RunArguments`. Goes to: a trainer's constructor.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from lockstep.cli.fields.arguments import RunArguments
from lockstep.errors import InputError
from lockstep.training.config.fields.trl import doc


@dataclasses.dataclass
class AdaptedRunArguments(RunArguments):
    """A run's model, data and reward, and the adapter that is trained instead of all weights."""

    use_peft: bool = dataclasses.field(default=False, metadata=doc("Train a LoRA adapter on the frozen model."))
    lora_r: int = dataclasses.field(default=16, metadata=doc("Rank of the adapter's matrices."))
    lora_alpha: int = dataclasses.field(default=32, metadata=doc("The adapter counts alpha / r times."))
    lora_dropout: float = dataclasses.field(
        default=0.0, metadata=doc("Kept with the adapter, and off in training: the engine has none.")
    )
    lora_target_modules: list[str] | None = dataclasses.field(
        default=None, metadata=doc("Layers that get it, or all-linear. Default: PEFT's for the model.")
    )
    lora_modules_to_save: list[str] | None = dataclasses.field(
        default=None, metadata=doc("Modules trained as a whole beside it.")
    )
    use_rslora: bool = dataclasses.field(default=False, metadata=doc("Count it alpha / √r times (rsLoRA)."))
    use_dora: bool = dataclasses.field(default=False, metadata=doc("Train magnitudes beside it (DoRA)."))
    load_in_4bit: bool = dataclasses.field(default=False, metadata=doc("Hold the frozen weights in 4 bits (QLoRA)."))
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = dataclasses.field(default="nf4", metadata=doc("Kind of 4 bits."))
    use_bnb_nested_quant: bool = dataclasses.field(default=False, metadata=doc("Quantise their scales too."))


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
    return {name: said for name, said in dataclasses.asdict(given).items() if given.use_peft or name in _GENERAL}


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
