"""vLLM's only worker, in the trainer's own process. The tensors of a push pass by reference.

`engines/vllm/workers/processes.py` has the same methods for several worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.contract.protocol import EngineSettings, LoadedWeights
from lockstep.engines.vllm.port.settings import effective_settings, settings_from

if TYPE_CHECKING:
    from vllm import LLM


class OwnWorker:
    """The worker of an engine whose model is in this process.

    Args:
        llm: vLLM's engine.

    Attributes:
        wire_dtype: as in `WeightReceiver`. None: the engine gets references to the trainer's tensors, and vLLM casts them when it
            copies them.
    """

    wire_dtype: torch.dtype | None = None

    def __init__(self, llm: LLM) -> None:
        from lockstep.engines.vllm.port.kept_ids import record_kept_ids

        self._llm = llm
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.collective_rpc(record_kept_ids)

    def settings(self) -> EngineSettings:
        return settings_from(effective_settings(self._llm.llm_engine.vllm_config))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str) -> LoadedWeights:
        """Load the tensors of an update that has begun, and end the update."""
        self._llm.update_weights({"update_info": {"tensors": tensors, "base": base}})
        self._llm.finish_weight_update()
        (acknowledgement,) = self._llm.collective_rpc(_acknowledgement)
        return acknowledgement

    def keep_adapter(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        """Copy the tensors of an adapter. vLLM loads the adapter afterwards."""
        from lockstep.engines.vllm.port.lora import keep_adapter

        (arrived,) = self._llm.collective_rpc(partial(keep_adapter, name=name, tensors=tensors))
        return arrived

    def close(self) -> None:
        """Does nothing: the worker ends with the engine."""


def _acknowledgement(worker: Any) -> LoadedWeights:
    return worker.weight_transfer_engine.acknowledgement
