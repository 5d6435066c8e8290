"""The trainer casts weights to bf16 before it sends them to a bf16 server: half the bytes, the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from conftest import needs_vllm
from servers import Server, connect, serve
from tiny import make_model, perturbed

from lockstep.engines.servers.server import VLLMServer
from lockstep.engines.vllm.port.engine import only_dtype
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.weights.push import push_weights


@pytest.fixture(scope="module")
def bf16_server(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(untied_dir, tmp_path_factory.mktemp("bf16"), dtype="bfloat16") as running:
        yield running


def held(engine: VLLMServer) -> dict[str, torch.Tensor]:
    """The output of every module of the server for one probe input."""
    names = engine.modules(tuple(name for name, _ in make_model().named_parameters())).probed
    return engine.probe(list(names), 5, every=True)


# A server of its own.
@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_push_in_bf16_loads_the_same_weights_as_a_push_in_fp32(bf16_server: Server, transport: str) -> None:
    engine = connect(bf16_server.url, transport=transport)
    model = perturbed(make_model(), scale=0.5)
    assert engine.wire_dtype is torch.bfloat16
    narrow = push_weights(model, engine, 1)
    check_probe(ModuleProbe(model, engine, torch.bfloat16).measure(1, every=True), 1)
    after_narrow = held(engine)
    push_weights(make_model(), engine, 2)
    assert any(not torch.equal(answer, after_narrow[name]) for name, answer in held(engine).items())
    with patch.object(VLLMServer, "wire_dtype", None):
        wide = push_weights(model, engine, 3)
    assert 2 * narrow.bytes == wide.bytes == sum(p.nbytes for p in model.parameters())
    after_wide = held(engine)
    assert after_wide.keys() == after_narrow.keys()
    assert all(torch.equal(answer, after_narrow[name]) for name, answer in after_wide.items())
    engine.close()


def test_nothing_is_cast_if_parameters_have_several_dtypes() -> None:
    assert only_dtype(["float16", "float16"]) is torch.float16
    assert only_dtype(["bfloat16", "float32"]) is None
    assert only_dtype(["int8"]) is None
    assert only_dtype([]) is None
