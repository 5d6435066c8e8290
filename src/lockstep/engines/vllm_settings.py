"""The settings that vLLM really runs with, read where the model runs and sent as plain JSON.

Read from `vllm_config` in the engine's own process. Goes to: `parity/handshake.py`, as `EngineSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.engines.model_fields import model_fields
from lockstep.engines.protocol import EngineSettings
from lockstep.engines.tensor_specs import dtype_name
from lockstep.engines.vllm_arguments import NEUTRAL_SAMPLING


def effective_settings(vllm_config: Any) -> dict[str, Any]:
    """Everything that `EngineSettings` holds, as JSON types."""
    config = vllm_config.model_config
    defaults = config.get_diff_sampling_param()
    return {
        "engine": "vllm",
        "model": str(config.model),
        "architecture": config.architecture,
        "dtype": dtype_name(config.dtype),
        "head_dtype": dtype_name(config.head_dtype),
        "vocab_size": config.get_vocab_size(),
        "max_model_len": config.max_model_len,
        "logprobs_mode": str(config.logprobs_mode),
        "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "quantization": config.quantization,
        "sampling_defaults": {k: v for k, v in defaults.items() if k in NEUTRAL_SAMPLING and v != NEUTRAL_SAMPLING[k]},
        "model_config": model_fields(config.hf_text_config),
    }


def splits_prompts(vllm_config: Any) -> bool:
    """Whether a prompt may be computed in parts on a CPU, where a request with a seed of its own then fails (vLLM 0.32.0)."""
    return vllm_config.device_config.device_type == "cpu" and bool(vllm_config.scheduler_config.enable_chunked_prefill)


def settings_from(found: Mapping[str, Any]) -> EngineSettings:
    """`EngineSettings` from what `effective_settings` said, perhaps in another process."""
    dtypes = {name: getattr(torch, found[name]) for name in ("dtype", "head_dtype")}
    return EngineSettings(**{**found, **dtypes})
