"""What scripts and callbacks read from a trainer of TRL is there, with TRL's meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from methods import FIELDS, GROUPS, PAIRS, PROMPTS, by_length, logs, lora, make
from test_trainer_services import Hub
from tiny import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

import lockstep
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.run.trainers.trl_names import Attribute, TRLNames
from lockstep.tokens.chat import render_prompt, with_joined_text


def short(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


@pytest.mark.parametrize("method", sorted(FIELDS))
def test_the_attributes_that_scripts_read(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str
) -> None:
    fields = {**FIELDS[method], "reward_weights": [1.0, 0.5]}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, reward_funcs=[by_length, short])
    assert run.reward_funcs == [by_length, short]
    assert run.reward_func_names == ["by_length", "short"]
    assert run.reward_weights.tolist() == [1.0, 0.5]
    assert run.reward_processing_classes == [None, None]
    assert (
        run.num_generations
        == run.num_generations_eval
        == (2 if method == "OnlineDPO" else fields["num_generations"])
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


SENTENCE = r"trainer\.{name} cannot be changed, because the run would not follow it: .*make a new trainer"


def test_an_assignment_that_the_run_would_not_follow_is_refused_for_every_attribute(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    for method in sorted(FIELDS):
        run = make(method, untied_dir, tmp_path, hf_engine, FIELDS[method])
        fixed = {
            n: a
            for n, a in vars(TRLNames).items()
            if isinstance(a, Attribute) and not a.acts and hasattr(run, n)
        }
        assert len(fixed) > 35
        for name in fixed:
            before = getattr(run, name)
            with pytest.raises(InputError, match=SENTENCE.format(name=name)):
                setattr(run, name, before)
        for name in ("train_dataset", "eval_dataset"):
            with pytest.raises(InputError, match=rf"trainer\.{name} cannot be changed"):
                setattr(run, name, PROMPTS.select(range(2)))
        absent = {n for n, a in vars(TRLNames).items() if isinstance(a, Attribute)} - fixed.keys()
        for name in (n for n in absent if not hasattr(run, n)):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                setattr(run, name, 1)


class At(TrainerCallback):
    """Does something when a step has ended."""

    def __init__(self, step: int, what: Any) -> None:
        self._step, self._what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._what()


def changes_of(folder: Path) -> list[tuple[int, str, Any]]:
    lines = [json.loads(line) for line in (folder / "receipt.jsonl").read_text().splitlines()]
    return [(line["step"], line["field"], line["value"]) for line in lines if line["kind"] == "change"]


def test_numbers_of_the_loss_change_it_from_the_next_step_on_and_after_a_resume(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**GROUPS, "beta": 0.05, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    fields |= {"entropy_coef": 0.01}

    def change() -> None:
        run.beta, run.epsilon_low, run.epsilon_high, run.entropy_coef = 40.0, 0.1, 0.4, 0.02
        run.reward_weights = [2.0]

    run = make("GRPO", untied_dir, tmp_path / "a", hf_engine, fields, callbacks=[At(2, lambda: change())])
    run.train()
    plain = make("GRPO", untied_dir, tmp_path / "b", hf_engine, fields)
    plain.train()
    changed, unchanged = (
        [entry["grad_norm"] for entry in one.state.log_history if "loss" in entry] for one in (run, plain)
    )
    assert changed[:2] == unchanged[:2]
    assert changed[2] > 2 * unchanged[2]
    assert (run.beta, run.epsilon_low, run.epsilon_high, run.entropy_coef) == (40.0, 0.1, 0.4, 0.02)
    assert changes_of(tmp_path / "a") == [
        (2, "beta", 40.0), (2, "epsilon", 0.1), (2, "epsilon_high", 0.4), (2, "entropy_coef", 0.02), (2,
        "reward_weights", [2.0]),
    ]  # fmt: skip
    again = make("GRPO", untied_dir, tmp_path / "a", hf_engine, fields)
    again.train(resume_from_checkpoint=True)
    assert again.reward_weights.tolist() == [2.0]
    assert (again.beta, again.epsilon_low, again.epsilon_high, again.entropy_coef) == (40.0, 0.1, 0.4, 0.02)
    assert logs(again)[-1] == logs(run)[-1]


@pytest.mark.parametrize("in_place", [False, True])
def test_reward_weights_change_the_rewards_of_the_next_generation(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, in_place: bool
) -> None:
    def change() -> None:
        if in_place:
            run.reward_weights[1] = 0.0
        else:
            run.reward_weights = [1.0, 0.0]

    fields = {**GROUPS, "max_steps": 3, "multi_objective_aggregation": "normalize_then_sum"}
    rewards = [by_length, short]
    run = make(
        "GRPO",
        untied_dir,
        tmp_path,
        hf_engine,
        fields,
        reward_funcs=rewards,
        callbacks=[At(1, lambda: change())],
    )
    run.train()
    first, second, _ = logs(run)
    both = first["rewards/by_length/mean"] + first["rewards/short/mean"]
    assert first["reward"] == pytest.approx(both)
    assert second["reward"] == pytest.approx(second["rewards/by_length/mean"])
    assert run.reward_weights.tolist() == [1.0, 0.0]
    assert changes_of(tmp_path) == [(1, "reward_weights", [1.0, 0.0])]


@pytest.mark.parametrize(
    ("method", "name", "value", "said"),
    [
        ("GRPO", "beta", 0.1, "whether there is a reference model is decided when the trainer is made"),
        ("RLOO", "beta", 0.0, "whether there is a reference model is decided when the trainer is made"),
        ("RLOO", "beta", float("nan"), "beta=nan; it must be a finite number"),
        ("RLOO", "beta", "0.1", "beta='0.1'; it must be a number"),
        ("OnlineDPO", "beta", 0.2, "Online DPO has one beta per epoch"),
        ("GRPO", "epsilon_low", -0.1, "epsilon=-0.1; it must be at least 0"),
        ("GRPO", "entropy_coef", 0.1, "the run was made without an entropy bonus"),
        ("GRPO", "reward_weights", [1.0, 2.0], "one finite number for each of its 1 rewards"),
        ("GRPO", "reward_weights", [float("inf")], "one finite number for each of its 1 rewards"),
        ("GRPO", "reward_weights", 1.0, "it must be a list of numbers"),
        ("GRPO", "num_completions_to_print", 0, "it must be at least 1"),
    ],
)
def test_a_value_that_the_run_cannot_use_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, name: str, value: Any, said: str
) -> None:
    run = make(method, untied_dir, tmp_path, hf_engine, FIELDS[method])
    before = getattr(run, name)
    with pytest.raises(InputError, match=said):
        setattr(run, name, value)
    after = getattr(run, name)
    assert after.tolist() == before.tolist() if name == "reward_weights" else after == before


def test_what_is_printed_can_be_changed(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1})
    run.log_completions, run.num_completions_to_print, run.log_unique_prompts = True, 1, True
    run.train()
    assert "what is" in capsys.readouterr().out
    assert (run.log_completions, run.num_completions_to_print, run.log_unique_prompts) == (True, 1, True)


def test_a_reward_model_stands_for_itself_beside_its_tokenizer(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
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


def test_with_an_adapter_there_is_no_reference_model(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
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
        "GRPO",
        untied_dir,
        tmp_path,
        hf_engine,
        {**GROUPS, "max_steps": 4, "logging_steps": 2},
        callbacks=[Adds()],
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
        (
            {"importance_sampling_level": "sequence"},
            "dapo sums tokens, which weights each sequence by its completion length",
        ),
        ({"loss_type": "luspo"}, "LUSPO's paper has ratios per completion"),
        ({"importance_sampling_level": "sequence", "loss_type": "vespo"}, "VESPO weighs completions itself"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, ""),
        ({}, ""),
    ],
)
def test_what_trl_warns_of_is_said(
    fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lockstep.GRPOConfig(output_dir="unused", **fields)
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == ("importance_sampling_level=" in err)


PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "2 + 2"}]}
]
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
    assert all(tuple(p.ids.tolist()) == render_prompt(PLAIN, tokenizer) for p in run.loop.prompts)
    assert not torch.isnan(
        torch.tensor([log["loss"] for log in run.state.log_history if "loss" in log])
    ).any()
