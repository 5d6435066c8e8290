"""Entry point that vLLM calls in every process it starts (group `vllm.general_plugins` in pyproject.toml)."""

from lockstep.devices import prepare_cuda
from lockstep.engines.vllm.arguments import IN_PROCESS_BACKEND, SERVER_BACKEND
from lockstep.engines.vllm.environment import end_with_trainer
from lockstep.engines.vllm.port import patches
from lockstep.engines.vllm.port.engine import register_backends
from lockstep.engines.vllm.port.kept_ids import carry_kept_ids

_CLASSES = {IN_PROCESS_BACKEND: "InProcessWeightTransfer", SERVER_BACKEND: "ServerWeightTransfer"}


def register() -> None:
    """Register our weight-transfer backends and norms, carry the kept ids, and find a model's files by name.

    vLLM may call this several times. On a GPU, convolutions round here as they do in the trainer. A worker process
    beside a trainer ends when the trainer dies, and any process that cannot answer any more ends too.
    """
    prepare_cuda()
    end_with_trainer()
    patches.end_without_carriers()
    patches.keep_files_together()
    patches.inspect_classes_here()
    patches.request_amx()
    register_backends("lockstep.engines.vllm.port.receive", _CLASSES)
    carry_kept_ids()
    patches.register_norms()
    patches.find_files_by_name()
