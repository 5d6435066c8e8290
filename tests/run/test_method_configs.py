"""Errors name bad input to every method's config and trainer, before a model is loaded; nothing is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from tiny import make_model
from transformers import PreTrainedModel

import lockstep
import lockstep.learn.policy_and_reference
from lockstep.errors import InputError

METHODS = ["GRPO", "RLOO", "OnlineDPO", "ReinforcePP", "PPO"]
GROUPED = ["GRPO", "RLOO", "ReinforcePP", "PPO"]
PROMPTS = Dataset.from_dict({"prompt": ["what is 1 + 1"] * 8})


def config(method: str, **fields: Any) -> Any:
    return getattr(lockstep, f"{method}Config")(output_dir="unused", **fields)


def make(method: str, model: Any = "no/such-model", **given: Any) -> Any:
    trainer = getattr(lockstep, f"{method}Trainer")
    values = {"reward_funcs": by_length, "args": config(method), "train_dataset": PROMPTS, **given}
    return trainer(model, **values)


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class Judge:
    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[int]:
        return [0] * len(prompts)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading fail the test: the error must come before a model name is looked up."""

    def fail(name: str) -> str:
        pytest.fail(f"{name} was looked for before the input was checked")

    monkeypatch.setattr(lockstep.learn.policy_and_reference, "resolve_model", fail)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


# ---- configs
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("RLOO", {"num_generations": 1}, "num_generations=1; .* at least 2"),
        ("RLOO", {"num_generations": 3}, "not a multiple of num_generations=3"),
        ("RLOO", {"generation_batch_size": 12}, "not a multiple of per_device_train_batch_size"),
        ("RLOO", {"reward_clip_range": (1.0, -1.0)}, "reward_clip_range"),
        ("RLOO", {"reward_clip_range": (1.0,)}, "reward_clip_range"),
        ("RLOO", {"beta": 0.0, "sync_ref_model": True}, "sync_ref_model .* beta is 0"),
        ("ReinforcePP", {"baseline": "mean"}, "baseline='mean'"),
        ("ReinforcePP", {"baseline": "group"}, "num_generations=1; .* at least 2"),
        ("ReinforcePP", {"num_generations": 0}, "num_generations=0"),
        ("PPO", {"num_generations": 0}, "num_generations=0"),
        ("PPO", {"num_generations": 3}, "not a multiple of num_generations=3"),
        ("OnlineDPO", {"beta": []}, r"beta=\[\]"),
        ("OnlineDPO", {"beta": [0.1, 0.0]}, r"beta=\[0.1, 0.0\]"),
        ("OnlineDPO", {"beta": -0.1}, "beta=-0.1"),
        ("OnlineDPO", {"loss_type": "hinge"}, "loss_type='hinge'"),
        ("OnlineDPO", {"max_new_tokens": 512}, "leaves no room for a prompt in max_length=512"),
        ("OnlineDPO", {"max_new_tokens": 0}, "max_new_tokens=0"),
        (
            "OnlineDPO",
            {"vllm_importance_sampling_mode": "token_mask"},
            "vllm_importance_sampling_mode='token_mask'",
        ),
        ("OnlineDPO", {"vllm_importance_sampling_clip_max": 2.0}, "vllm_importance_sampling_clip_max=2.0"),
        ("GRPO", {"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
        ("GRPO", {"multi_objective_aggregation": "sum"}, "multi_objective_aggregation='sum'"),
        ("GRPO", {"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0"),
        ("GRPO", {"entropy_coef_min": 0.5, "entropy_coef_max": 0.1}, "entropy_coef_min=0.5 is above"),
        ("GRPO", {"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha=0.0"),
        ("GRPO", {"ref_model_sync_steps": 0}, "ref_model_sync_steps=0"),
        ("GRPO", {"num_iterations": 0}, "num_iterations=0"),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    method: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        config(method, **fields)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"token_budget": 0}, "token_budget=0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"vllm_mode": "remote"}, "vllm_mode='remote'"),
        ({"vllm_mode": "server", "use_vllm": False}, "contradict each other"),
        ({"vllm_server_base_url": "http://a:1,http://a:1"}, "different URLs"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs"),
        (
            {"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 3.0},
            "vllm_importance_sampling_clip_min=3.0",
        ),
        ({"num_completions_to_print": -1}, "num_completions_to_print=-1"),
    ],
)
def test_what_no_method_does_is_refused_by_all(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(method, **fields)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("OnlineDPO", "num_generations"),
        ("OnlineDPO", "epsilon"),
        ("OnlineDPO", "sync_ref_model"),
        ("RLOO", "loss_type"),
        ("RLOO", "scale_rewards"),
        ("ReinforcePP", "lam"),
        ("PPO", "baseline"),
        ("GRPO", "reward_clip_range"),
        ("GRPO", "no_such_field"),
    ],
)
def test_a_field_of_another_method_is_refused(method: str, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        config(method, **{name: 1})


def test_one_beta_a_run_or_one_an_epoch() -> None:
    assert config("OnlineDPO", beta=0.3).beta == [0.3]
    several = config("OnlineDPO", beta=[0.3, 0.2])
    assert [several.beta_of(epoch) for epoch in range(4)] == [0.3, 0.2, 0.2, 0.2]


@pytest.mark.parametrize("method", GROUPED)
def test_generations_that_are_used_twice_are_whole_numbers_of_steps(method: str) -> None:
    sizes = {"num_generations": 2, "per_device_train_batch_size": 4}
    with pytest.raises(InputError, match="span two generations"):
        config(method, **sizes, gradient_accumulation_steps=4, steps_per_generation=6)
    made = config(method, **sizes, gradient_accumulation_steps=2, steps_per_generation=4, save_strategy="no")
    assert (made.generation_batch_size, made.prompts_per_generation, made.single_update) == (16, 8, False)


# ---- constructors
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Dataset.from_dict({"question": ["a"] * 8}), "train dataset has no 'prompt' column, only .*question"),
        (Dataset.from_dict({"prompt": []}), "train dataset is empty"),
        ([{"prompt": "a"}], "must be a datasets.Dataset, got list"),
        (None, "`train_dataset` is required"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(method: str, data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(method, train_dataset=data)


@pytest.mark.parametrize("method", METHODS)
def test_an_evaluation_set_is_checked_as_well(method: str) -> None:
    with pytest.raises(InputError, match="eval dataset has no 'prompt' column"):
        make(method, eval_dataset=Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(InputError, match=r"eval/one dataset must be a datasets\.Dataset, got list"):
        make(method, eval_dataset={"one": ["a"]})


@pytest.mark.parametrize("method", METHODS)
def test_no_rewards_or_weights_of_others_are_named(method: str) -> None:
    with pytest.raises(InputError, match="No reward source provided"):
        make(method, reward_funcs=None)
    with pytest.raises(InputError, match="neither a function nor a reward model"):
        make(method, reward_funcs=[by_length, 7])
    with pytest.raises(InputError, match="reward_weights has 2 entries for 1"):
        make(method, args=config(method, reward_weights=[1.0, 2.0]))
    with pytest.raises(InputError, match=r"reward_processing_classes has 2 entries for 1 .* must match"):
        make(method, reward_processing_classes=[None, None])


@pytest.mark.parametrize("method", METHODS)
def test_another_methods_config_is_refused(method: str) -> None:
    stranger = METHODS[METHODS.index(method) - 1]
    with pytest.raises(InputError, match=f"{stranger}Config; {method}Trainer needs a {method}Config"):
        make(method, args=config(stranger))


@pytest.mark.parametrize("method", METHODS)
def test_an_argument_that_nothing_knows_is_refused(method: str) -> None:
    with pytest.raises(TypeError, match="teacher"):
        make(method, teacher=1)


@pytest.mark.parametrize("method", GROUPED)
def test_arguments_of_trl_that_are_not_there_yet_are_refused_by_name(method: str) -> None:
    for name in ("data_collator", "compute_metrics"):
        with pytest.raises(InputError, match=f"{name} is not supported yet"):
            make(method, **{name: object()})
        # The default values.
        with pytest.raises(InputError, match="got list"):
            make(method, **{name: None}, train_dataset=[])


@pytest.mark.parametrize("method", METHODS)
def test_the_policy_is_no_reference_for_itself(method: str, model: PreTrainedModel) -> None:
    with pytest.raises(InputError, match="ref_model is the model that is trained"):
        make(method, model, ref_model=model)
    # An adapter around the policy does not make it another model.
    with pytest.raises(InputError, match="ref_model is the model that is trained"):
        make(method, model, ref_model=model, peft_config=object())


def test_a_reference_that_would_not_be_used_is_refused(model: PreTrainedModel) -> None:
    for method in GROUPED:
        with pytest.raises(InputError, match=r"beta=0.0 leaves it unused"):
            make(method, ref_model=model, args=config(method, beta=0.0))


@pytest.mark.parametrize("method", GROUPED)
def test_a_reference_that_cannot_follow_is_refused(method: str) -> None:
    args = config(method, beta=0.1, sync_ref_model=True)
    with pytest.raises(InputError, match="sync_ref_model needs a reference model of its own"):
        make(method, args=args, peft_config=object())


def test_a_judge_or_rewards_but_not_both() -> None:
    with pytest.raises(InputError, match="give one of them"):
        make("OnlineDPO", judge=Judge())
    with pytest.raises(InputError, match="give one of them"):
        make(
            "OnlineDPO",
            reward_funcs=None,
            judge=Judge(),
            args=config("OnlineDPO", reward_model_path="somewhere"),
        )
    with pytest.raises(InputError, match="judge is a str without a method 'judge'"):
        make("OnlineDPO", reward_funcs=None, judge="gpt")
