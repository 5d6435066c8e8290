"""TRL's own scripts, its quick start and an Online DPO script run to their last line; only their imports change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import needs_vllm
from example_scripts import EXAMPLES
from safetensors.torch import load_file
from tiny import make_tokenizer, save_model
from transformers import LlamaConfig, LlamaForSequenceClassification

trl = pytest.importorskip("trl")

# What the scripts import from TRL, and what of it comes from Lockstep.
IMPORTS = {
    "grpo": [
        ("from trl import GRPOTrainer, ", "from lockstep import GRPOTrainer\n    from trl import "),
        (
            "from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser",
            "from lockstep import GRPOConfig\n    from trl import DatasetMixtureConfig, ModelConfig, TrlParser",
        ),
    ],
    "rloo": [
        ("from trl import RLOOTrainer, ", "from lockstep import RLOOTrainer\n    from trl import "),
        (
            "from trl import DatasetMixtureConfig, ModelConfig, RLOOConfig, TrlParser",
            "from lockstep import RLOOConfig\n    from trl import DatasetMixtureConfig, ModelConfig, TrlParser",
        ),
    ],
}
WORDS = {
    "max_steps": "2",
    "per_device_train_batch_size": "4",
    "num_generations": "2",
    "max_completion_length": "8",
    "learning_rate": "1e-3",
    "use_vllm": "False",
    "bf16": "False",
    "report_to": "none",
    "disable_tqdm": "True",
}
GSPO = {
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "beta": "0",
    "epsilon": "3e-4",
    "epsilon_high": "4e-4",
    "steps_per_generation": "2",
}


def script(
    text: str, name: str, changes: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """A script with changed imports, as a module that is not run yet."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = ModuleType(f"{name}_script")
    # Dataclasses look the module of a class up by its name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def save_data(folder: Path) -> Path:
    """Stand-in data in the shape of TRL's: messages and a solution in LaTeX, one of which cannot be read."""
    folder.mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
            "solution": f"${2 * i}$" if i else "nothing that can be read",
        }
        for i in range(2 if folder.name == "two" else 8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a model."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", max_position_embeddings=1024)
    return tmp_path


def moved(home: Path, folder: str) -> bool:
    """Whether a saved model has other weights than the first one."""
    first, last = (load_file(home / name / "model.safetensors") for name in ("model", folder))
    assert first.keys() == last.keys()
    return any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("grpo", {"log_completions": "True"}),
        ("grpo", GSPO),
        ("grpo", {"dataset_streaming": "True", "disable_dropout": "False", "dataloader_num_workers": "2"}),
        ("rloo", {"eval_strategy": "steps", "eval_steps": "2", "dataset_test_split": "train"}),
    ],
    ids=["grpo", "gspo", "streaming", "rloo"],
)
def test_a_script_of_trls_package_runs_to_its_last_line(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    more: dict[str, str],
) -> None:
    text = (Path(trl.__file__).parent / "scripts" / f"{name}.py").read_text()
    module = script(text, name, IMPORTS[name], monkeypatch)
    words = {
        **WORDS,
        **more,
        "model_name_or_path": str(home / "model"),
        "dataset_name": str(save_data(home / "data")),
        "output_dir": str(home / "run"),
        "reward_funcs": "test_trls_own_scripts.by_length",
    }
    given = [word for key, value in words.items() for word in (f"--{key}", value)]
    parsed = module.make_parser().parse_args_and_config(given, fail_with_unknown_args=True)
    module.main(*parsed)
    assert "Model saved" in capsys.readouterr().out
    assert moved(home, "run")
    state = json.loads((home / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def by_length(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """A reward that the script imports by its dotted name."""
    return [float(len(messages[0]["content"])) for messages in completions]


QUICK_START = """
from datasets import load_dataset

from trl import GRPOTrainer
from trl.rewards import accuracy_reward

trainer = GRPOTrainer(
    model="model",
    reward_funcs=accuracy_reward,
    train_dataset=load_dataset("two", split="train"),
)
trainer.train()
"""


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
def test_the_quick_start_runs_although_no_completion_of_a_row_is_scored(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_data(home / "two")
    module = script(
        QUICK_START,
        "quick_start",
        [("from trl import GRPOTrainer", "from lockstep import GRPOTrainer")],
        monkeypatch,
    )
    trainer = module.trainer
    trainer.close()
    # Two rows, eight completions of a row per step, three passes. The alarm is said once.
    assert trainer.state.global_step == 6
    assert capsys.readouterr().out.count("none of accuracy_reward scored any of the 8 completions") == 1
    (log,) = [line for line in trainer.state.log_history if "loss" in line]
    assert log["rewards/unscored_generations"] == 3
    assert log["reward"] == 0.0


# The way of TRL's GSPO example, whose file is not in its package: one parser for three classes, and all arguments for
# the model in a mapping, most of them None.
GSPO_SCRIPT = """
from datasets import load_dataset

from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.rewards import think_format_reward


def main(words):
    script, config, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(words)
    config.model_init_kwargs = dict(
        revision=model.model_revision,
        attn_implementation=model.attn_implementation,
        dtype=model.dtype,
        device_map=None,
        quantization_config=get_quantization_config(model),
    )

    def by_length(completions, solution, **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    rows = load_dataset(script.dataset_name, split="train")
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        args=config,
        reward_funcs=[think_format_reward, by_length],
        train_dataset=rows,
        eval_dataset=rows,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(config.output_dir)
    return trainer
"""


@pytest.mark.parametrize("changed", [True, False], ids=["lockstep", "trl"])
def test_a_script_in_the_way_of_trls_gspo_example_learns_an_adapter(
    home: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    imports = [
        (
            "from trl import (\n    GRPOConfig,\n    GRPOTrainer,\n",
            "from lockstep import GRPOConfig, GRPOTrainer\nfrom trl import (\n",
        )
    ]
    module = script(GSPO_SCRIPT, "gspo", imports if changed else [], monkeypatch)
    words = {
        **WORDS,
        **GSPO,
        "model_name_or_path": str(home / "model"),
        "dataset_name": str(save_data(home / "data")),
        "output_dir": str(home / "run"),
        "dtype": "float32",
        "gradient_accumulation_steps": "2",
        "steps_per_generation": "4",
    }
    given = [word for key, value in words.items() for word in (f"--{key}", value)]
    trainer = module.main([*given, "--use_peft", "--lora_target_modules", "q_proj", "v_proj"])
    assert trainer.state.global_step == 2
    learned = load_file(home / "run" / "adapter_model.safetensors")
    # At the start B is zero in both projections of every layer.
    assert all(bool(tensor.any()) for name, tensor in learned.items() if "lora_B" in name)
    names = {name for log in trainer.state.log_history for name in log}
    assert {"rewards/think_format_reward/mean", "rewards/by_length/mean"} <= names
    if changed:
        trainer.close()


@pytest.mark.parametrize("package", ["lockstep", "trl.experimental.online_dpo"])
def test_a_script_with_a_reward_model_runs_with_both(
    home: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
    )
    config.pad_token_id = 0
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(home / "reward")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(home / "reward")
    line = "from {} import OnlineDPOConfig, OnlineDPOTrainer"
    text = (EXAMPLES / "trl_online_dpo.py").read_text()
    module = script(text, "online_dpo", [(line.format("lockstep"), line.format(package))], monkeypatch)
    fields = {"max_steps": 2, "max_new_tokens": 8, "use_vllm": False, "bf16": False, "learning_rate": 1e-3}
    trainer = module.main(
        "model", "reward", **fields, output_dir="run", per_device_train_batch_size=2, use_cpu=True
    )
    assert trainer.state.global_step == 2
    assert moved(home, "run")
    names = {name for log in trainer.state.log_history for name in log}
    assert {"rewards/chosen", "rewards/margins", "objective/kl", "beta"} <= names
    if package == "lockstep":
        trainer.close()
