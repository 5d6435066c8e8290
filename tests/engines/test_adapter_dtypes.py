"""The dtypes in which an engine can compute adapters alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.server.command import ServeOptions, command_line


def test_adapters_alone_with_a_float32_engine_are_refused_on_a_gpu(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded. vLLM's kernels end there with an assertion that has no text."""

    def config(**fields: Any) -> None:
        GRPOConfig(
            **{
                "vllm_enable_lora": True,
                "output_dir": "x",
                "use_cpu": True,
                "engine_dtype": "float32",
                **fields,
            }
        )

    def command(*words: str, dtype: torch.dtype = torch.float32) -> None:
        command_line(ServeOptions(untied_dir, "h", 1, dtype, 64, 4, 1, 0.5, rest=words))

    def engine() -> None:
        made = VLLMInProcess(
            untied_dir,
            dtype=torch.float32,
            max_model_len=64,
            max_num_seqs=2,
            engine_kwargs={"enable_lora": True},
        )
        made.close()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    for refused in (config, lambda: command("--enable-lora"), engine):
        with pytest.raises(
            InputError, match=r"half precision only, and the engine's dtype is float32; set .*bfloat16"
        ):
            refused()
    command("--no-enable-lora")
    command("--enable-lora", dtype=torch.bfloat16)
    config(vllm_enable_lora=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config()
    command("--enable-lora")
