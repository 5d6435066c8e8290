"""The arguments with which Lockstep starts vLLM beside the trainer and in servers, and the model families it refuses.

vLLM 0.32 does not compute or load those families as transformers does. They are refused before a model is loaded; what
was seen stands in docs/reference/models.md. The proofs of the first push find a family that is not here and differs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import AutoConfig

from lockstep.contract.tensors import dtype_name
from lockstep.engines.vllm.port.patches import CPU_NORMS
from lockstep.engines.vllm.source import names_of_engine
from lockstep.errors import InputError, did_you_mean, one_line
from lockstep.extensions import HELD_FORMS
from lockstep.model_files import load_files
from lockstep.models.policy import BAD_FILES, keeps_state

# The names under which vLLM finds our weight transfers (`engines/vllm/plugin.py`) and our extension of its workers.
IN_PROCESS_BACKEND, SERVER_BACKEND = "lockstep_inprocess", "lockstep"
WORKER_EXTENSION = "lockstep.engines.vllm.worker.LockstepWorker"

# Keys of a request's `extra_args`: the largest number of kept ids per token, and bad words as ids.
MAX_KEPT_IDS, BAD_WORDS = "lockstep_max_kept_ids", "lockstep_bad_words"
# The library that masks by grammars, in engine and trainer. Otherwise vLLM would choose one per request.
GRAMMAR_BACKEND = "xgrammar"

# Where vLLM takes a model's layers from. "auto" is its own implementation, or transformers' where it has none.
MODEL_IMPLEMENTATIONS = ("vllm", "auto", "transformers")

# vLLM's names of the schemes in which an engine may hold the weights in 8 bits (`vllm_quantization`).
QUANTIZATIONS = tuple(HELD_FORMS)

# 0: an engine never sleeps. 1: it keeps its weights in main memory. 2: it discards them.
SleepLevel = Literal[0, 1, 2]

# Engine arguments that change tokens or log-probs and that no proof reads back.
REFUSED = frozenset(
    {
        "hf_overrides",
        "kv_cache_dtype",
        "logits_processors",
        "quantization",
        "revision",
        "speculative_config",
        "tokenizer",
        "tokenizer_mode",
        "weight_transfer_config",
    }
)

# Engine arguments with which vLLM would run code that comes with a model, or load its classes from another place.
OWN_CODE = frozenset({"code_revision", "hf_config_path", "model_class_overrides", "trust_remote_code"})

# Sampling values that leave the distribution unchanged. A model's generation_config.json may set others.
NEUTRAL_SAMPLING: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}

# The smallest block size of vLLM's CPU attention. Completions share only whole blocks of their prompt's prefill, so
# that small blocks also help short prompts.
_CPU_BLOCK = 32
_SMALLEST_CACHE = 64 << 20
# Tokens of one step on a GPU. vLLM measures its memory with a step of this size, and computes longer prompts in parts.
_GPU_BATCH = 8192
# Sequences that are decoded together, if nobody says how many. On a GPU a step takes hardly longer with more of them.
_CPU_SEQUENCES, _GPU_SEQUENCES = 64, 256


def usual_sequences() -> int:
    """The number of sequences that vLLM decodes together on this machine, if the user does not say how many."""
    return _GPU_SEQUENCES if torch.cuda.is_available() else _CPU_SEQUENCES


def engine_arguments(
    model: str,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    *,
    fp32_head: bool = False,
    quantization: str | None = None,
    whole_prompts: bool = False,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` (and, with dashes, of vLLM's server) that training needs. They depend on the device.

    Args:
        max_model_len: longest prompt + completion, in tokens.
        max_num_seqs: largest number of sequences that are decoded together.
        fp32_head: whether the output head computes in float32, whatever `dtype` is.
        quantization: one of `QUANTIZATIONS`; None: the engine computes in `dtype`.
        whole_prompts: whether the user wants no prompt to be computed in parts. On a CPU that is always so.
    """
    on_gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype_name(dtype),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        # On a CPU a request with its own seed fails if its prompt is computed in parts (vLLM 0.32.0).
        "enable_chunked_prefill": on_gpu and not whole_prompts,
        "max_num_batched_tokens": max(max_model_len, 4096),
        "use_tqdm_on_load": False,
        # The model's stop tokens stay in force. Its sampling defaults are replaced.
        "override_generation_config": dict(NEUTRAL_SAMPLING),
        # The state behind a prefix is cached only together with split prompts.
        "enable_prefix_caching": not keeps_state(load_files(AutoConfig, model)),
        "structured_outputs_config": {"backend": GRAMMAR_BACKEND},
        # On a CPU, compilation delays the start by 40 s for 20% faster sampling (docs/internals/speed.md).
        "enforce_eager": not on_gpu,
    }
    if on_gpu:
        # vLLM has `async_scheduling` on, unless the executor cannot do it (Ray): asked for there, it fails.
        if not whole_prompts:
            arguments["max_num_batched_tokens"] = max(_GPU_BATCH, max_num_seqs)
    else:
        arguments["async_scheduling"] = False
        arguments["block_size"] = _CPU_BLOCK
        arguments["ir_op_priority"] = {"rms_norm": [CPU_NORMS], "fused_add_rms_norm": [CPU_NORMS]}
    if fp32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if quantization is not None:
        arguments["quantization"] = quantization
    return arguments


def check_quantization(quantization: str | None, dtype: torch.dtype, name: str) -> None:
    """Refuse a scheme whose weights could not be proven, or that vLLM does not have in the engine's dtype.

    `name` is the field or argument in which the user has given it.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise InputError(f"{name}={quantization!r}; it must be {' or '.join(QUANTIZATIONS)}")
    if dtype != torch.bfloat16:
        raise InputError(
            f"{name}={quantization}: vLLM quantises half-precision models only, and the engine's dtype is "
            f"{dtype_name(dtype)}; set engine_dtype=bfloat16 in training, or --dtype bfloat16 for a server"
        )


# The values that vLLM accepts as the largest rank of an adapter (`max_lora_rank`).
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def held_rank(rank: int) -> int:
    """The rank for which vLLM keeps room when an adapter has this rank."""
    if rank > RANKS[-1]:
        raise InputError(
            f"the adapter has rank {rank}, and vLLM's LoRA supports at most {RANKS[-1]}: lower lora_r, or "
            "leave vllm_enable_lora out; then merged weights are sent"
        )
    return next(size for size in RANKS if size >= rank)


def check_adapters(dtype: torch.dtype, name: str) -> None:
    """Refuse adapters alone in a dtype that vLLM's LoRA kernels lack: on a GPU they have half precision only.

    `name` is the field or argument with which the user has asked for them.
    """
    if torch.cuda.is_available() and dtype not in (torch.float16, torch.bfloat16):
        raise InputError(
            f"{name}: on a GPU, vLLM computes adapters in half precision only, and the engine's dtype is "
            f"{dtype_name(dtype)}; set engine_dtype=bfloat16 in training, or --dtype bfloat16 for a server. "
            f"Without {name}, merged weights are sent"
        )


def cpu_cache_bytes(model: str, dtype: torch.dtype, max_model_len: int, max_num_seqs: int) -> int:
    """Bytes of the key-value cache that these sequences can fill. Without a size, vLLM takes most of the memory."""
    config = load_files(AutoConfig, model).get_text_config()
    if getattr(config, "num_attention_heads", None) is None:
        # Without attention there are states of a fixed size, and no keys and values.
        return _SMALLEST_CACHE
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    # One extra block per sequence, because the cache is allocated in whole blocks.
    return max(per_token * max_num_seqs * (max_model_len + _CPU_BLOCK), _SMALLEST_CACHE)


def check_user_arguments(names: set[str], where: str) -> None:
    """Refuse arguments that vLLM lacks, that run a model's code, or that change log-probs where no proof finds it.

    Args:
        where: the field in which the user has set them.
    """
    refused = REFUSED & names
    if "quantization" in refused:
        raise InputError(
            f"{where} may not set quantization; set vllm_quantization: it corrects for the difference"
        )
    if code := OWN_CODE & names:
        raise InputError(
            f"{where} may not set {', '.join(sorted(code))}: code that comes with a model is not run"
        )
    if refused:
        raise InputError(f"{where} may not set {', '.join(sorted(refused))}: log-probs would differ")
    # Names that are no text come from YAML: `{1: 2}`.
    for name in sorted(map(str, names)):
        if (known := names_of_engine()) and name not in known:
            hint = did_you_mean(name, known) or "its names are those of vllm.LLM and vllm.EngineArgs"
            raise InputError(f"{where}: vLLM has no argument {name!r}; {hint}")


def told_by_vllm(error: Exception) -> str:
    """What vLLM says about settings that it cannot use, in one line, with the field that its validator names."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        wrong = (f"{'.'.join(map(str, one['loc'])) or error.title}: {one['msg']}" for one in error.errors())
        return "; ".join(wrong)
    return f"{type(error).__name__}: {one_line(error):.300}"


_EXPERTS = "its loader of experts cannot take weights a second time"
_XIELU = "it keeps the numbers of the activation xIELU in bfloat16, and a push does not fill all of them"
# Line 821 of vLLM's vllm.model_executor.layers.mamba.ops.mamba_ssm calls an operation that only the build for GPUs has.
_NO_KERNEL = "its CPU build has no kernel for the selective scan of Mamba"
# Line 176 of vLLM's vllm.model_executor.models.lfm2, and line 257 of lfm2_moe, give queries of three dimensions to
# RotaryEmbedding.forward_cpu. Its kernel takes tokens × heads for the number of positions, and reads behind the end
# of them.
_ROTATION = "its CPU kernel rotates the queries of this family by the positions of other tokens"

ALWAYS = {
    "apertus": _XIELU,
    "granitemoe": _EXPERTS,
    # Without experts it runs.
    "granitemoehybrid": _EXPERTS,
}
ON_CPU = {
    "falcon_mamba": _NO_KERNEL,
    "jamba": _NO_KERNEL,
    "lfm2": _ROTATION,
    "lfm2_moe": _ROTATION,
    "mamba": _NO_KERNEL,
}


def refuse_family(model: str, *, elsewhere: bool = False) -> None:
    """Refuse a model of a family that vLLM does not compute or load as transformers does.

    Args:
        model: directory or hub id. If its config cannot be read, nothing is refused: loading it says what is wrong.
        elsewhere: whether vLLM runs in a server, perhaps on a machine with a GPU.
    """
    try:
        config = load_files(AutoConfig, model).get_text_config()
    except BAD_FILES:
        return
    family = config.model_type
    if family == "granitemoehybrid" and not config.num_local_experts:
        return
    on_cpu = not elsewhere and not torch.cuda.is_available()
    why = ALWAYS.get(family) or (ON_CPU.get(family) if on_cpu else None)
    if why is not None:
        raise InputError(
            f"{model} is of the family {family}, which vLLM 0.32 does not run as transformers does: {why}; "
            "set use_vllm to false (lockstep verify: --engine transformers)"
        )
