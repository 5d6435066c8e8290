"""Fields of a config about the devices and the memory of vLLM in the trainer's process. The names are TRL's."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from lockstep.errors import InputError
from lockstep.training.config.trl_fields import doc

_logger = logging.getLogger(__name__)


@dataclass
class ColocateFields:
    """The fields of an engine in the trainer's process."""

    vllm_tensor_parallel_size: int = field(
        default=1,
        metadata=doc(
            "Number of devices that vLLM's model is split over, with vllm_mode colocate. Above 1, vLLM starts a process per device."
        ),
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
        if self.vllm_tensor_parallel_size == 1:
            return
        if use_vllm is False:
            raise InputError("vllm_tensor_parallel_size needs vLLM, and use_vllm is false; leave one of the two out")
        if server and owner:
            _logger.warning(
                "vllm_tensor_parallel_size has no effect with servers: start them with 'lockstep serve MODEL --tensor_parallel_size "
                f"{self.vllm_tensor_parallel_size}'"
            )
