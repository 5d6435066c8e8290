"""Families that vLLM 0.32 does not compute or load as transformers does. They are refused before a model is loaded.

The trainer asks before it loads the policy, and everything that starts vLLM asks too. What was seen stands in
docs/reference/models.md. A family that is not here and differs is found by the proofs of the first push.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig

from lockstep.errors import InputError
from lockstep.model_files import load_files
from lockstep.models.policy import BAD_FILES

_EXPERTS = "its loader of experts cannot take weights a second time"
_XIELU = "it keeps the numbers of the activation xIELU in bfloat16, and a push does not fill all of them"
# Line 821 of vLLM's vllm.model_executor.layers.mamba.ops.mamba_ssm calls an operation that only the build for GPUs has.
_NO_KERNEL = "its CPU build has no kernel for the selective scan of Mamba"
# Line 176 of vLLM's vllm.model_executor.models.lfm2, and line 257 of lfm2_moe, give queries of three dimensions to
# RotaryEmbedding.forward_cpu. Its kernel takes tokens × heads for the number of positions, and reads behind the end of them.
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

    Raises:
        InputError: the family is refused. The message says why.
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
            f"{model} is of the family {family}, which vLLM 0.32 does not run as transformers does: {why}; set use_vllm to false "
            "(lockstep verify: --engine transformers)"
        )
