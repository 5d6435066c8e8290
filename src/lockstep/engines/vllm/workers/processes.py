"""Several worker processes of vLLM that share one model (tensor parallelism), beside the trainer's process.

vLLM's scheduler is in the trainer's process, and its multiprocessing executor starts one process per part of the
model. The workers are those of a server: the same extension (`engines/vllm/worker.py`), the same weight transfer and
the same transports. Here the calls go through vLLM's own queues instead of HTTP. A model in the trainer's process has
the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.contract.protocol import EngineSettings
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.adapters.transfer import AdapterCalls, one_acknowledgement
from lockstep.engines.http.requests.messages import loaded_by
from lockstep.engines.vllm.port.settings import differing_settings, only_dtype, settings_from
from lockstep.engines.vllm.workers.environment import leave_signals_to_trainer
from lockstep.errors import LockstepError, ProofError
from lockstep.report.waits import waiting
from lockstep.sync.wire.receivers import WeightReceiverCalls
from lockstep.sync.wire.transport import WeightTransport

if TYPE_CHECKING:
    from vllm import LLM

TransportChoice = Callable[[Sequence[WeightReceiverCalls]], WeightTransport]


class WorkerProcesses:
    """The worker processes of an engine in this process. It is a `WeightReceiverCalls`, as one server is.

    Args:
        llm: vLLM's engine.
        transport: chooses how weights reach the workers.
        timeout: seconds that one call may take.

    Attributes:
        url: where transports look for the workers: on this machine.
        world_size: number of workers.
        available_bytes: free main memory when the workers started, in bytes.
        wire_dtype: the dtype of the workers' parameters; None: they have several.

    Raises:
        ProofError: the workers run with different settings.
    """

    url = "http://localhost"

    def __init__(self, llm: LLM, transport: TransportChoice, timeout: float) -> None:
        self._llm, self._timeout = llm, timeout
        llm.collective_rpc(leave_signals_to_trainer)
        states = self.workers("lockstep_state")
        self.world_size: int = states[0]["world_size"]
        self.available_bytes: int = min(state["available_bytes"] for state in states)
        self.wire_dtype = only_dtype([name for state in states for name in state["loads_in"]])
        self._settings, *others = [settings_from(state["settings"]) for state in states]
        for rank, other in enumerate(others, 1):
            if other != self._settings:
                raise ProofError(
                    "handshake",
                    f"workers 0 and {rank} of vLLM differ in {', '.join(differing_settings(self._settings, other))}",
                    "vLLM gave its workers different settings",
                    "this is a defect of the engine: report it with this message",
                )
        self._transport = transport([self])
        self._adapter_calls = AdapterCalls(self)
        self._adapter_transport: WeightTransport | None = None
        self._choose = transport

    def settings(self) -> EngineSettings:
        return self._settings

    # ---- the calls of a transport -----------------------------------------------------------------------------------

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", info)

    def update_weights(self, info: dict[str, Any]) -> None:
        self._call("update_weights", info)

    def workers(self, method: str, *args: str) -> list[Any]:
        return self._call(method, *args)

    def _call(self, method: str, *args: Any) -> list[Any]:
        with waiting(f"vLLM's workers to do {method}", self._timeout):
            return self._llm.collective_rpc(method, timeout=self._timeout, args=args)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str) -> LoadedWeights:
        """Send the tensors of an update that has begun to every worker, and end the update.

        Raises:
            LockstepError: a tensor could not be made, or the tensors did not reach every worker.
        """
        self._send(self._transport, tensors, self, base)
        self._call("finish_weight_update")
        return _of_all(self.workers("lockstep_acknowledgement"))

    def keep_adapter(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        """Send the tensors of an adapter to every worker. vLLM loads the adapter afterwards.

        Raises:
            LockstepError: the tensors did not reach every worker.
        """
        if self._adapter_transport is None:
            self._adapter_transport = self._choose([self])
        self._adapter_calls.begin(name)
        self._send(self._adapter_transport, tensors, self._adapter_calls)
        return _of_all(self._adapter_calls.arrived)

    def _send(
        self,
        transport: WeightTransport,
        tensors: Iterable[tuple[str, torch.Tensor]],
        receiver: WeightReceiverCalls,
        base: str = "",
    ) -> None:
        try:
            transport.send(tensors, [receiver], base)
        except RuntimeError as error:
            if isinstance(error, LockstepError):
                raise
            raise RuntimeError(f"the weights did not reach vLLM's workers: {str(error)[:300]}") from error

    def close(self) -> None:
        """Release the transports. The processes end with the engine."""
        self._transport.close()
        if self._adapter_transport is not None:
            self._adapter_transport.close()


def _of_all(found: Sequence[Any]) -> LoadedWeights:
    """One acknowledgement from the JSON of each worker."""
    return one_acknowledgement(loaded_by(found, [f"worker {rank} of vLLM" for rank in range(len(found))]))
