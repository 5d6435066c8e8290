"""Top-k and top-p on the GPU: vLLM's own form in PyTorch, which sorts, in place of its Triton kernel, which searches.

The interpreted search takes seconds a step. PRETEND_TRITON_FILTERS=1 runs it.
"""

from __future__ import annotations

import os


def patch() -> None:
    if not os.environ.get("PRETEND_TRITON_FILTERS"):
        import vllm.v1.sample.ops.topk_topp_sampler as filters

        filters.apply_top_k_top_p_triton = filters.apply_top_k_top_p_pytorch
