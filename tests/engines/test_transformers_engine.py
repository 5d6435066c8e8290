"""Behaviour of the transformers engine that the contract of all engines (`tests/contract`) does not cover."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from largest import Largest
from model_families import make_family, save_family
from tiny import CONTEXT, save

from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines import transformers_engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.run.engine import start_here
from lockstep.tokens.chat import load_tokenizer


def test_an_engine_that_was_closed_can_be_closed_again(untied_dir: str) -> None:
    engine = TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )
    engine.close()
    engine.close()
    assert engine.version is None


def test_the_engine_of_a_run_on_the_cpu_leaves_a_gpu_to_others(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    own = {"dtype": torch.float32, "max_model_len": CONTEXT}
    engine = start_here(
        untied_dir, load_tokenizer(untied_dir), use_vllm=False, vllm_arguments={}, use_cpu=True, **own
    )
    assert isinstance(engine, TransformersEngine)
    assert engine.model.device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        start_here(untied_dir, load_tokenizer(untied_dir), use_vllm=False, vllm_arguments={}, **own)


def test_scores_hold_the_logits_of_a_few_rows_at_a_time(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )
    engine.commit_version(0)
    ids = tuple(range(5, 105))
    monkeypatch.setattr(transformers_engine, "SCORED_ROWS", 4)
    with Largest() as seen:
        found = engine.score({"a": ids})["a"]
    # The largest tensor is the head's weights, a matrix for 64 rows. The logits of all 99 rows would be larger.
    assert (
        seen.elements
        == engine.model.get_output_embeddings().weight.numel()
        < 99 * engine.model.config.vocab_size
    )
    with torch.no_grad():
        given = torch.tensor([ids[:-1]], device=engine.model.device)
        logps = engine.model(input_ids=given).logits[0].log_softmax(-1).cpu()
    expected = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected)


def test_rows_that_have_ended_do_not_run_past_the_models_positions(tmp_path: Path) -> None:
    """gpt2 has no positions after its context. A row goes on, unread, until its whole batch has ended."""
    save(make_family("gpt2", n_positions=CONTEXT), tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    engine = TransformersEngine(str(tmp_path), tokenizer, dtype=torch.float32, max_model_len=CONTEXT)
    engine.commit_version(0)
    requests = [
        GenerationRequest(RequestKey("a", n), prompt, Sampling(max_tokens=room), n)
        for n, (prompt, room) in enumerate([([7] * (CONTEXT - 8), 4), ([7] * 3, CONTEXT // 2)])
    ]
    answers = engine.generate(requests)
    assert len(answers[requests[0].key].token_ids) <= 4


def test_a_batch_holds_as_many_rows_as_fit(untied_dir: str) -> None:
    engine = TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=100
    )
    engine.max_num_seqs = 3

    def sizes(*rows: tuple[int, int]) -> list[int]:
        requests = [
            GenerationRequest(RequestKey("a", n), [7] * length, Sampling(max_tokens=room), n)
            for n, (length, room) in enumerate(rows)
        ]
        return [len(batch) for batch in engine.batches([engine.row(request) for request in requests])]

    assert sizes(*[(10, 20)] * 7) == [3, 3, 1]
    assert sizes((10, 90), (20, 80), (30, 20)) == [1, 1, 1]
    assert sizes((10, 50), (50, 50), (51, 10)) == [2, 1]


@pytest.mark.parametrize("family", ["recurrent_gemma", "minimax"])
def test_padding_does_not_reach_the_state_of_a_shorter_prompt(family: str, tmp_path: Path) -> None:
    """These families let the padding on the left of a prompt into their state."""
    path = save_family(family, tmp_path)
    engine = TransformersEngine(path, load_tokenizer(path), dtype=torch.float32, max_model_len=CONTEXT)
    engine.commit_version(0)
    prompts = ([7, 9, 11] * 12, [5, 8, 13], [3, 4, 6])
    requests = [
        GenerationRequest(RequestKey("a", n), prompt, Sampling(max_tokens=4), n)
        for n, prompt in enumerate(prompts)
    ]
    assert [len(batch) for batch in engine.batches([engine.row(request) for request in requests[::-1]])] == [
        2,
        1,
    ]
    answers = engine.generate(requests)
    for request in requests:
        answer = answers[request.key]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]], device=engine.model.device)
        with torch.no_grad():
            logps = engine.model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[-len(answer.token_ids) :, 0].cpu()
        torch.testing.assert_close(torch.tensor(list(answer.logprobs)), own, atol=1e-4, rtol=0)


def test_a_mamba_in_half_precision_is_scored_as_its_own_forward_scores(tmp_path: Path) -> None:
    """Its layers give float32 to a head in bfloat16."""
    path = save_family("mamba", tmp_path)
    engine = TransformersEngine(path, load_tokenizer(path), dtype=torch.bfloat16, max_model_len=CONTEXT)
    engine.commit_version(0)
    ids = tuple(range(5, 25))
    found = engine.score({"a": ids})["a"]
    with torch.no_grad():
        given = torch.tensor([ids[:-1]], device=engine.model.device)
        logits = engine.model(input_ids=given, use_cache=False).logits[0].cpu()
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected)
