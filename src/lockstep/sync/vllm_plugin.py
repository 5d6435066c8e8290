"""Entry point that vLLM calls in every process it starts (group `vllm.general_plugins` in pyproject.toml)."""


def register() -> None:
    """Make the in-process weight transfer known to vLLM; safe to call twice, as vLLM does."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from lockstep.engines.vllm_inprocess import WEIGHT_TRANSFER_BACKEND

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND, "lockstep.sync.vllm_backend", "InProcessWeightTransfer"
        )
