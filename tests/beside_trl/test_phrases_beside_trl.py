"""Errors and warnings that programs recognise by a phrase of TRL's contain this phrase, which TRL's code contains too.

The phrases are those that TRL's own tests of the three trainers match (tests/test_grpo_trainer.py,
test_rloo_trainer.py, experimental/test_online_dpo_trainer.py at commit f2cd57710), and the phrases of errors beside
them.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

import peft
import pytest
from datasets import IterableDataset
from methods import GROUPS, PROMPTS, make
from tiny import make_tokenizer

from lockstep import GRPOConfig
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.images.prompts import PromptReader
from lockstep.models.policy import load_policy
from lockstep.rollouts.programs.rollout_func import Bounds, groups_of_columns

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl")


class Game:
    def reset(self, **_: Any) -> None:
        """Begin."""


def stream() -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))


PROMPT_TUNING = peft.PromptTuningConfig(task_type=peft.TaskType.CAUSAL_LM, num_virtual_tokens=8)
# Each phrase, with the fields and arguments of a trainer that meets it.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("No reward source provided", {}, {"reward_funcs": None}),
    ("`train_dataset` is required", {}, {"train_dataset": None}),
    ("max_steps", {"max_steps": -1}, {"train_dataset": None, "environment_factory": Game}),
    ("requires a `train_dataset`", {}, {"train_dataset": None, "environment_factory": {"a": Game}}),
    ("must match", {}, {"reward_processing_classes": [None, None]}),
    ("must match", {"reward_weights": [1.0, 2.0]}, {}),
    ("Iterable datasets require `dispatch_batches=False`", {"accelerator_config": {"dispatch_batches": True}},
     {"train_dataset": stream()}),
]  # fmt: skip


def said_by_trl() -> str:
    """All texts of TRL's trainers, in one text."""
    from trl.experimental.online_dpo import online_dpo_trainer
    from trl.trainer import grpo_trainer, rloo_trainer

    trees = [
        ast.parse(inspect.getsource(module)) for module in (grpo_trainer, rloo_trainer, online_dpo_trainer)
    ]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_phrases_are_trls() -> None:
    own = said_by_trl()
    others = [
        "weights each sequence by its completion length",
        "All reward functions returned None",
        "not among the environments",
    ]
    for phrase in [*others, "rollout_func must return keys", *(phrase for phrase, *_ in REFUSED)]:
        assert phrase in own, phrase


@pytest.mark.parametrize(("phrase", "fields", "arguments"), REFUSED)
# The code that refuses is the same for both.
@pytest.mark.parametrize("method", ["GRPO", pytest.param("RLOO", marks=pytest.mark.release)])
def test_an_error_contains_trls_phrase(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, phrase: str, fields: Any, arguments: Any
) -> None:
    with pytest.raises(ValueError, match=phrase):
        make(method, untied_dir, tmp_path, hf_engine, {**GROUPS, **fields}, **arguments)


def test_a_row_that_names_no_environment_is_refused_in_trls_words(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    rows = PROMPTS.map(
        lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}], "environment": "b"}
    )
    factory = {"a": Game}
    fields = {**GROUPS, "rehearse_rewards": False}
    with pytest.raises(ValueError, match="not among the environments"):
        make("GRPO", untied_dir, tmp_path, hf_engine, fields, train_dataset=rows, environment_factory=factory)


def test_missing_columns_of_a_rollout_func_are_named_in_trls_words() -> None:
    reader, columns = PromptReader(make_tokenizer()), {"prompt_ids": [], "completion_ids": []}
    with pytest.raises(ValueError, match=r"rollout_func must return keys \['logprobs'\] in its output dict"):
        groups_of_columns(columns, [], 1, 0, Bounds(9, 9, 9, ()), lambda ids: "", reader)


def test_prompt_learning_is_refused_by_its_name(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt-learning"):
        make("GRPO", untied_dir, tmp_path, hf_engine, GROUPS, peft_config=PROMPT_TUNING)


def test_a_model_with_code_of_its_own_is_refused_as_custom_code(tmp_path: Path) -> None:
    files = {"config.json": {"model_type": "remote", "auto_map": {"AutoConfig": "remote.RemoteConfig"}}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "remote.py").write_text("raise AssertionError\n")
    with pytest.raises(InputError, match="custom code"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_the_warning_of_ratios_per_completion_has_trls_words(
    loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trl.trainer.grpo_trainer"):
        GRPOConfig(output_dir="unused", importance_sampling_level="sequence", loss_type=loss, use_cpu=True)
    assert ("weights each sequence by its completion length" in caplog.text) == (loss != "grpo")


def test_the_warning_of_missing_scores_has_trls_words(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1}, reward_funcs=nothing)
    run.train()
    assert "All reward functions returned None for the following kwargs:" in caplog.text
