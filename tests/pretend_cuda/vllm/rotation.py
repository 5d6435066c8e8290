"""The rotation of queries and keys at positions of three axes, for pictures: vLLM's own form in PyTorch.

vLLM's Triton kernel, interpreted, takes half of the seconds of a tiny model of pictures. It is the reference
(`stand_ins.py`).
"""

from __future__ import annotations


def patch() -> None:
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    MRotaryEmbedding.pretend_gpu_replaced = MRotaryEmbedding.forward_cuda
    MRotaryEmbedding.forward_cuda = MRotaryEmbedding.forward_native
