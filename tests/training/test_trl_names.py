"""What scripts and callbacks read from a trainer of TRL is there, with TRL's meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from methods import FIELDS, GROUPS, PAIRS, by_length, lora, make
from test_trainer_services import Hub
from tiny import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

import lockstep
from lockstep.engines.protocol import Engine
from lockstep.tokens.chat import render_prompt, with_joined_text


def short(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


@pytest.mark.parametrize("method", sorted(FIELDS))
def test_the_attributes_that_scripts_read(untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str) -> None:
    fields = {**FIELDS[method], "reward_weights": [1.0, 0.5]}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, reward_funcs=[by_length, short])
    assert run.reward_funcs == [by_length, short]
    assert run.reward_func_names == ["by_length", "short"]
    assert run.reward_weights.tolist() == [1.0, 0.5]
    assert run.reward_processing_classes == [None, None]
    assert (
        run.num_generations == run.num_generations_eval == (2 if method == "OnlineDPO" else fields["num_generations"])
    )
    assert run.max_completion_length == 6
    assert run.temperature == run.config.temperature
    assert (run.top_p, run.top_k, run.min_p, run.repetition_penalty) == (1.0, 0, None, 1.0)
    assert (run.use_vllm, run.vllm_mode) == (False, "colocate")
    assert (run.generation_config.max_new_tokens, run.generation_config.do_sample) == (6, True)
    assert run.generation_config.temperature == run.temperature
    assert run.beta == {"GRPO": 0.0, "RLOO": 0.05, "OnlineDPO": 0.1, "ReinforcePP": 0.01, "PPO": 0.05}[method]
    if run.beta:
        assert run.ref_model is not run.model
        assert not any(p.requires_grad for p in run.ref_model.parameters())
    else:
        assert run.ref_model is None


def test_a_reward_model_stands_for_itself_beside_its_tokenizer(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    config = LlamaConfig(
        vocab_size=384, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    config.pad_token_id = 0
    model, tokenizer = LlamaForSequenceClassification(config), make_tokenizer()
    run = make(
        "GRPO",
        untied_dir,
        tmp_path,
        hf_engine,
        GROUPS,
        reward_funcs=[by_length, model],
        reward_processing_classes=[None, tokenizer],
    )
    assert run.reward_funcs == [by_length, model]
    assert run.reward_processing_classes == [None, tokenizer]


def test_with_an_adapter_there_is_no_reference_model(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "beta": 0.1}, peft_config=lora())
    assert run.ref_model is None


def test_online_dpos_beta_is_that_of_the_epoch(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, {**PAIRS, "beta": [0.1, 0.3]})
    assert run.beta == 0.1
    run.state.epoch = 1.5
    assert run.beta == 0.3


def test_a_callback_reads_the_figures_since_the_last_log_and_adds_its_own(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    class Adds(TrainerCallback):
        seen: list[list[float]] = []  # noqa: RUF012 - read by the test

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run._metrics["train"]["mine"].append(float(state.global_step))
            self.seen.append(list(run._metrics["train"]["reward"]))

    run = make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 4, "logging_steps": 2}, callbacks=[Adds()]
    )
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    assert [log["mine"] for log in logs] == [1.5, 3.5]
    assert [len(own) for own in Adds.seen] == [1, 2, 1, 2]
    assert logs[0]["reward"] == pytest.approx(sum(Adds.seen[1]) / 2)


@pytest.mark.parametrize("method", ["GRPO", "OnlineDPO"])
def test_the_model_card_names_the_data_and_the_method(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    run = make(method, untied_dir, tmp_path / "mine", hf_engine, {**FIELDS[method], "max_steps": 1})
    run.create_model_card("a-name", "someone/sums", ["own"])
    card = (tmp_path / "mine" / "README.md").read_text()
    tag = {"GRPO": "grpo", "OnlineDPO": "online-dpo"}[method]
    for part in ("a-name", "- someone/sums", "- own", "- lockstep", f"- {tag}"):
        assert part in card, card
    run.push_to_hub(dataset_name="someone/others", model_name="mine")
    (upload,) = hub.uploads
    assert b"someone/others" in upload.files["README.md"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"importance_sampling_level": "sequence"}, "dapo sums over tokens, so each completion counts by its length"),
        ({"loss_type": "luspo"}, "LUSPO's paper has ratios per completion"),
        ({"importance_sampling_level": "sequence", "loss_type": "vespo"}, "VESPO weighs completions itself"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, ""),
        ({}, ""),
    ],
)
def test_what_trl_warns_of_is_said(fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    lockstep.GRPOConfig(output_dir="unused", **fields)
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == ("importance_sampling_level=" in err)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "2 + 2"}]}]
PLAIN = [{"role": "user", "content": "what is 2 + 2"}]


def test_text_parts_are_the_text_that_they_make(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    tokenizer = make_tokenizer()
    assert render_prompt(PARTS, tokenizer) == render_prompt(PLAIN, tokenizer)
    assert with_joined_text(PLAIN) == PLAIN
    picture = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    assert with_joined_text(picture) == picture
    seen: list[Any] = []

    def noting(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(c[0]["content"])) for c in completions]

    fields = {**GROUPS, "max_steps": 1}
    data = Dataset.from_dict({"prompt": [PARTS] * 4})
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, train_dataset=data, reward_funcs=noting)
    run.train()
    assert seen
    assert all(prompt == PLAIN for prompt in seen)
    assert all(tuple(p.ids.tolist()) == render_prompt(PLAIN, tokenizer) for p in run._train_prompts)
    assert not torch.isnan(torch.tensor([log["loss"] for log in run.state.log_history if "loss" in log])).any()
