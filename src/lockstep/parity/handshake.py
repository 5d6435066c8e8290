"""The settings handshake: what the engine really runs with, against what training assumes.

Comes from: `Engine.settings()`. Runs at start, before the first push. (After a reconnect: with the server engine.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.engines.protocol import EngineSettings
from lockstep.errors import ProofError


@dataclass(frozen=True, slots=True)
class ExpectedSettings:
    """What the trainer assumes of the engine."""

    model: str
    architecture: str
    dtype: torch.dtype
    head_dtype: torch.dtype
    vocab_size: int
    min_model_len: int


def check_settings(expected: ExpectedSettings, actual: EngineSettings) -> None:
    """Compare both sides and name every difference at once.

    Raises:
        ProofError: any setting differs in a way that changes tokens or log-probs.
    """
    wrong: list[str] = []

    def must(name: str, found: object, wanted: object) -> None:
        if found != wanted:
            wrong.append(f"{name} is {found!r} in the engine, training assumes {wanted!r}")

    must("model", actual.model, expected.model)
    must("architecture", actual.architecture, expected.architecture)
    must("dtype", actual.dtype, expected.dtype)
    must("head_dtype", actual.head_dtype, expected.head_dtype)
    must("vocab_size", actual.vocab_size, expected.vocab_size)
    must("logprobs_mode", actual.logprobs_mode, "processed_logprobs")
    must("async_scheduling", actual.async_scheduling, False)
    must("quantization", actual.quantization, None)
    must("sampling defaults", dict(actual.sampling_defaults), {})
    if actual.max_model_len < expected.min_model_len:
        wrong.append(f"max_model_len is {actual.max_model_len} in the engine, training needs {expected.min_model_len}")
    if wrong:
        raise ProofError(
            "handshake",
            "; ".join(wrong),
            "the engine was started with other settings, or a default of its model or version applies",
            "remove the settings named from vllm_engine_kwargs, or give trainer and engine the same model",
        )
