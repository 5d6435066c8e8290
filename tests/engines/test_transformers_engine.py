"""Behaviour of the transformers engine that the contract of all engines (`tests/contract`) does not cover."""

from __future__ import annotations

import pytest
import torch
from largest import Largest
from tiny import CONTEXT

from lockstep.engines import transformers_engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.tokens.tokenizer import load_tokenizer


def test_an_engine_that_was_closed_can_be_closed_again(untied_dir: str) -> None:
    engine = TransformersEngine(untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT)
    engine.close()
    engine.close()
    assert engine.version is None


def test_scores_hold_the_logits_of_a_few_rows_at_a_time(untied_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT)
    engine.commit_version(0)
    ids = tuple(range(5, 105))
    monkeypatch.setattr(transformers_engine, "_SCORED_ROWS", 4)
    with Largest() as seen:
        found = engine.score({"a": ids})["a"]
    # The largest tensor is the head's weights, a matrix for 64 rows. The logits of all 99 rows would be larger.
    assert seen.elements == engine._model.get_output_embeddings().weight.numel() < 99 * engine._model.config.vocab_size
    with torch.no_grad():
        logps = engine._model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    expected = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected)
