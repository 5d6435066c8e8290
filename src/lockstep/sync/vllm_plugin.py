"""Entry point that vLLM calls in every process it starts (group `vllm.general_plugins` in pyproject.toml)."""

_CLASSES = {"lockstep_inprocess": "InProcessWeightTransfer", "lockstep": "ServerWeightTransfer"}


def register() -> None:
    """Make our weight transfers known to vLLM; safe to call twice, as vLLM does."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, name in _CLASSES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "lockstep.sync.vllm_backend", name)
