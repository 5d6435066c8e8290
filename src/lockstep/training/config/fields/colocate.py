"""Fields of a config about the devices and the memory of vLLM in the trainer's process. The names are TRL's."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lockstep.engines.vllm.port.sleep import SleepLevel
from lockstep.errors import InputError
from lockstep.training.config.option import COUNT, Bookkeeping, option

_logger = logging.getLogger(__name__)


@dataclass
class ColocateFields:
    """The fields of an engine in the trainer's process."""

    vllm_tensor_parallel_size: int = option(
        1,
        "Number of devices that vLLM's model is split over, with vllm_mode colocate. Above 1, vLLM starts a process per device.",
        group="engine",
        bounds=COUNT,
        bookkeeping=Bookkeeping.MEMORY,
    )

    vllm_enable_sleep_mode: bool = option(
        False,
        "Let vLLM in this process give its GPU memory back while the trainer learns. Not on a CPU.",
        group="engine",
        bookkeeping=Bookkeeping.MEMORY,
    )

    def check_colocated(self, *, server: bool, use_vllm: bool | None, owner: bool) -> None:
        """Check the fields.

        Args:
            server: whether the engine is a server.
            use_vllm: the field of this name.
            owner: whether this process prints warnings.

        Raises:
            InputError: vLLM is needed and switched off.
        """
        for name, is_set, otherwise in (
            (
                "vllm_tensor_parallel_size",
                self.vllm_tensor_parallel_size != 1,
                f"start them with 'lockstep serve MODEL --tensor_parallel_size {self.vllm_tensor_parallel_size}'",
            ),
            ("vllm_enable_sleep_mode", self.vllm_enable_sleep_mode, "a server keeps its memory"),
        ):
            if is_set and use_vllm is False:
                raise InputError(f"{name} needs vLLM, and use_vllm is false; leave one of the two out")
            if is_set and server and owner:
                _logger.warning(f"{name} has no effect with servers: {otherwise}")

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine gives its memory back between a generation and the next push."""
        return self.vllm_enable_sleep_mode and self.vllm_mode == "colocate"  # type: ignore[attr-defined]

    @property
    def sleep_level(self) -> SleepLevel:
        """The level of vLLM's sleep mode. If only an adapter is sent, the engine must keep its base model: level 1."""
        return 0 if not self.engine_sleeps else 1 if self.vllm_enable_lora else 2  # type: ignore[attr-defined]
