"""Harmless fields of `transformers.TrainingArguments` are taken, and do what they say or say that they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from methods import FIELDS, GROUPS, PROMPTS, logs, lora, make, parameters
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lockstep import GRPOConfig
from lockstep.config.table import with_key
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError

EVERY_TWO: dict[str, Any] = {**GROUPS, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("dataloader_num_workers", 4),
            ("pad_to_multiple_of", 64),
            ("bf16_full_eval", True),
            ("fp16_full_eval", True),
        ),
        *(("prediction_loss_only", True), ("eval_accumulation_steps", 2), ("eval_do_concat_batches", False)),
        *(("include_for_metrics", ["loss"]), ("batch_eval_metrics", True)),
        *(("ddp_bucket_cap_mb", 25), ("ddp_find_unused_parameters", False)),
    ],
)
def test_a_field_without_an_effect_is_neutral_afterwards_and_says_so(
    name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GRPOConfig(output_dir="unused", **{name: value})
    neutral, _ = with_key(GRPOConfig, "no_effect")[name]
    assert getattr(config, name) == neutral
    assert f"{name}={value!r} has no effect here" in capsys.readouterr().err
    GRPOConfig(output_dir="unused", **{name: neutral})
    assert "no effect" not in capsys.readouterr().err


def test_a_field_that_was_changed_after_the_config_was_made_is_checked_when_training_begins(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1})
    run.config.log_completions = "false"
    with pytest.raises(InputError, match="log_completions='false'; it must be true or false"):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_dropout_may_stay_on_only_where_there_is_none(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str
) -> None:
    fields = {**FIELDS[method], "disable_dropout": False, "max_steps": 1}
    run = make(method, untied_dir, tmp_path, hf_engine, fields)
    run.train()
    assert run.state.global_step == 1
    model = AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(InputError, match=r"disable_dropout=False: model\.layers\.1\.self_attn has dropout"):
        make(method, model, tmp_path, hf_engine, fields)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.05, task_type="CAUSAL_LM")
    with pytest.raises(InputError, match=r"disable_dropout=False: .*lora_dropout"):
        make(method, untied_dir, tmp_path, hf_engine, fields, peft_config=adapter)


@pytest.mark.parametrize("value", ["all", "non_padding", True])
def test_the_tokens_seen_are_those_of_prompts_and_completions(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, value: Any
) -> None:
    fields = {**GROUPS, "max_steps": 2, "include_num_input_tokens_seen": value}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    counts = [(log["num_input_tokens_seen"], log["num_tokens"]) for log in logs(run)]
    generation = run.loop.generation
    assert counts[0][0] == counts[0][1] > 0
    assert counts[1][0] - counts[0][0] == sum(
        len(r.completion.prompt_ids) + len(r.token_ids) for group in generation.groups for r in group.rollouts
    )


def test_the_cache_of_the_device_is_emptied_as_often_as_asked(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    run = make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "torch_empty_cache_steps": 2, "max_steps": 5}
    )
    monkeypatch.setattr(
        "lockstep.run.trainers.online.clear_device_cache", lambda: steps.append(run.state.global_step)
    )
    run.train()
    assert steps == [0, 2, 4]


def test_a_checkpoint_of_the_model_alone_has_its_weights_and_no_run_goes_on_from_it(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**EVERY_TWO, "max_steps": 2, "save_only_model": True}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    folder = tmp_path / "checkpoint-2"
    assert not (folder / "optimizer.pt").exists()
    saved = parameters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert all(torch.equal(saved[name], p) for name, p in parameters(run.model).items())
    again = make("GRPO", untied_dir, tmp_path, hf_engine, {**fields, "max_steps": 4})
    with pytest.raises(InputError, match=r"checkpoint-2 holds only the model \(save_only_model\)"):
        again.train(resume_from_checkpoint=True)


def test_the_best_model_is_the_one_with_the_highest_reward_unless_another_metric_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def best_at_two(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        return [100.0 * (trainer_state.global_step == 2) + len(ids) + ids[0] % 7 for ids in completion_ids]

    fields = {
        **EVERY_TWO,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    arguments = {"reward_funcs": best_at_two, "eval_dataset": PROMPTS.select(range(2))}
    run = make("GRPO", untied_dir, tmp_path / "a", hf_engine, fields, **arguments)
    run.train()
    evaluated = {log["step"]: log["eval_reward"] for log in run.state.log_history if "eval_reward" in log}
    assert run.state.best_metric == evaluated[2] > evaluated[4]
    best = parameters(
        AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-2", dtype=torch.float32)
    )
    last = parameters(
        AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4", dtype=torch.float32)
    )
    kept = parameters(run.model)
    assert all(torch.equal(kept[name], p) for name, p in best.items())
    assert not all(torch.equal(kept[name], p) for name, p in last.items())
    # The engine gets these weights before it samples again.
    run.evaluate()

    named = {"metric_for_best_model": "eval_completions/mean_length", "greater_is_better": False}
    run = make("GRPO", untied_dir, tmp_path / "b", hf_engine, {**fields, **named}, **arguments)
    run.train()
    lengths = [log["eval_completions/mean_length"] for log in run.state.log_history if "eval_reward" in log]
    assert run.state.best_metric == min(lengths)


def test_the_best_adapter_is_loaded_into_the_adapter(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def best_at_two(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        return [100.0 * (trainer_state.global_step == 2) + len(ids) + ids[0] % 7 for ids in completion_ids]

    fields = {
        **EVERY_TWO,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    arguments = {"reward_funcs": best_at_two, "eval_dataset": PROMPTS.select(range(2)), "peft_config": lora()}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, **arguments)
    run.train()
    own = {name: tensor.cpu() for name, tensor in peft.get_peft_model_state_dict(run.model).items()}
    best, last = (load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 4))
    assert own.keys() == best.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in best.items())
    assert any(not torch.equal(own[name], tensor) for name, tensor in last.items())
    run.evaluate()


@pytest.fixture
def any_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what full determinism sets for the process."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "0")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_full_determinism_is_that_of_transformers(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, any_algorithms: None
) -> None:
    fields = {**GROUPS, "full_determinism": True, "max_steps": 1}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    assert torch.are_deterministic_algorithms_enabled()
    assert run.state.global_step == 1


def test_a_run_may_end_inside_a_generation_and_goes_on_from_the_last_whole_one(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**GROUPS, "save_strategy": "steps", "save_steps": 500, "num_iterations": 2, "max_steps": 5}
    whole = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    whole.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    assert "ends at step 5, inside a generation of 2 steps" in capsys.readouterr().out
    resumed = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logs(resumed) == logs(whole)
    assert all(torch.equal(p, parameters(whole.model)[name]) for name, p in parameters(resumed.model).items())
    longer = make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**fields, "max_steps": 6, "resume_with_changes": True}
    )
    with pytest.raises(InputError, match="the checkpoint of step 5 is inside a generation of 2 steps"):
        longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_a_checkpoint_that_the_config_names_is_gone_on_from(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**EVERY_TWO, "max_steps": 4}
    whole = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    whole.train()
    named = {**fields, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    resumed = make("GRPO", untied_dir, tmp_path, hf_engine, named)
    seen: list[int] = []
    resumed.log = lambda entry, start_time=None: seen.append(resumed.state.global_step)
    resumed.train()
    assert seen[0] == 3
    assert all(torch.equal(p, parameters(whole.model)[name]) for name, p in parameters(resumed.model).items())


def test_a_checkpoint_is_written_where_an_evaluation_is_the_best_and_a_run_goes_on_from_it(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def best_at(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        return [
            {1: 5.0, 2: 4.0, 3: 9.0}.get(trainer_state.global_step, 0.0) + ids[0] % 2
            for ids in completion_ids
        ]

    fields = {**GROUPS, "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    fields |= {"logging_steps": 3}
    arguments = {"reward_funcs": best_at, "eval_dataset": PROMPTS.select(range(2))}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, **arguments)
    run.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    assert run.config.metric_for_best_model == "reward"
    again = make("GRPO", untied_dir, tmp_path, hf_engine, fields, **arguments)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert logs(again)[-1] == logs(run)[-1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "save_strategy=best saves after an evaluation, and there is none; set eval_strategy"),
        ({"eval_strategy": "steps", "eval_steps": 3, "num_iterations": 2}, "make eval_steps a multiple of 2"),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, "make eval_steps a multiple of 1"),
    ],
)
def test_the_best_checkpoint_is_one_that_a_run_can_go_on_from(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        GRPOConfig(output_dir="unused", save_strategy="best", **fields)


def test_fp16_is_refused_by_a_sentence_that_says_why() -> None:
    with pytest.raises(
        InputError, match=r"fp16=True is not supported, only False is: float16 needs a loss scaler.*use bf16"
    ):
        GRPOConfig(output_dir="unused", fp16=True)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention_becomes_what_is_computed_anyway(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**GROUPS, "max_steps": 1}
    plain = make("GRPO", untied_dir, tmp_path / "a", hf_engine, fields)
    asking = make(
        "GRPO",
        untied_dir,
        tmp_path / "b",
        hf_engine,
        {**fields, "model_init_kwargs": {"attn_implementation": name}},
    )
    assert (
        f"attn_implementation={name} becomes sdpa, which computes the same attention"
        in capsys.readouterr().out
    )
    for run in (plain, asking):
        run.train()
    assert logs(asking) == logs(plain)


def test_a_loaded_model_with_flash_attention_is_taken_too(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    model, reference = (
        AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32) for _ in range(2)
    )
    for one in (model, reference):
        # As it is loaded where FlashAttention is installed.
        one.config._attn_implementation_internal = "flash_attention_2"
    run = make(
        "GRPO", model, tmp_path, hf_engine, {**GROUPS, "max_steps": 1, "beta": 0.1}, ref_model=reference
    )
    assert "attn_implementation=flash_attention_2 becomes sdpa" in capsys.readouterr().out
    run.train()
    assert run.state.global_step == 1
