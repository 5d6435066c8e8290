"""The engine that a config asks for, started or found, and shaken hands with.

Comes from: `GRPOConfig` and the policy. Goes to: the trainer. The only place where training chooses between engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.engines.model_fields import model_fields
from lockstep.engines.protocol import Engine
from lockstep.engines.server_calls import ServerCalls
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.transport import WeightTransport
from lockstep.engines.vllm_inprocess import VLLMInProcess, vllm_installed
from lockstep.engines.vllm_server import VLLMServer
from lockstep.parity.handshake import ExpectedSettings, check_settings
from lockstep.server.keys import key_for
from lockstep.sync.transport import choose_transport
from lockstep.tokens.tokenizer import embedding_rows
from lockstep.training.config import GRPOConfig


def start_engine(config: GRPOConfig, model_path: str, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> Engine:
    """Start vLLM in this process, find the servers of server mode, or fall back to the transformers engine without vLLM.

    Raises:
        InputError: the engine cannot load the model, vLLM was asked for and is not installed, or a server lacks what training
            needs.
        LockstepError: a server did not answer in time.
    """
    if config.vllm_mode == "server":
        return connect_servers(
            config.server_urls,
            key_file=config.vllm_server_key_file,
            timeout=config.vllm_server_timeout,
            transport=config.vllm_weight_transport,
            group_host=config.vllm_group_host,
            group_port=config.vllm_group_port,
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
        return VLLMInProcess(model_path, **vllm_arguments, **common)
    why = "use_vllm is false" if use_vllm is False else "vLLM is not installed here"
    print(f"engine: transformers ({why}); the proofs are the same, generation is slower", flush=True)
    return TransformersEngine(model_path, tokenizer, **common)


def connect_servers(
    urls: Sequence[str], *, key_file: str | None, timeout: float, transport: str, group_host: str, group_port: int
) -> VLLMServer:
    """Running servers as one engine.

    Raises:
        InputError: a key cannot be read or is refused, the transport cannot be used, or a server was started without what
            training needs.
        LockstepError: a server did not answer in time.
    """
    keys = [key_for(url, key_file) for url in urls]

    def choose(servers: Sequence[ServerCalls]) -> WeightTransport:
        return choose_transport(transport, servers, group_host, group_port, timeout)

    return VLLMServer(urls, keys, timeout=timeout, transport=choose)


def shake_hands(
    engine: Engine, model: PreTrainedModel, model_path: str, dtype: torch.dtype, min_model_len: int
) -> None:
    """Compare the engine's effective settings with what training assumes.

    Args:
        dtype: in which the engine is to compute.

    Raises:
        ProofError: a setting differs.
    """
    expected = ExpectedSettings(
        # A server may keep the same model under another path; its config is compared field by field.
        model=None if isinstance(engine, VLLMServer) else model_path,
        architecture=type(model).__name__,
        dtype=dtype,
        head_dtype=dtype,
        vocab_size=embedding_rows(model),
        min_model_len=min_model_len,
        model_config=model_fields(model.config.get_text_config()),
    )
    check_settings(expected, engine.settings())
