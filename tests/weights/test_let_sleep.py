"""An engine that discards its weights between two pushes gets all of them in the next push."""

from __future__ import annotations

import pytest
import torch
from conftest import start
from tiny import make_model

from lockstep.contract.tensors import HeldWeights, tensor_specs
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.weights.push import let_sleep, push_weights


@pytest.mark.parametrize("discards", [True, False])
def test_the_next_push_sends_everything_if_the_weights_were_discarded(
    discards: bool, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = start("transformers", untied_dir), make_model()
    monkeypatch.setattr(TransformersEngine, "sleep", lambda self: discards, raising=False)
    push_weights(model, engine, 0)
    assert push_weights(model, engine, 1).sent_bytes == 0
    let_sleep(engine)  # type: ignore[arg-type]
    record = push_weights(model, engine, 2)
    assert record.sent_bytes == (record.bytes if discards else 0)
    engine.close()


def test_an_engine_that_forgets_what_it_holds_takes_no_changes() -> None:
    held, specs = HeldWeights(), tensor_specs([("a", torch.ones(2)), ("b", torch.ones(3))])

    def update(base: str) -> bool:
        held.open()
        is_accepted = held.accepts_base(base)
        if is_accepted:
            held.add(specs, ["a", "b"], ["a", "b"])
        held.close(["a", "b"])
        return is_accepted

    assert update("")
    known = held.digest
    assert update(known)
    held.forget()
    assert held.digest == ""
    assert not update(known)
    assert update("")
