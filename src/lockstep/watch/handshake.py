"""The settings handshake: compares the engine's actual settings with the settings that training assumes.

The settings come from `Engine.settings()`.

Proof `handshake`.
Shows: the engine's *effective* model, architecture, dtype, head dtype, vocabulary, context, log-probs mode,
scheduling, quantisation and sampling defaults are what training assumes; two spellings of one setting are one (a
window of 0 and none, a rotary factor of 1.0 and none).
Does not show: that the engine obeys its own settings.
When: start, before the first push; after every reconnect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.contract.inbox import check_limits
from lockstep.contract.model_fields import fields_of_parts, one_spelling
from lockstep.contract.protocol import EngineSettings
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.arguments import GRAMMAR_BACKEND
from lockstep.errors import ProofError
from lockstep.models.adapters import causal_model
from lockstep.tokens.tokenizer import embedding_rows


@dataclass(frozen=True, slots=True)
class ExpectedSettings:
    """The settings that the trainer assumes of the engine.

    Attributes:
        model: the path or id that both programs loaded; None if the engine's machine may use another name.
        model_config: fields of the trained model's config (`contract/model_fields.py`).
        sampling: the distribution that the engine must sample from; None if any engine can.
        pictures: whether requests will have pictures, whose pixels the trainer has normalised.
        quantization: vLLM's name of the scheme in which the engine must hold the weights in 8 bits; None: it may hold none in it.
    """

    model: str | None
    architecture: str
    dtype: torch.dtype
    head_dtype: torch.dtype
    vocab_size: int
    min_model_len: int
    model_config: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling | None = None
    pictures: bool = False
    quantization: str | None = None


def expected_settings(
    model: PreTrainedModel,
    model_path: str | None,
    dtype: torch.dtype,
    min_model_len: int,
    head_dtype: torch.dtype | None = None,
    sampling: Sampling | None = None,
    *,
    pictures: bool = False,
    quantization: str | None = None,
) -> ExpectedSettings:
    """The settings of an engine for `model` that computes in `dtype`, and its output head in `head_dtype` (None: in `dtype`)."""
    return ExpectedSettings(
        model=model_path,
        architecture=type(causal_model(model)).__name__,
        dtype=dtype,
        head_dtype=head_dtype or dtype,
        vocab_size=embedding_rows(model),
        min_model_len=min_model_len,
        model_config=fields_of_parts(model.config.get_text_config(), model.config),
        sampling=sampling,
        pictures=pictures,
        quantization=quantization,
    )


def check_settings(expected: ExpectedSettings, actual: EngineSettings) -> None:
    """Compare both sides, and report all differences together.

    Raises:
        ProofError: a setting differs in a way that changes tokens or log-probs.
        InputError: the sampling settings name more ids than the engine can take.
    """
    if expected.sampling is not None:
        check_limits(expected.sampling, actual.request_limits)
    wrong: list[str] = []

    def must(name: str, found: object, wanted: object) -> None:
        if found != wanted:
            wrong.append(f"{name} is {found!r} in the engine, training assumes {wanted!r}")

    if expected.model is not None:
        must("model", actual.model, expected.model)
    must("architecture", actual.architecture, expected.architecture)
    must("dtype", actual.dtype, expected.dtype)
    must("head_dtype", actual.head_dtype, expected.head_dtype)
    must("vocab_size", actual.vocab_size, expected.vocab_size)
    must("logprobs_mode", actual.logprobs_mode, "processed_logprobs")
    must("quantization", actual.quantization, expected.quantization)
    if expected.pictures:
        must("mm_device_do_normalize", actual.normalises_pixels, False)
    ours, theirs = one_spelling(expected.model_config), one_spelling(actual.model_config)
    for name in sorted(expected.model_config.keys() & actual.model_config.keys()):
        if ours.get(name) != theirs.get(name):
            must(f"{name} of the model's config", actual.model_config[name], expected.model_config[name])
    must("sampling defaults", dict(actual.sampling_defaults), {})
    if expected.sampling is not None and expected.sampling.is_filtered:
        must("kept_ids (the report of what top-k, top-p and min-p keep)", actual.kept_ids, True)
    if expected.sampling is not None and expected.sampling.grammar is not None:
        must("structured_outputs", actual.structured_outputs, GRAMMAR_BACKEND)
    if actual.max_model_len < expected.min_model_len:
        wrong.append(
            f"max_model_len is {actual.max_model_len} in the engine, training needs {expected.min_model_len} (a server: "
            f"--max_model_len {expected.min_model_len})"
        )
    if wrong:
        raise ProofError(
            "handshake",
            "; ".join(wrong),
            "the engine was started with other settings, or a default of its model or version applies",
            "remove the settings named from vllm_engine_kwargs, or from the server's command line ('lockstep serve' sets "
            "all of them), or give trainer and engine the same model",
        )
