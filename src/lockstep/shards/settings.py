"""What shards the models of a run: the user's FSDP2 configuration, and what another library's configuration must offer.

FSDP2 is asked for by TrainingArguments' `fsdp` and `fsdp_config`, or by the environment of `accelerate launch`.

accelerate's own FSDP plugin would wrap the model beside the proofs, and does not run on a CPU. So `take_settings`
reads what it would read, and switches it off: `shards/model.py` then shards in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import InputError
from lockstep.files import read_settings
from lockstep.private_caches import expanded

if TYPE_CHECKING:
    from lockstep.shards.model import Shard

# Names of `fsdp_config`, with the value that each must have, and why. The environment has the same names, in
# capitals, after FSDP_.
_REFUSED: dict[str, tuple[Any, str]] = {
    "offload_params": (False, "weights in host memory are not supported yet"),
    "cpu_offload": (False, "weights in host memory are not supported yet"),
    "activation_checkpointing": (
        False,
        "set gradient_checkpointing=True instead, which transformers does itself",
    ),
    "ignored_modules": (None, "every weight is sharded; leave it out"),
    "xla": (False, "XLA is not supported"),
}
_WRAPS = ("TRANSFORMER_BASED_WRAP", "transformer_based_wrap")


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Models are sharded by FSDP2: a group per decoder layer and one for the rest, layers freed after their forward.

    Attributes:
        fields: the user's `fsdp_config`; empty if the environment asked.
    """

    fields: dict[str, Any]


class Sharding(Protocol):
    """The configuration of a library that shards the models instead of FSDP2."""

    @property
    def shards(self) -> bool:
        """Whether models are sharded. If not, each rank holds whole models and a whole optimizer."""

    @property
    def title(self) -> str:
        """The name of what shards, for the user."""

    @property
    def field(self) -> Any:
        """The value of the field of TrainingArguments that asks; None if the environment asked."""

    @property
    def saves_less(self) -> str:
        """What to say about memory that the user expects to save and that is not saved. Empty: nothing."""

    @property
    def weights(self) -> Shard:
        """What shards a model. The library is imported when it is called."""

    def check_values(self, fields: Any) -> None:
        """Compare the configuration with the fields of the run."""


def switched_on(library: str, environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` asks for a library (FSDP, DEEPSPEED), or has asked earlier in this process."""
    switches = (f"ACCELERATE_USE_{library}", f"LOCKSTEP_USE_{library}")
    return any(environment.get(name, "false").lower() in ("true", "1", "yes", "on") for name in switches)


def switch_off(library: str, environment: MutableMapping[str, str]) -> None:
    """Replace accelerate's switch, so that accelerate makes no plugin and `switched_on` still says that it was set."""
    if environment.pop(f"ACCELERATE_USE_{library}", None) is not None:
        environment[f"LOCKSTEP_USE_{library}"] = "true"


def take_settings(fsdp: Any, config: Any, environment: MutableMapping[str, str]) -> ShardSettings | None:
    """The user's configuration, in place of accelerate's switch; None: models are whole on every rank.

    Args:
        fsdp, config: the fields of TrainingArguments of these names.
    """
    if not fsdp and not switched_on("FSDP", environment):
        return None
    if fsdp:
        found, source = _fields(fsdp, config), "fsdp_config"
    else:
        found = {n.removeprefix("FSDP_").lower(): v for n, v in environment.items() if n.startswith("FSDP_")}
        source = "accelerate's environment"
    _check(found, source, default_version=2 if fsdp else 1)
    switch_off("FSDP", environment)
    return ShardSettings(found if fsdp else {})


def _fields(fsdp: Any, config: Any) -> dict[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(read_settings(expanded(config)))
        except (OSError, ValueError) as error:
            raise InputError(f"fsdp_config {config} cannot be read: {error}") from error
    if not isinstance(config, Mapping | None):
        raise InputError(f"fsdp_config is {config!r:.80}; it must be a mapping")
    found = {str(name).removeprefix("fsdp_"): value for name, value in dict(config or {}).items()}
    words = fsdp if isinstance(fsdp, list) else str(getattr(fsdp, "value", fsdp)).split()
    odd = [word for word in map(str, words) if word not in ("True", "true", "full_shard", "auto_wrap", "1")]
    if odd:
        raise InputError(
            f"fsdp={' '.join(odd)} is not supported; use fsdp=True, and fsdp_config for its settings"
        )
    return found


def _check(found: Mapping[str, Any], source: str, *, default_version: int) -> None:
    version = str(found.get("version", default_version))
    if version != "2":
        raise InputError(
            f"{source} asks for FSDP version {version}; only FSDP2 is supported: set fsdp_version to 2"
        )
    for name, (value, why) in _REFUSED.items():
        given = found.get(name, value)
        if str(given).lower() not in (str(value).lower(), "", "none"):
            raise InputError(f"fsdp_{name}={given} is not supported ({source}): {why}")
    reshard = str(found.get("reshard_after_forward", True)).lower()
    if reshard not in ("true", "1", "full_shard"):
        raise InputError(
            f"fsdp_reshard_after_forward={reshard} is not supported ({source}): layers are freed after "
            "their forward; leave it out"
        )
    wrap = found.get("auto_wrap_policy")
    if wrap not in (None, "", *_WRAPS):
        raise InputError(
            f"fsdp_auto_wrap_policy={wrap} is not supported ({source}): use TRANSFORMER_BASED_WRAP, or leave it out"
        )
