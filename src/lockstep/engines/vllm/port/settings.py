"""The settings that vLLM runs with. They are read from `vllm_config` in the process that runs the model, as plain JSON.

They go to `watch/handshake.py` as `EngineSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep.contract.model_fields import fields_of_parts
from lockstep.contract.protocol import EngineSettings
from lockstep.contract.tensors import dtype_name
from lockstep.engines.vllm.arguments import NEUTRAL_SAMPLING


def effective_settings(vllm_config: Any) -> dict[str, Any]:
    """All fields of `EngineSettings`, as JSON types."""
    config = vllm_config.model_config
    defaults = config.get_diff_sampling_param()
    return {
        "engine": "vllm",
        "model": str(config.model),
        "architecture": _architecture(config),
        "dtype": dtype_name(config.dtype),
        "head_dtype": dtype_name(config.head_dtype),
        "vocab_size": config.get_vocab_size(),
        "max_model_len": config.max_model_len,
        "logprobs_mode": str(config.logprobs_mode),
        "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "quantization": config.quantization,
        "sampling_defaults": {k: v for k, v in defaults.items() if k in NEUTRAL_SAMPLING and v != NEUTRAL_SAMPLING[k]},
        "model_config": _model_config(config),
        "kept_ids": True,
        "structured_outputs": _structured_outputs(vllm_config.structured_outputs_config),
        "normalises_pixels": bool(getattr(config.multimodal_config, "mm_device_do_normalize", False)),
        "second_runner": bool(vllm_config.use_v2_model_runner),
        "searches_top_p": searches_top_p(),
        "request_limits": request_limits(vllm_config),
    }


def _model_config(config: Any) -> dict[str, Any]:
    """The config's fields, as in the model's files.

    If the files of a tied model also have a head, vLLM sets the field that ties them to False while it loads. After that it ties a
    head that is equal to the embedding, and leaves the field at False.
    """
    fields = fields_of_parts(config.hf_text_config, config.hf_config)
    if getattr(config, "word_embeddings_untied_by_checkpoint", False):
        fields["tie_word_embeddings"] = True
    return fields


def searches_top_p() -> bool:
    """Whether vLLM searches the edge of top-p. With Triton, both of its model runners do so, for batches of every size."""
    from vllm.v1.sample.ops.topk_topp_sampler import HAS_TRITON

    return bool(HAS_TRITON)


def _architecture(config: Any) -> str:
    """The name of the model's class. For a class that vLLM does not have, vLLM would name its Transformers backend instead."""
    return config.hf_config.architectures[0] if config.using_transformers_backend() else config.architecture


def _structured_outputs(config: Any) -> str:
    """The library that makes the masks of grammars, and its settings that are not vLLM's defaults."""
    defaults = {"disable_any_whitespace": False, "reasoning_parser": "", "enable_in_reasoning": False}
    changed = [f"{name}={getattr(config, name)}" for name in defaults if getattr(config, name) != defaults[name]]
    return ", ".join([str(config.backend), *changed])


def splits_prompts(vllm_config: Any) -> bool:
    """Whether a CPU engine may compute a prompt in parts. A request with its own seed then fails (vLLM 0.32.0)."""
    return vllm_config.device_config.device_type == "cpu" and bool(vllm_config.scheduler_config.enable_chunked_prefill)


def settings_from(found: Mapping[str, Any]) -> EngineSettings:
    """`EngineSettings` from the result of `effective_settings`, which may come from another process."""
    dtypes = {name: getattr(torch, found[name]) for name in ("dtype", "head_dtype")}
    return EngineSettings(**{**found, **dtypes})


def only_dtype(names: Sequence[str]) -> torch.dtype | None:
    """The dtype that all these names mean; None if they differ or if it is no floating-point dtype."""
    dtypes = {getattr(torch, name) for name in names}
    return next(iter(dtypes)) if len(dtypes) == 1 and all(d.is_floating_point for d in dtypes) else None


def differing_settings(one: EngineSettings, other: EngineSettings) -> list[str]:
    """Names of the settings in which two engines differ."""
    return [name for name in EngineSettings.__slots__ if getattr(one, name) != getattr(other, name)]


def changed_settings(before: EngineSettings, now: EngineSettings) -> str:
    """A text for an error: the old and the new value of every setting that has changed."""
    changes = []
    for name in differing_settings(before, now):
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(old, Mapping):
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            changes += [f"{key} of {name} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys]
        else:
            changes.append(f"{name} was {old!r} and is {new!r}")
    return "; ".join(changes)


def request_limits(vllm_config: Any) -> dict[str, int]:
    """The largest number of ids that one request may name, per setting; empty: there is no limit.

    Returns:
        `allowed_token_ids`, `logit_bias`: ids. `end_ids`: ids, in a request with `min_tokens`. `bad_words`: sequences of ids.
        `bad_word_ids`: ids of all these sequences together.
    """
    if not vllm_config.use_v2_model_runner:
        return {}
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias

    return {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "end_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "bad_words": envs.VLLM_MAX_NUM_BAD_WORDS,
        "bad_word_ids": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    }
