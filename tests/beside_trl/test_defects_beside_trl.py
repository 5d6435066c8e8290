"""Two defects of TRL 1.16 that docs/reference/migrating-from-trl.md names, A3 and P4, in TRL's own trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_vllm, start
from datasets import Dataset
from methods import PROMPTS
from pairs import (
    COMMON,
    PAIRS,
    SAMPLERS,
    Played,
    Sampled,
    assert_same_gradients,
    both,
    decided,
    distance,
    norm,
    train,
)
from tiny import CONTEXT, make_tokenizer, save
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import lockstep
from lockstep.contract.protocol import Engine, RequestKey
from lockstep.engines.vllm.port.requests import completion
from lockstep.errors import InputError
from lockstep.weights.push import push_weights

pytest.importorskip("trl", reason="TRL is not installed here")

# Prompts of several lengths in every generation.
UNEVEN = Dataset.from_dict({"prompt": ["what is 1" + " + 1" * i for i in range(8)]})
STEP: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 1}
PAIR = {**PAIRS, **STEP}
GROUPS = {**STEP, "num_generations": 4, "max_completion_length": 12}
TOKENS = {"vllm_importance_sampling_mode": "token_truncate"}


@pytest.fixture(scope="module")
def engine(talkative_dir: str) -> Any:
    return start("transformers", talkative_dir)


def by_a_server(trainer: Any, sampled: Sampled) -> None:
    """TRL's code for a vLLM server.

    The server is replaced and answers with the completions that our trainer sampled.
    """

    def generate(prompts: list[str], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        ids = [ids for ids in trainer.processing_class(prompts)["input_ids"] for _ in range(n)]
        return {"completion_ids": [c.token_ids.tolist() for c in sampled.take(ids)]}

    trainer.args.use_vllm, trainer.vllm_mode = True, "server"
    trainer.vllm_client = SimpleNamespace(generate=generate)
    trainer._move_model_to_vllm = lambda: None
    trainer.generation_config = SimpleNamespace(max_tokens=trainer.args.max_new_tokens)


def by_a_server_that_masks(trainer: Any, sampled: Sampled) -> None:
    """The same code, with the padding masked."""
    by_a_server(trainer, sampled)
    generate, pad = trainer._generate_vllm, trainer.processing_class.pad_token_id

    def masked(*args: Any) -> Any:
        prompt_ids, _, completion_ids, completion_mask = generate(*args)
        return prompt_ids, (prompt_ids != pad).long(), completion_ids, completion_mask

    trainer._generate_vllm = masked


def gpt2(folder: Path) -> str:
    """A tiny model with learned positions. If positions count padding, it gives other log-probs."""
    sizes: dict[str, Any] = {
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": CONTEXT,
    }
    # TRL trains GRPO and RLOO with dropout if the model has dropout.
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    made = GPT2LMHeadModel(
        GPT2Config(**sizes, **dropout, initializer_range=0.3, eos_token_id=0, bos_token_id=None)
    )
    made.generation_config.eos_token_id = 0
    return str(save(made, folder))


def counting_what_is_masked_out(sampler: Callable[..., None]) -> Callable[..., None]:
    """A sampler that also makes the trainer's models count positions from the first token that is not masked."""

    def prepare(trainer: Any, sampled: Sampled) -> None:
        sampler(trainer, sampled)
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                model.forward = _with_positions(model.forward)

    return prepare


def _with_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return forward(*args, attention_mask=attention_mask, position_ids=positions, **kwargs)

    return counted


def parted(mine: Played, other: Played) -> float:
    """The distance of the two runs' first gradients, divided by the norm of the second run's gradient."""
    return distance(mine.gradients[0], other.gradients[0]) / norm(other.gradients[0].values())


def test_a3_through_a_server_trls_online_dpo_attends_to_the_padding_of_shorter_prompts_and_ours_has_none(
    talkative_dir: str, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(sampler: Callable[..., None], data: Dataset) -> tuple[Played, Played]:
        monkeypatch.setitem(SAMPLERS, "OnlineDPO", sampler)
        return both(
            "OnlineDPO", talkative_dir, tmp_path, engine, PAIR, reward_funcs=decided, train_dataset=data
        )

    # With prompts of one length both trainers agree on this path too.
    assert_same_gradients(*run(by_a_server, PROMPTS))
    mine, other = run(by_a_server, UNEVEN)
    assert parted(mine, other) > 0.1
    assert abs(mine.logs[0]["logps/chosen"] - other.logs[0]["logps/chosen"]) > 1
    # There is no other difference: when TRL's padding is masked, its gradient equals ours.
    mine, other = run(by_a_server_that_masks, UNEVEN)
    assert_same_gradients(mine, other)
    assert mine.logs[0]["logps/chosen"] == pytest.approx(other.logs[0]["logps/chosen"], rel=1e-5)


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "OnlineDPO"])
def test_a3_trls_trainers_count_padding_in_positions_and_ours_have_none(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt2(tmp_path / "gpt2")
    engine = start("transformers", model)
    fields = PAIR if method == "OnlineDPO" else {**GROUPS, **(TOKENS if method == "GRPO" else {"beta": 0.0})}
    sampler = by_a_server_that_masks if method == "OnlineDPO" else SAMPLERS[method]

    def run(sampler: Callable[..., None], data: Dataset) -> tuple[Played, Played]:
        monkeypatch.setitem(SAMPLERS, method, sampler)
        return both(method, model, tmp_path, engine, fields, reward_funcs=decided, train_dataset=data)

    assert_same_gradients(*run(sampler, PROMPTS))
    mine, other = run(sampler, UNEVEN)
    assert parted(mine, other) > 0.1
    if method == "GRPO":
        # The engine does not pad, so its log-probs show which trainer is right.
        assert mine.logs[0]["sampling/sampling_logp_difference/max"] < 1e-4
        assert other.logs[0]["sampling/sampling_logp_difference/max"] > 1
    assert_same_gradients(*run(counting_what_is_masked_out(sampler), UNEVEN))


@pytest.fixture(scope="module")
def vllm(talkative_dir: str) -> Iterator[Any]:
    """Real vLLM with the model's weights."""
    started = start("vllm", talkative_dir)
    push_weights(AutoModelForCausalLM.from_pretrained(talkative_dir), started, 1)
    yield started
    started.close()  # type: ignore[attr-defined]


def trls_trainer(model: str, folder: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Any:
    """TRL's GRPO trainer with its own generation by vLLM. The engine already runs and holds the model's weights."""
    import trl.trainer.grpo_trainer
    from trl.generation.vllm_generation import VLLMGeneration

    class Running(VLLMGeneration):
        def _init_vllm(self) -> None:
            self.llm = vllm.llm

        def sync_weights(self) -> None:
            """Do nothing: nothing was learned yet. (TRL 1.16's own sync does not load into vLLM 0.32 on a CPU.)"""

    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", Running)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    fields = {**COMMON, **GROUPS, "use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": kwargs}
    config = trl.GRPOConfig(str(folder), use_cpu=True, gradient_checkpointing=False, **fields)
    return trl.GRPOTrainer(model, decided, config, PROMPTS, processing_class=tokenizer)


@pytest.mark.vllm
@needs_vllm
def test_p4_trl_takes_the_likeliest_tokens_log_prob_where_several_were_asked_for(
    talkative_dir: str, tmp_path: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AutoModelForCausalLM.from_pretrained(talkative_dir)
    prompts = [make_tokenizer()(text)["input_ids"] for text in PROMPTS["prompt"] for _ in range(4)]
    several = trls_trainer(talkative_dir, tmp_path, vllm, monkeypatch, logprobs=5)
    completions, found = several._generate_single_turn(prompts, None, {}, 4)
    passed_over = 0
    for prompt, ids, values in zip(prompts, completions, found, strict=True):
        likeliest, sampled = of_policy(policy, prompt, ids)
        assert values == pytest.approx(likeliest, abs=1e-4)
        passed_over += sum(a - b > 0.1 for a, b in zip(likeliest, sampled, strict=True))
    assert passed_over > 50


@pytest.mark.vllm
@needs_vllm
def test_p4_with_it_trl_learns_from_ratios_that_are_nats_off_and_ours_refuses_the_setting(
    talkative_dir: str, tmp_path: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = []
    for kwargs in ({}, {"logprobs": 5}):
        trainer = trls_trainer(talkative_dir, tmp_path, vllm, monkeypatch, **kwargs)
        (log,) = train(trainer).logs
        worst.append(log["sampling/sampling_logp_difference/max"])
    assert worst[0] < 1e-4 < 1 < worst[1]
    with pytest.raises(InputError, match="generation_kwargs"):
        lockstep.GRPOConfig(str(tmp_path), generation_kwargs={"logprobs": 5})


@pytest.mark.vllm
@needs_vllm
def test_p4_of_the_same_answer_ours_reads_the_sampled_tokens_log_probs_and_trl_the_first_of_each_list(
    talkative_dir: str, vllm: Any
) -> None:
    from trl.generation.vllm_generation import extract_logprobs
    from vllm import SamplingParams

    policy = AutoModelForCausalLM.from_pretrained(talkative_dir)
    prompt = make_tokenizer()(PROMPTS["prompt"][0])["input_ids"]
    asked = SamplingParams(logprobs=5, max_tokens=40, seed=1, ignore_eos=True)
    (output,) = vllm.llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    answer = completion(RequestKey("p", 0), output, filtered=False, adapter=None)
    likeliest, sampled = of_policy(policy, prompt, answer.token_ids)
    assert sum(a - b > 0.1 for a, b in zip(likeliest, sampled, strict=True)) > 20
    assert answer.logprobs == pytest.approx(sampled, abs=1e-4)
    (theirs,), _ = extract_logprobs([output])
    assert [values[0] for values in theirs] == pytest.approx(likeliest, abs=1e-4)


def of_policy(
    policy: Any, prompt: Sequence[int], completion_ids: Sequence[int]
) -> tuple[list[float], list[float]]:
    """The log-probs of the most likely token at each place of a completion, and those of its own tokens."""
    ids = [*prompt, *completion_ids]
    with torch.no_grad():
        logps = policy(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    own = logps.gather(1, torch.tensor(completion_ids)[:, None])[:, 0]
    return logps.max(-1).values.tolist(), own.tolist()
