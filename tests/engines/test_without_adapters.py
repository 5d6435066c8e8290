"""Engines without LoRA need nothing of the extra that sends adapters alone: its folder may be gone."""

from __future__ import annotations

import sys

import pytest
from conftest import VLLM, start
from transformers import AutoModelForCausalLM

from lockstep.contract.adapters import NoAdapters
from lockstep.extensions import ADAPTERS, load
from lockstep.weights.push import push_weights

EXTRA = "lockstep.extras.lora_alone"


@pytest.fixture
def without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(EXTRA)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, EXTRA, None)
    with pytest.raises(ModuleNotFoundError):
        load(ADAPTERS["servers"])


@pytest.mark.parametrize("kind", ["vllm", "server"])
@pytest.mark.usefixtures("without_the_extra")
@VLLM[0]
@VLLM[1]
def test_an_engine_starts_loads_weights_and_answers_where_the_extra_is_gone(
    kind: str, request: pytest.FixtureRequest, untied_dir: str
) -> None:
    from servers import connect

    is_server = kind == "server"
    engine = connect(request.getfixturevalue("server").url) if is_server else start(kind, untied_dir)
    try:
        assert isinstance(engine.adapters, NoAdapters)  # type: ignore[attr-defined]
        push_weights(AutoModelForCausalLM.from_pretrained(untied_dir), engine, 1)  # type: ignore[arg-type]
        assert len(engine.score({"some": (10, 20, 30)})["some"]) == 2
    finally:
        engine.close()
