"""The behaviour of the transformers engine that is not part of the contract of all engines."""

from __future__ import annotations

import torch
from tiny import CONTEXT

from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.tokens.tokenizer import load_tokenizer


def test_an_engine_that_was_closed_can_be_closed_again(untied_dir: str) -> None:
    engine = TransformersEngine(untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT)
    engine.close()
    engine.close()
    assert engine.version is None
