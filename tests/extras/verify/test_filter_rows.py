"""Rows of `lockstep verify` about filters: the engine's sets are compared, and tokens are scored among them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_model

from lockstep.contract.distribution import Distribution, filtered
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.extras.verify.logprob_checks import semantics_row
from lockstep.models.arithmetic import Precision
from lockstep.tokens.arrays import KeptIds
from lockstep.watch.plain_forward import sequence_logits
from lockstep.watch.tolerances import tolerance

ASKED = Sampling(6, top_p=0.9)


def sampled(sampling: Sampling, model: Any, extra: int = 0) -> Completion:
    """A completion of an engine with some filters; `extra` ids more are kept for each token."""
    ids, logprobs, sets = [5, 6, 7], [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(sampling.max_tokens):
        logits = sequence_logits(model, ids)[-1]
        count = int((filtered(logits[None], sampling)[0] > -torch.inf).sum()) + extra
        kept = logits.topk(count).indices.sort().values
        logps = logits[kept].log_softmax(-1)
        drawn = int(torch.multinomial(logps.exp(), 1, generator=generator))
        ids.append(int(kept[drawn]))
        logprobs.append(float(logps[drawn]))
        sets.append(kept.tolist())
    kept_ids = KeptIds(
        [i for one in sets for i in one], torch.tensor([len(one) for one in sets]).cumsum(0).numpy()
    )
    versions = [1] * len(logprobs)
    return Completion(RequestKey("p", 0), ids[:3], ids[3:], logprobs, versions, "length", kept_ids=kept_ids)


@pytest.mark.parametrize(
    ("engines", "extra", "passes"),
    [
        ({}, 0, True),
        ({"top_p": 0.95}, 0, False),
        ({"top_p": 0.8}, 0, False),
        ({"top_p": 1.0}, 0, False),
        ({}, 1, False),
    ],
)
def test_a_set_of_other_filters_fails_its_row(engines: dict[str, float], extra: int, passes: bool) -> None:
    model = make_model()
    made = sampled(replace(ASKED, **engines), model, extra)  # type: ignore[arg-type]
    stage: Any = SimpleNamespace(
        sample=lambda *_, **__: [made],
        model=model,
        precision=Precision(),
        engine=SimpleNamespace(settings=lambda: SimpleNamespace(searches_top_p=False)),
        trainer=SimpleNamespace(proofs=SimpleNamespace(engine_dtype=torch.float32)),
    )
    row = semantics_row(stage, "top-p 0.9", Distribution(ASKED), True)
    assert row.passed is passes, row.figure
    assert "8 bits" not in row.figure
    if passes:
        assert "6 sets of kept ids" in row.figure
    else:
        assert "top_p" in row.figure


def test_a_row_says_that_an_engine_in_8_bits_goes_on_to_quantise_its_inputs() -> None:
    model, half = make_model(), tolerance(torch.float32, torch.float32)
    stage: Any = SimpleNamespace(
        sample=lambda *_, **__: [sampled(ASKED, model, 0)],
        model=model,
        precision=Precision(),
        engine=SimpleNamespace(settings=lambda: SimpleNamespace(searches_top_p=False)),
        trainer=SimpleNamespace(proofs=SimpleNamespace(engine_dtype=torch.float32, limit=half)),
    )
    assert (
        "; inputs in 8 bits, wider limits"
        in semantics_row(stage, "top-p 0.9", Distribution(ASKED), False).figure
    )
