"""What libraries build from a config's mappings is built before a model loads: a wrong value is one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_vllm
from methods import make
from peft import LoraConfig
from tiny import make_model
from transformers.integrations import integration_utils

import lockstep
from lockstep.engines.vllm.start import vllm_installed
from lockstep.errors import InputError
from lockstep.server.launch import check_settings

NOWHERE = "/nowhere/model"
EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


def schedule(name: str, **given: Any) -> dict[str, Any]:
    by_metric = name in ("reduce_lr_on_plateau", "greedy")
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": given, **(EVALUATED if by_metric else {})}


def config(tmp_path: Path, **fields: Any) -> lockstep.GRPOConfig:
    return lockstep.GRPOConfig(output_dir=str(tmp_path), bf16=False, max_steps=20, **fields)


BY_METRIC = [
    schedule(name, **{key: "3"})
    for name, keys in {
        "reduce_lr_on_plateau": ("patience", "factor", "cooldown", "threshold", "min_lr", "eps"),
        "greedy": ("patience", "factor", "cooldown"),
    }.items()
    for key in keys
]
BY_STEP = [
    schedule("warmup_stable_decay", num_decay_steps=5, min_lr_ratio="x"),
    # These are read late in the run.
    schedule("warmup_stable_decay", num_decay_steps=5, num_cycles="x"),
    schedule("warmup_stable_decay", num_decay_steps=5, decay_type="x"),
    schedule("polynomial", power="2"),
    schedule("cosine_with_min_lr", min_lr_rate="x"),
    schedule("inverse_sqrt", timescale="x"),
]


@pytest.mark.parametrize("fields", [*BY_METRIC, *BY_STEP], ids=str)
def test_a_value_that_a_schedule_reads_only_later_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    name = fields["lr_scheduler_type"]
    with pytest.raises(
        InputError, match=f"lr_scheduler_type={name} with lr_scheduler_kwargs=.* cannot be used"
    ):
        config(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (schedule("constant_with_warmup", x=1), "constant_with_warmup takes no lr_scheduler_kwargs"),
        ({"model_init_kwargs": {"dtype": "float99"}}, "model_init_kwargs=.*no attribute 'float99'"),
        ({"model_init_kwargs": {"torch_dtype": "int64"}}, "model_init_kwargs=.*no fractions"),
        (
            {"model_init_kwargs": {"dtype": 5, "token": "hf_abcdefghijklmnop"}},
            "model_init_kwargs=.*5 is no dtype",
        ),
        ({"model_init_kwargs": {"attn_implementation": "foo"}}, "model_init_kwargs=.*not supported"),
        ({"gradient_checkpointing_kwargs": {"foo": 1}}, "gradient_checkpointing_kwargs=.*unexpected keyword"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": "false"}}, "must be true or false"),
        (
            {"gradient_checkpointing_kwargs": {"determinism_check": "x"}},
            "gradient_checkpointing_kwargs=.*should be one of",
        ),
        (
            {"gradient_checkpointing_kwargs": [1]},
            r"gradient_checkpointing_kwargs=\[1\]; it must be a mapping",
        ),
        ({"accelerator_config": {"foo": 1}}, "accelerator_config=.*unexpected keyword argument 'foo'"),
        ({"accelerator_config": "gone.json"}, "accelerator_config=gone.json cannot be used"),
        (
            {"vllm_engine_kwargs": {"trust_remote_code": True}},
            "vllm_engine_kwargs may not set trust_remote_code",
        ),
        *(
            (
                (
                    {"vllm_engine_kwargs": {"gpu_memory_utilisation": 0.5}},
                    "did you mean 'gpu_memory_utilization'",
                ),
                ({"vllm_engine_kwargs": {1: 2}}, "vLLM has no argument '1'; its names are those of"),
                (
                    {"vllm_engine_kwargs": {"_api_process_rank": 2}},
                    "vLLM has no argument '_api_process_rank'",
                ),
            )
            if vllm_installed()
            else ()
        ),
        ({"ddp_timeout": 0}, "ddp_timeout=0"),
    ],
    ids=str,
)
def test_what_a_library_cannot_build_is_one_sentence(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says) as found:
        config(tmp_path, **fields)
    assert "hf_" not in str(found.value)


@pytest.mark.parametrize(
    "fields",
    [
        schedule("reduce_lr_on_plateau", patience=3, factor=0.5, cooldown=2, min_lr=1e-9),
        schedule("greedy", patience=3, factor=0.5),
        schedule("warmup_stable_decay", num_decay_steps=5, num_cycles=0.5),
        {"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa", "revision": "main"}},
        {"model_init_kwargs": {"dtype": torch.float32}},
        {"model_init_kwargs": {"dtype": "auto"}},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"accelerator_config": {"even_batches": True}},
        {"vllm_engine_kwargs": {"max_num_batched_tokens": 512, "chat_template": "x"}},
    ],
    ids=str,
)
def test_what_a_library_can_build_is_taken(tmp_path: Path, fields: dict[str, Any]) -> None:
    config(tmp_path, **fields)


def test_arguments_that_transformers_does_not_give_to_the_optimizer_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config(tmp_path, optim="adamw_torch", optim_args="foo=1")
    assert "optim_args=foo=1 changes nothing of optim=adamw_torch" in caplog.text
    caplog.clear()
    config(tmp_path, optim="sgd", optim_args="momentum=0.9")
    assert "changes nothing" not in caplog.text


def test_a_tracker_that_is_not_installed_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{integration_utils.__name__}.get_available_reporting_integrations", lambda: [])
    with pytest.raises(InputError, match="the tracker wandb is not installed"):
        make("GRPO", NOWHERE, tmp_path, None, {"report_to": "wandb"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field",
    [{"r": 0}, {"lora_alpha": "x"}, {"lora_dropout": "x"}, {"lora_dropout": 2.0}, {"bias": "x"}],
    ids=str,
)
def test_an_adapter_that_cannot_be_made_is_refused_before_the_model_is_loaded(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(InputError, match=r"peft_config=.* cannot be used: "):
        make("GRPO", NOWHERE, tmp_path, None, {}, peft_config=LoraConfig(**field))  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.vllm
@needs_vllm
def test_what_vllm_cannot_use_is_one_sentence_before_the_model_is_loaded(tmp_path: Path) -> None:
    make_model().config.save_pretrained(tmp_path)
    before = dict(os.environ)

    def started(**given: Any) -> str:
        fields = {"use_vllm": True, "max_completion_length": 16, "vllm_engine_kwargs": given}
        with pytest.raises(InputError) as found:
            make("GRPO", str(tmp_path), tmp_path, None, fields)  # type: ignore[arg-type]
        return str(found.value)

    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens: Input should be a valid integer"),
        ({"compilation_config": {"levle": 3}}, "levle: Unexpected keyword argument"),
        ({"attention_backend": "FOO"}, "Unknown attention backend: 'FOO'"),
        ({"load_format": "foo"}, "Load format `foo` is not supported"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray' in vllm_engine_kwargs"),
    ]
    for given, says in refused:
        said = started(**given)
        assert "vllm_engine_kwargs" in said
        assert says in said
        assert "\n" not in said
    # What could fit, fits here: the model's files are what is missing then.
    for given in (
        {"max_num_batched_tokens": 256},
        {"long_prefill_token_threshold": 200},
        {"compilation_config": 0},
    ):
        assert "vllm_engine_kwargs" not in started(**given)
    assert not {"LOCAL_WORLD_SIZE", "LD_PRELOAD"} & (os.environ.keys() - before.keys())


@pytest.mark.vllm
@needs_vllm
def test_what_a_server_cannot_use_is_one_sentence_before_the_model_is_loaded(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    make_model().config.save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "skip_tokenizer_init": True, "seed": 0}
    check_settings(AsyncEngineArgs(**given))
    with pytest.raises(InputError, match=r"^block_size: Input should be greater than 0$"):
        check_settings(AsyncEngineArgs(**given, block_size=0))
