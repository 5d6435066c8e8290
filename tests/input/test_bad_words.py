"""Bad words on the command line of a training command: each is refused in one line before any model is loaded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from bad_input import Row, check, rows
from training_words import words

from lockstep.cli.main import main


def field(name: str, *values: str, says: str | None = None) -> list[Row]:
    """Rows of a field with values that it does not take."""
    return [
        Row(f"{name}={value or 'empty'}", ["grpo", "--dry_run", f"--{name}", value], says or name)
        for value in values
    ]


COMMANDS = [
    Row("no such command", ["gprp"], "did you mean 'grpo'"),
    Row("a command in capitals", ["GRPO"], "no command"),
    Row("a file instead of a command", ["recipes/arithmetic.yaml"], "no command"),
    Row("an empty command", [""], "no command"),
    Row("a field instead of a command", ["--config", "x.yaml"], "no command"),
    Row("unknown field", ["grpo", "--dry_run", "--learning_rat", "1"], "did you mean 'learning_rate'"),
    Row("abbreviation", ["grpo", "--dry_run", "--learn", "1"], "unknown field 'learn'"),
    Row("single dash", ["grpo", "--dry_run", "-learning_rate", "1"], "-learning_rate"),
    Row("word without a field", ["grpo", "--dry_run", "hello"], "hello"),
    Row("word behind a field", ["grpo", "--dry_run", "--seed", "1", "2"], "2"),
    Row("field without a value", ["grpo", "--dry_run", "--seed"], "seed"),
    Row("empty field", ["grpo", "--dry_run", "--", "x"], "unknown field"),
    Row("nameless field", ["grpo", "--dry_run", "--=3"], "unknown field ''"),
    Row("config without a value", ["grpo", "--config"], "config"),
    Row("config that is not there", ["grpo", "--config", "nowhere.yaml"], "does not exist"),
    Row("config twice", ["grpo", "--config", "a.yaml", "--config", "b.yaml"], "config.*once"),
    Row("config that is a directory", ["grpo", "--config", "."], "does not exist|directory"),
    Row("empty config name", ["grpo", "--config", ""], "config"),
    Row("field of another method", ["rloo", "--dry_run", "--loss_type", "grpo"], "loss_type"),
    Row("no model", ["grpo"], "model_name_or_path is not set"),
    Row("no data", ["grpo", "--model_name_or_path", "m"], "dataset_name is not set"),
    Row("a field of verify", ["grpo", "--dry_run", "--self_test"], "self_test"),
    Row("a switch that is neither", ["grpo", "--dry_run", "--bf16", "maybe"], "neither yes nor no"),
    Row("a negated field that is none", ["grpo", "--dry_run", "--no_learning_rate"], "no_learning_rate"),
    Row(
        "a NUL in a name",
        ["grpo", "--model_name_or_path", "a\0b", "--dataset_name", "arithmetic"],
        "not text",
    ),
    Row("a surrogate in a value", ["grpo", "--dry_run", "--bad_words", "a\udcff"], "not text"),
    Row("a surrogate in a model", ["grpo", "--dry_run", "--model_name_or_path=a\udcff"], "not text"),
    Row("a surrogate in a name", ["grpo", "--dry_run", "--nonsense\udce9", "x"], "unknown field"),
]
NUMBERS = [
    *field("learning_rate", "-1", "nan", "inf", "-inf", "abc", "", "1e8", "1e400"),
    *field("temperature", "0", "-1", "nan", "inf", "1e30", "1e-30", "hot"),
    *field("max_steps", "0", "-2", "1.5", "nan", "many", "99999999999999999999"),
    *field("num_train_epochs", "-1", "0", "nan", "inf", "two"),
    *field("num_generations", "0", "1", "-4", "1.5"),
    *field("num_generations_eval", "0", "-1"),
    *field("per_device_train_batch_size", "0", "-8", "x"),
    *field("gradient_accumulation_steps", "0", "-1"),
    *field("max_completion_length", "0", "-1", "1e3"),
    *field("reward_timeout", "0", "-1", "nan", "inf"),
    *field("vllm_server_timeout", "0", "-1", "nan", "inf"),
    *field("reward_weights", "nan", "inf", "-inf", "x"),
    *field("epsilon", "-0.1", "nan"),
    *field("epsilon_high", "-1", "nan"),
    *field("beta", "-0.1", "nan", "inf"),
    *field("delta", "nan", "-1"),
    *field("adam_beta1", "1", "-0.1", "nan"),
    *field("adam_beta2", "1", "1.5", "nan"),
    *field("adam_epsilon", "-1", "nan"),
    *field("weight_decay", "-1", "nan", "inf"),
    *field("max_grad_norm", "-1", "nan"),
    *field("warmup_steps", "-1", "nan"),
    *field("seed", "-1", "1.5", "x", "4294967296"),
    *field("logging_steps", "0", "-1", "nan"),
    *field("save_steps", "0", "-1", "nan"),
    *field("save_total_limit", "0", "-1"),
    *field("eval_steps", "-1", "nan"),
    *field("per_device_eval_batch_size", "0", "-1"),
    *field("vllm_server_port", "0", "-1", "65536", "99999"),
    *field("vllm_group_port", "-1", "65536"),
    *field("vllm_gpu_memory_utilization", "0", "-0.5", "1.5", "nan"),
    *field("vllm_max_model_length", "0", "-1", "1"),
    *field("vllm_max_num_seqs", "0", "-1"),
    *field("token_budget", "0", "-1"),
    *field("logits_chunk_size", "0", "-1"),
    *field("max_staleness", "-1"),
    *field("num_iterations", "0", "-1"),
    *field("steps_per_generation", "0", "-1"),
    *field("generation_batch_size", "7", "0", "-8"),
    *field("vllm_importance_sampling_clip_max", "nan", "-1", "0"),
    *field("vllm_importance_sampling_clip_min", "nan", "-1", "5"),
    *field("top_entropy_quantile", "0", "2", "nan"),
    *field("num_completions_to_print", "0", "-1"),
    *field("ref_model_mixup_alpha", "0", "2", "nan"),
    *field("train_size", "-1", "1.5"),
    *field("eval_size", "-1"),
    *field("entropy_coef", "nan", "inf"),
    *field("no_positive_resampling", "nan", "inf"),
]
CHOICES = [
    *field("loss_type", "best", ""),
    *field("scale_rewards", "loud"),
    *field("importance_sampling_level", "word"),
    *field("lr_scheduler_type", "diagonal"),
    *field("optim", "magic", "lomo"),
    *field("save_strategy", "sometimes", "best"),
    *field("vllm_mode", "remote"),
    *field("vllm_weight_transport", "pigeon"),
    *field("engine_dtype", "int8"),
    *field("vllm_importance_sampling_mode", "loud"),
    *field("report_to", "pigeon"),
    *field("model_init_kwargs", "[1]", "{broken", "3"),
    *field("chat_template_kwargs", "[1]", "{broken"),
    *field("vllm_engine_kwargs", "{broken", "[]"),
    *field("fp16", "true"),
    *field("deepspeed", "x.json", "[1]", "{broken", '{"zero_optimization": {"stage": 5}}'),
    *field("stop_strings", ""),
    *field(
        "vllm_server_base_url",
        "gpu-node",
        "ftp://x",
        "http://",
        "http://a:99999",
        "http://a:x",
        "http://[::1",
    ),
    *field("vllm_server_base_url", "http://a,http://a", "http://a,", "http://a b"),
]
TOGETHER = [
    Row(
        "batch and group",
        ["grpo", "--dry_run", "--per_device_train_batch_size", "6", "--num_generations", "4"],
        "num_generations=4",
    ),
    Row(
        "server without vLLM",
        ["grpo", "--dry_run", "--vllm_mode", "server", "--use_vllm", "false"],
        "contradict",
    ),
    Row(
        "clips the wrong way round",
        ["grpo", "--dry_run", "--vllm_importance_sampling_clip_min", "4"],
        "must be below",
    ),
    Row("an adapter's field alone", ["grpo", "--dry_run", "--lora_r", "4"], "no effect without use_peft"),
    Row("rank 0", ["grpo", "--dry_run", "--use_peft", "true", "--lora_r", "0"], "lora_r=0"),
    Row("rank below 0", ["grpo", "--dry_run", "--use_peft", "true", "--lora_r", "-3"], "lora_r=-3"),
    Row(
        "no weight of an adapter",
        ["grpo", "--dry_run", "--use_peft", "true", "--lora_alpha", "0"],
        "lora_alpha=0",
    ),
    Row(
        "dropout of all", ["grpo", "--dry_run", "--use_peft", "true", "--lora_dropout", "2"], "lora_dropout=2"
    ),
    Row(
        "dropout NaN",
        ["grpo", "--dry_run", "--use_peft", "true", "--lora_dropout", "nan"],
        "lora_dropout=nan",
    ),
    Row(
        "a clip that is unset",
        ["grpo", "--dry_run", "--vllm_importance_sampling_clip_max", "none"],
        "clip_max",
    ),
    Row(
        "thinking longer than the completion",
        ["grpo", "--dry_run", "--max_thinking_length", "600"],
        "leaves nothing for an answer",
    ),
    Row("two betas with GRPO", ["grpo", "--dry_run", "--beta", "0.1", "0.2"], "0.2"),
    Row("beta 0 with Online DPO", ["online-dpo", "--dry_run", "--beta", "0"], "beta"),
    Row("beta NaN with Online DPO", ["online-dpo", "--dry_run", "--beta", "nan"], "beta"),
    Row("no room for a prompt", ["online-dpo", "--dry_run", "--max_new_tokens", "512"], "max_new_tokens"),
]


@rows(*COMMANDS, *NUMBERS, *CHOICES, *TOGETHER)
def test_a_bad_word_is_one_line(row: Row, capfd: pytest.CaptureFixture[str]) -> None:
    check(row.given, row, capfd)


def test_a_password_in_a_url_is_refused_and_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    row = Row(
        "password",
        ["grpo", "--dry_run", "--vllm_server_base_url", "http://me:hunter2@host:8000"],
        "user name or password",
    )
    assert "hunter2" not in check(row.given, row, capfd)


def test_a_sentence_about_a_long_input_keeps_its_beginning_and_its_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = check(
        ["grpo", "--seed", "1" * 9000 + "x"],
        Row("", None, "--seed: invalid int value: '11.* … .*11x'"),
        capfd,
    )
    assert len(said.strip()) <= len("lockstep: ") + 500


@pytest.mark.parametrize("name", ["deepspeed", "accelerator_config", "vllm_server_url_file"])
def test_settings_are_read_from_files_alone(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """/dev/full never ends."""
    check(["grpo", "--dry_run", f"--{name}", "/dev/full"], Row("", None, f"{name}.*is not a file"), capfd)


# Unusual values with a meaning: they are taken, and a line says what is unusual.
UNUSUAL = [
    ("learning_rate", "2", "learning_rate=2"),
    ("temperature", "0.02", "temperature=0.02"),
    ("reward_weights", "-1", ""),
    ("max_grad_norm", "inf", ""),
    ("epsilon_high", "inf", ""),
    ("weight_decay", "1e30", "weight_decay=1e+30 is unusual"),
    ("warmup_steps", "0", ""),
]


@pytest.mark.parametrize(("name", "value", "says"), UNUSUAL)
def test_an_unusual_value_is_taken_with_a_warning(
    name: str, value: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["grpo", "--dry_run", f"--{name}", value]) == 0
    assert says in capfd.readouterr().err


def test_a_warm_up_longer_than_the_run_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    for steps, said in ((99, True), (9, False)):
        assert main(["grpo", "--dry_run", "--max_steps", "9", "--warmup_steps", str(steps)]) == 0
        assert ("is more than max_steps=9" in capfd.readouterr().err) == said


@pytest.mark.parametrize(
    "words",
    [[], ["--help"], ["grpo", "--help-all"], ["gprpö"], ["grpo", "--dry_run", "--output_dir", "läufe"]],
)
def test_a_terminal_in_ascii_ends_in_no_traceback(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    assert main(words) in (0, 2)
    streams[0].flush()
    assert streams[0].buffer.tell() or words == ["gprpö"]  # type: ignore[attr-defined]


def test_a_whole_run_prints_to_a_terminal_in_ascii(
    tmp_path: Path, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(words(tmp_path, untied_dir, eval_size="2")) == 0
