"""Known faults that cannot happen in this code, or that it refuses at the start; one test shows each of them."""

from __future__ import annotations

import random
from pathlib import Path

import datasets
import pytest
import torch
from conftest import needs_vllm, start
from stages import config, stage_on
from test_injected_faults import CAUGHT_BY
from tiny import CONTEXT, make_model, make_tokenizer

from lockstep.algorithms.corrections import importance_weights
from lockstep.algorithms.segments import Segments
from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.extras.selftest.seams import Between
from lockstep.extras.verify.stage import Stage
from lockstep.learn.generation import prepare_generation
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.rollouts.driver import collect
from lockstep.rollouts.group import Prompt
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.tokens.chat import fit_vocabulary
from lockstep.watch.custody import Record
from lockstep.weights.push import push_weights

KNOWN = [
    f"{letter}{i}"
    for letter, count in zip("TLWPA", (6, 5, 8, 6, 6), strict=True)
    for i in range(1, count + 1)
]


def test_every_known_fault_is_injected_or_shown_to_be_impossible() -> None:
    here = {
        name.split("_")[1].upper() for name in globals() if name.startswith("test_") and name[6].isdigit()
    }
    assert set(KNOWN) - set(CAUGHT_BY) <= here
    assert here <= set(KNOWN)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what is this?", "image": "a.png"},
        {"prompt": "what is this?", "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]},
    ],
)
def test_t3_images_are_refused_and_so_never_expanded_twice(
    untied_dir: str, tmp_path: Path, row: dict
) -> None:
    data = datasets.Dataset.from_list([row] * 3)
    with pytest.raises(InputError, match="image"):
        GRPOTrainer(untied_dir, lambda completions, **_: [0.0] * len(completions), config(tmp_path), data)


def test_t5_a_rollout_cut_at_the_limit_ends_there(stage: Stage) -> None:
    cut = [c for c in stage.sample(Sampling(3), samples=4) if c.finish_reason == "length"]
    assert cut
    stage.step()
    generation = stage.trainer.loop.generation
    assert generation is not None
    completions = {str(c.key): c for c in generation.completions}
    for sequence in (s for batch in generation.micro_batches for s in batch):
        # No end token and no next turn is appended to the sampled ids.
        assert sequence.completion_ids.tolist() == completions[sequence.name].token_ids.tolist()
        assert sequence.prompt_ids.tolist() == completions[sequence.name].prompt_ids.tolist()


def test_t6_an_added_token_that_would_be_used_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(200)])
    tokenizer.pad_token = "<extra199>"
    with pytest.raises(InputError, match="embeds only 384 tokens"):
        fit_vocabulary(make_model(), tokenizer)


def test_t6_an_embedding_resized_on_one_side_fails_the_handshake(untied_dir: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied_dir)
    model.resize_token_embeddings(400)
    engine = start("transformers", untied_dir)
    data = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    with pytest.raises(ProofError, match="vocab_size is 384 in the engine, training assumes 400"):
        GRPOTrainer(
            model, lambda completions, **_: [0.0] * len(completions), config(tmp_path), data, engine=engine
        )


def test_l4_answers_in_any_order_give_the_same_groups(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.push()

    def groups() -> list[list[tuple[int, ...]]]:
        made = collect(
            stage.prompts,
            stage.engine,
            stage.tokenizer,
            stage.sampling(),
            Record,
            num_generations=3,
            run_seed=1,
            version=stage.version,
        )
        return [[r.completion.token_ids.tolist() for r in group.rollouts] for group in made]

    straight = groups()
    real = stage.engine.serve

    def mixed(things: list) -> list:
        random.Random(3).shuffle(things)
        return things

    def shuffled(inbox: Inbox) -> None:
        real(Between(inbox, requests=mixed, answers=lambda requests, answers: mixed(answers)))  # type: ignore[arg-type]

    monkeypatch.setattr(stage.engine, "serve", shuffled)
    stage.trainer.source.send(stage.version)
    assert groups() == straight


def test_w5_fifty_syncs_leave_every_weight_bit_identical(stage: Stage) -> None:
    before = {n: p.detach().clone() for n, p in stage.model.named_parameters()}
    digests = set()
    for _ in range(50):
        stage.push()
        digests.add(stage.trainer.proofs.push.proof.push.digest)  # type: ignore[union-attr]
    assert len(digests) == 1
    assert all(torch.equal(p, before[n]) for n, p in stage.model.named_parameters())


def test_w7_a_load_that_breaks_off_closes_the_engine(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensors, base=""):  # type: ignore[no-untyped-def]
        raise ConnectionError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(stage.engine, "load", broken)
        with pytest.raises(LockstepError, match="pushed into the engine: ConnectionError: half-way"):
            stage.push()
    request = GenerationRequest(RequestKey("p", 0), (5, 6, 7), Sampling(2), 1)
    with pytest.raises(ProofError, match="no committed weights"):
        stage.engine.generate([request])
    with pytest.raises(ProofError, match="no committed weights"):
        stage.engine.score({"a": (5, 6, 7)})
    stage.push(every_module=True)
    assert stage.engine.generate([request])


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])])
def test_w8_an_engine_that_was_started_again_serves_nothing(name: str, untied_dir: str) -> None:
    engine = start(name, untied_dir)
    prompt = Prompt("p", (5, 6), "")
    try:
        with pytest.raises(ProofError, match="the engine holds version None, the trainer last pushed 3"):
            collect(
                [prompt],
                engine,
                make_tokenizer(),
                Sampling(2),
                Record,
                num_generations=1,
                run_seed=0,
                version=3,
            )
        with pytest.raises(ProofError, match="no committed weights"):
            engine.generate([GenerationRequest(RequestKey("p", 0), prompt.ids, Sampling(2), 1)])
    finally:
        engine.close()


@pytest.mark.vllm
@needs_vllm
def test_p1_an_engine_that_reports_raw_log_probs_fails_the_handshake(untied_dir: str, tmp_path: Path) -> None:
    kwargs = {"logprobs_mode": "raw_logprobs"}
    with (
        pytest.raises(ProofError, match="logprobs_mode is 'raw_logprobs' in the engine"),
        stage_on(untied_dir, tmp_path, use_vllm=True, bf16=False, vllm_engine_kwargs=kwargs),
    ):
        pass


@pytest.mark.vllm
@needs_vllm
def test_p5_an_engine_of_another_dtype_fails_the_handshake(untied_dir: str, tmp_path: Path) -> None:
    engine = VLLMInProcess(untied_dir, dtype=torch.bfloat16, max_model_len=CONTEXT)
    try:
        with (
            pytest.raises(
                ProofError, match=r"dtype is torch\.bfloat16 in the engine.*head_dtype is torch\.bfloat16"
            ),
            stage_on(untied_dir, tmp_path, engine=engine, bf16=False),
        ):
            pass
    finally:
        engine.close()


def test_p6_long_sequences_keep_their_weight(tmp_path: Path) -> None:
    # With 2,000 tokens that are each off by 0.01 nats, exp of the sum would be 2e-9.
    behaviour = torch.zeros(2000)
    clip_max = GRPOConfig(output_dir=str(tmp_path)).vllm_importance_sampling_clip_max
    whole = Segments(torch.tensor([2000]))
    weights = importance_weights(behaviour - 0.01, behaviour, whole, "token_truncate", None, clip_max)
    assert torch.allclose(weights, torch.full((2000,), 0.99005), atol=1e-4)


def test_p6_raw_ratios_are_logged(stage: Stage) -> None:
    stage.step()
    logged = stage.trainer.step_log.take(stage.trainer.clock)
    assert {"min", "mean", "max"} == {
        name.rpartition("/")[2] for name in logged if name.startswith("sampling/importance_sampling_ratio/")
    }


def test_a4_truncation_is_the_engines_word(stage: Stage) -> None:
    stage.step()
    generation = stage.trainer.loop.generation
    assert generation is not None
    masking = config(Path(stage.config.output_dir), mask_truncated_completions=True)
    reasons = {str(c.key): c.finish_reason for c in generation.completions}
    for batch in prepare_generation(generation.groups, GRPOObjective(masking), stage.version).micro_batches:
        assert all((s.weight == 0) == (reasons[s.name] == "length") for s in batch)


def test_weights_of_an_adapter_are_not_taken_for_those_of_its_model(untied_dir: str) -> None:
    # An unknown wrapper has names that the engine does not have; LoRA has its own source (weights/merged.py).
    engine = start("transformers", untied_dir)
    with pytest.raises(ProofError, match="manifest"):
        push_weights(torch.nn.ModuleDict({"base_model": make_model()}), engine, 1)
    assert engine.version is None
