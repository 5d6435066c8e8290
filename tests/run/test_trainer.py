"""The trainer with a real engine: exact accounting, no step without proof, and one clear error for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_vllm
from datasets import Dataset
from tiny import CONTEXT, make_model, make_tokenizer, save_model
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

import lockstep.learn.update
import lockstep.run.source
from lockstep import GRPOConfig, GRPOTrainer
from lockstep.contract.protocol import Engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import InputError, ProofError
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.receipt import check_chain
from lockstep.weights.push import SyncRecord

PROMPTS = Dataset.from_dict(
    {"prompt": [f"what is {i} + {i}" for i in range(8)], "answer": [str(2 * i) for i in range(8)]}
)


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


def trainer(
    model: str,
    folder: Path,
    *,
    engine: Engine | None = None,
    reward: Any = by_length,
    data: Any = PROMPTS,
    **fields: Any,
) -> GRPOTrainer:
    base: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
    }
    base |= {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "bf16": False, "disable_tqdm": True}
    base |= {"use_vllm": False, "learning_rate": 1e-3}
    return GRPOTrainer(
        model, reward, GRPOConfig(output_dir=str(folder), **{**base, **fields}), data, engine=engine
    )


class Gradients(TrainerCallback):
    """Records the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if not self.found:
            self.found = {n: p.grad.clone() for n, p in model.named_parameters()}


def first_gradients(model: str, folder: Path, engine: Engine, **fields: Any) -> dict[str, torch.Tensor]:
    # The comparison is in double precision, so that a difference is not rounding.
    double = {"dtype": torch.float64}
    run, callback = (
        trainer(model, folder, engine=engine, max_grad_norm=0.0, model_init_kwargs=double, **fields),
        Gradients(),
    )
    run.add_callback(callback)
    run.train()
    return callback.found


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo"])
def test_the_split_into_micro_batches_does_not_change_a_gradient(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, loss_type: str
) -> None:
    whole = first_gradients(untied_dir, tmp_path, hf_engine, loss_type=loss_type)
    for size in (1, 2, 4):
        split = first_gradients(
            untied_dir,
            tmp_path,
            hf_engine,
            loss_type=loss_type,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
        )
        for name, gradient in whole.items():
            assert float((split[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()) + 1e-9, (
                size,
                name,
            )


def test_a_step_on_stale_weights_is_refused_before_the_optimizer_moves(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(untied_dir, tmp_path, engine=hf_engine, max_steps=3)
    real = lockstep.run.source.push_weights
    moved: dict[str, torch.Tensor] = {}

    def skip_the_second(model: Any, engine: Engine, version: int) -> SyncRecord:
        if version != 1:
            return real(model, engine, version)
        moved.update({n: p.detach().clone() for n, p in model.named_parameters()})
        engine.commit_version(version)
        return SyncRecord(version, "", 0, 0, 0.0)

    monkeypatch.setattr(lockstep.run.source, "push_weights", skip_the_second)
    with pytest.raises(
        ProofError, match=r"(?s)at version 1 .* the load was acknowledged without effect"
    ) as failed:
        run.train()
    assert failed.value.check == "module_probe"
    assert run.state.global_step == 1
    assert all(torch.equal(p, moved[n]) for n, p in run.model.named_parameters())


def test_raw_log_probs_at_another_temperature_are_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lockstep.engines.transformers_engine as module

    honest = module.processed_logprobs

    def raw_reported(logits: torch.Tensor, sampling: Any, *ids: Any, **more: Any) -> torch.Tensor:
        return honest(logits, type(sampling)(max_tokens=1), *ids, **more)

    monkeypatch.setattr(module, "processed_logprobs", raw_reported)
    with pytest.raises(ProofError, match=r"(?s)semantics 0\.[1-9].*those of the raw distribution"):
        trainer(untied_dir, tmp_path, engine=hf_engine, temperature=0.7).train()


def test_the_same_temperature_on_both_sides_passes(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(untied_dir, tmp_path, engine=hf_engine, temperature=0.7, max_steps=2)
    run.train()
    assert run.state.log_history[0]["parity/max_abs_gap"] < 1e-3


def test_tokens_of_groups_that_agree_are_checked_too_and_their_step_moves_nothing(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(
        untied_dir, tmp_path, engine=hf_engine, reward=lambda completions, **_: [1.0] * len(completions)
    )
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.train()
    log = run.state.log_history[0]
    assert log["frac_reward_zero_std"] == 1.0
    assert log["parity/checked_tokens"] == round(8 * log["completions/mean_length"]) > 0
    assert all(torch.equal(p, before[n]) for n, p in run.model.named_parameters())


def test_a_step_whose_groups_agree_has_gradient_zero_and_not_none(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    calls: list[int] = []

    def agree_the_second_time(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(1)
        return by_length(completion_ids) if len(calls) == 1 else [1.0] * len(completion_ids)

    seen: list[torch.Tensor] = []

    class Weights(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(model.get_output_embeddings().weight.detach().clone())

    fields: dict[str, Any] = {
        "max_steps": 2,
        "lr_scheduler_type": "constant",
        "rehearse_rewards": False,
        "recheck_rewards": False,
    }
    run = trainer(untied_dir, tmp_path, engine=hf_engine, reward=agree_the_second_time, **fields)
    run.add_callback(Weights())
    run.train()
    # AdamW continues with its momentum, as with a gradient of zero. Without a gradient the weights would not change.
    assert not torch.equal(seen[0], seen[1])


def test_what_a_broken_call_of_train_left_does_not_reach_the_next(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(
        untied_dir, tmp_path, engine=hf_engine, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    real, calls = lockstep.learn.update.learn, []

    def breaks_at_the_second(*args: Any) -> float:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(lockstep.learn.update, "learn", breaks_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()
    assert run.state.global_step == 1


def test_tokens_of_masked_completions_are_checked_too(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(untied_dir, tmp_path, engine=hf_engine, mask_truncated_completions=True)
    run.train()
    log = run.state.log_history[0]
    assert log["completions/clipped_ratio"] > 0
    assert log["parity/checked_tokens"] == round(8 * log["completions/mean_length"])


def test_weights_set_by_hand_reach_the_engine(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), max_completion_length=8, bf16=False, disable_tqdm=True)
    run = GRPOTrainer(untied_dir, by_length, args, PROMPTS, PROMPTS.select(range(3)), engine=hf_engine)
    before = run.evaluate()
    with torch.no_grad():
        run.model.get_output_embeddings().weight.mul_(0.1)
    assert run.evaluate()["eval_reward"] != before["eval_reward"]


def test_an_evaluation_before_training_samples_nothing_on_an_engine_that_the_canary_would_refuse(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), max_completion_length=8, bf16=False, disable_tqdm=True)
    run = GRPOTrainer(untied_dir, by_length, args, PROMPTS, PROMPTS.select(range(3)), engine=hf_engine)
    score, serve, sampled = hf_engine.score, hf_engine.serve, []
    shifted = {"by": 0.5}

    def off(sequences: Any) -> Any:
        found = score(sequences)
        return {name: tuple(logp + shifted["by"] for logp in logps) for name, logps in found.items()}

    def recorded(inbox: Any) -> None:
        sampled.append(inbox)
        serve(inbox)

    monkeypatch.setattr(hf_engine, "score", off)
    monkeypatch.setattr(hf_engine, "serve", recorded)
    with pytest.raises(ProofError, match="gap"):
        run.evaluate()
    assert not sampled
    shifted["by"] = 0.0
    run.evaluate()
    assert sampled


def test_an_evaluation_before_training_probes_every_module_once(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), max_completion_length=8, bf16=False, disable_tqdm=True)
    run = GRPOTrainer(untied_dir, by_length, args, PROMPTS, PROMPTS.select(range(3)), engine=hf_engine)
    real, probes = run.proofs.probe.measure, []

    def measured(seed: int, *, every: bool = False) -> Any:
        found = real(seed, every=every)
        probes.append(found.modules)
        return found

    monkeypatch.setattr(run.proofs.probe, "measure", measured)
    run.evaluate()
    run.evaluate()
    whole, *sampled = probes
    assert whole > max(sampled)


def test_training_again_starts_anew_with_a_receipt_of_its_own(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(untied_dir, tmp_path, engine=hf_engine, max_steps=2)
    for _ in range(2):
        run.train()
        lines = (tmp_path / "receipt.jsonl").read_text().splitlines()
        check_chain(lines)
        assert [(e["kind"], e["version"]) for e in map(json.loads, lines)] == [
            ("start", 0),
            ("step", 0),
            ("step", 1),
        ]
    assert (tmp_path / "receipt.previous.jsonl").exists()


def test_a_second_pass_over_a_generation_uses_the_log_probs_it_was_sampled_at(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(
        untied_dir,
        tmp_path,
        engine=hf_engine,
        num_iterations=2,
        max_steps=4,
        save_steps=2,
        learning_rate=5e-3,
    )
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    # There are new rollouts only at steps 1 and 3. At steps 2 and 4 the policy has changed, and the gap is still that
    # of sampling time.
    assert [
        entry["num_tokens"] > (logs[i - 1]["num_tokens"] if i else 0) for i, entry in enumerate(logs)
    ] == [
        True,
        False,
        True,
        False,
    ]
    assert all(entry["parity/max_abs_gap"] < 1e-3 for entry in logs)
    assert logs[1]["clip_ratio/region_mean"] > 0
    assert logs[0]["clip_ratio/region_mean"] == 0
    receipt = [json.loads(line) for line in (tmp_path / "receipt.jsonl").read_text().splitlines()]
    # A token that is learned from twice is sampled and proven once.
    assert [entry["version"] for entry in receipt if entry["kind"] == "step"] == [0, 2]
    # In the second pass the log-probs differ by the change of the policy, and the metrics show this.
    assert logs[0]["parity/gap_staleness"] < 1e-6 < 1e-3 < logs[1]["parity/gap_staleness"]
    assert all(entry["parity/gap_defect"] == 0 for entry in logs)


def test_versions_count_optimizer_steps(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = trainer(untied_dir, tmp_path, engine=hf_engine, max_steps=3)
    run.train()
    assert hf_engine.version == 2
    run.source.push(run.state.global_step)
    assert hf_engine.version == 3


def test_evaluation_reports_the_held_out_reward_with_its_interval(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path),
        max_completion_length=8,
        bf16=False,
        num_generations_eval=3,
        disable_tqdm=True,
    )
    run = GRPOTrainer(untied_dir, by_length, args, PROMPTS, PROMPTS.select(range(5)), engine=hf_engine)
    metrics = run.evaluate()
    rewards = [sum(group.rewards) / 3 for group in run.last_eval_groups]
    assert metrics["eval_reward"] == pytest.approx(sum(rewards) / 5)
    assert (metrics["eval_problems"], metrics["eval_samples"]) == (5, 15)
    assert metrics["eval_reward_ci95"] > 0
    assert metrics == run.evaluate()


def some_scores(completions: list[str], log_metric: Any, **_: Any) -> list[float | None]:
    log_metric("characters", sum(map(len, completions)))
    return [float(len(text)) if i % 2 else None for i, text in enumerate(completions)]


def test_an_evaluation_counts_rollouts_without_a_reward_and_keeps_their_functions_metrics(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path),
        max_completion_length=8,
        bf16=False,
        num_generations_eval=2,
        disable_tqdm=True,
    )
    run = GRPOTrainer(untied_dir, some_scores, args, PROMPTS, PROMPTS.select(range(5)), engine=hf_engine)
    metrics = run.evaluate()
    lengths = [[len(rollout.text) for rollout in group.rollouts] for group in run.last_eval_groups]
    assert metrics["eval_reward"] == pytest.approx(sum(own for _, own in lengths) / 5)
    assert metrics["eval_rewards/unscored"] == 5
    assert metrics["eval_characters"] == sum(map(sum, lengths))


def test_a_reward_models_directory_is_a_reward_and_logged_metrics_are_in_the_steps_log(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def halves(completions: list[str], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("twice", 2 * trainer_state.global_step)
        return [0.5] * len(completions)

    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, num_labels=1, initializer_range=0.3, pad_token_id=None
    )  # type: ignore[arg-type]
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "taste")
    make_tokenizer().save_pretrained(tmp_path / "taste")
    run = trainer(
        untied_dir,
        tmp_path,
        engine=hf_engine,
        reward=[str(tmp_path / "taste"), halves],
        max_steps=4,
        logging_steps=2,
    )
    run.train()
    first, second = run.state.log_history[:2]
    assert first["rewards/halves/mean"] == 0.5
    assert first["rewards/taste/std"] > 0
    assert first["reward"] == pytest.approx(first["rewards/taste/mean"] + 0.5)
    assert (first["twice"], second["twice"]) == (1.0, 5.0)


def test_a_reward_function_cannot_log_under_a_name_of_the_trainers_own(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def takes(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("reward_std", 0.0)
        return [0.5] * len(completions)

    with pytest.raises(InputError, match="'reward_std' is a metric of the trainer's own"):
        trainer(untied_dir, tmp_path, engine=hf_engine, reward=takes).train()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Dataset.from_dict({"prompt": []}), "train dataset is empty"),
        (Dataset.from_dict({"text": ["a"]}), "no 'prompt' column"),
        (None, "`train_dataset` is required"),
        (Dataset.from_dict({"prompt": ["a"]}), "has 1 prompts, one generation needs 2"),
        (Dataset.from_dict({"prompt": ["ok", "z " * 600]}), r"train/1 has \d+ tokens; there is room for 500"),
    ],
)
def test_bad_data_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, data: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trainer(untied_dir, tmp_path, engine=hf_engine, data=data)


def test_bad_data_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train dataset is empty"):
        trainer("/no/such/model", tmp_path, data=Dataset.from_dict({"prompt": []}))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda **_: 1 / 0, "raised ZeroDivisionError"),
        (lambda **_: [1.0], "returned 1 scores for 4 completions"),
        (lambda completions, **_: [float("nan")] * len(completions), "NaN for all 8"),
        ([], "No reward source provided"),
        (torch.nn.Linear(1, 1), "neither a function nor a reward model"),
        ("/no/such/reward-model", "does not exist"),
    ],
)
def test_a_bad_reward_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, reward: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trainer(untied_dir, tmp_path, engine=hf_engine, reward=reward).train()


def test_weights_for_another_number_of_rewards_are_refused(untied_dir: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="2 entries for 1 reward"):
        trainer(untied_dir, tmp_path, reward_weights=[1.0, 2.0])


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="without a usable tokenizer"):
        trainer(str(tmp_path / "model"), tmp_path)


def test_an_engine_of_another_model_is_refused(untied_dir: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5)
    engine = TransformersEngine(
        str(other), load_tokenizer(str(other)), dtype=torch.float32, max_model_len=CONTEXT
    )
    with pytest.raises(ProofError, match=r"model is .*other"):
        trainer(untied_dir, tmp_path, engine=engine)


def test_attention_that_cannot_take_the_trees_mask_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    with pytest.raises(InputError, match="packed batches need 'sdpa'"):
        trainer(untied_dir, tmp_path, engine=hf_engine, model_init_kwargs={"attn_implementation": "eager"})


def test_an_engine_too_short_for_the_prompts_is_refused(untied_dir: str, tmp_path: Path) -> None:
    engine = TransformersEngine(untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=14)
    with pytest.raises(ProofError, match="max_model_len is 14"):
        trainer(untied_dir, tmp_path, engine=engine)


def test_dropout_is_off_so_that_the_policy_scores_what_it_sampled(
    tmp_path: Path, hf_engine: Engine, untied_dir: str
) -> None:
    model = make_model()
    model.config.name_or_path = untied_dir
    model.model.layers[0].self_attn.attention_dropout = 0.3
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(
        model.model.layers[0].mlp.down_proj, torch.nn.Dropout(0.5)
    )
    args = GRPOConfig(output_dir=str(tmp_path), bf16=False, max_completion_length=8)
    run = GRPOTrainer(model, by_length, args, PROMPTS, processing_class=make_tokenizer(), engine=hf_engine)
    assert [m.p for m in run.model.modules() if isinstance(m, torch.nn.Dropout)] == [0.0]
    assert {layer.self_attn.attention_dropout for layer in run.model.model.layers} == {0.0}


@pytest.mark.parametrize(
    "engine_kind", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])]
)
def test_in_bf16_on_both_sides_the_gap_is_within_its_table(tmp_path: Path, engine_kind: str) -> None:
    # The weights have a usual scale, because bf16 rounds the large logits of the other tests' models by whole nats.
    model = make_model(scale=0.05)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    fields = {"bf16": True, "use_vllm": engine_kind == "vllm", "max_steps": 2, "learning_rate": 1e-4}
    run = trainer(str(tmp_path / "model"), tmp_path, **fields)
    run.train()
    run.close()
    settings, log = run.engine.settings() if engine_kind == "vllm" else None, run.state.log_history[0]
    assert settings is None or settings.dtype == torch.bfloat16
    # Both sides round differently: the gap is not zero, and it is within the limits of bf16.
    assert 1e-5 < log["parity/mean_abs_gap"] < 0.15
    assert log["sampling/importance_sampling_ratio/max"] > 1.0
