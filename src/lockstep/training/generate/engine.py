"""The engine that a config asks for, started or found, and shaken hands with.

Comes from: `OnlineConfig` and the policy. Goes to: the trainer. The only place where training chooses between engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.connection import connect
from lockstep.engines.protocol import Engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.vllm_inprocess import VLLMInProcess, vllm_installed
from lockstep.engines.vllm_server import VLLMServer
from lockstep.errors import InputError
from lockstep.parity.handshake import check_settings, expected_settings
from lockstep.report.busy import busy
from lockstep.training.config.online_config import OnlineConfig


def start_engine(
    config: OnlineConfig, model_path: str, tokenizer: PreTrainedTokenizerBase, max_model_len: int, ranks: int = 1
) -> Engine:
    """Start vLLM in this process, find the servers of server mode, or fall back to the transformers engine without vLLM.

    Args:
        ranks: trainer processes.

    Raises:
        InputError: the engine cannot load the model, vLLM was asked for and is not installed, or a server lacks what training
            needs.
        LockstepError: a server did not answer in time.
    """
    if config.vllm_mode == "server":
        with busy(f"waiting for {', '.join(config.server_urls)}"):
            return connect(
                config.server_urls,
                key_file=config.vllm_server_key_file,
                timeout=config.vllm_server_timeout,
                transport=config.vllm_weight_transport,
                group_host=config.vllm_group_host,
                group_port=config.vllm_group_port,
            ).engine
    if ranks > 1 and (vllm_installed() if config.use_vllm is None else config.use_vllm):
        raise InputError(
            f"{ranks} trainer processes: vLLM in one of them would wait for the others in their process group. Start "
            "'lockstep serve MODEL' and set vllm_mode: server"
        )
    return start_here(
        model_path,
        tokenizer,
        use_vllm=config.use_vllm,
        vllm_arguments={
            "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
            "seed": config.seed,
            "engine_kwargs": dict(config.vllm_engine_kwargs or {}),  # type: ignore[arg-type]
        },
        dtype=config.engine_torch_dtype,
        fp32_head=config.engine_head_dtype != config.engine_torch_dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.vllm_max_num_seqs,
        timeout=config.vllm_server_timeout,
    )


def start_here(
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_vllm: bool | None,
    vllm_arguments: Mapping[str, Any],
    **common: Any,
) -> Engine:
    """An engine in this process.

    Args:
        use_vllm: vLLM (true) or transformers (false); None: vLLM where it is installed.
        vllm_arguments: what only `VLLMInProcess` takes.
        common: what both engines take.

    Raises:
        InputError: the engine cannot load the model, or vLLM was asked for and is not installed.
    """
    if vllm_installed() if use_vllm is None else use_vllm:
        with busy("starting vLLM"):
            return VLLMInProcess(model_path, **vllm_arguments, **common)
    why = "use_vllm is false" if use_vllm is False else "vLLM is not installed here"
    print(f"engine: transformers ({why}); the proofs are the same, generation is slower", flush=True)
    return TransformersEngine(model_path, tokenizer, **common)


def shake_hands(
    engine: Engine,
    model: PreTrainedModel,
    model_path: str,
    dtype: torch.dtype,
    min_model_len: int,
    head_dtype: torch.dtype | None = None,
) -> None:
    """Compare the engine's effective settings with what training assumes.

    Args:
        dtype: in which the engine is to compute.
        head_dtype: the same of its output head; None: in `dtype` too.

    Raises:
        ProofError: a setting differs.
    """
    # A server may keep the same model under another path; its config is compared field by field.
    path = None if isinstance(engine, VLLMServer) else model_path
    expected = expected_settings(model, path, dtype, min_model_len, head_dtype)
    check_settings(expected, engine.settings())
