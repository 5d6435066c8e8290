"""The transport from GPU to GPU to a real server on a CPU, where gloo takes the place of NCCL.

`nccl` itself is refused there.
"""

from __future__ import annotations

import pytest
import torch
from conftest import VLLM
from servers import Server, connect
from tiny import make_model, perturbed

from lockstep.errors import InputError
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.weights.push import push_weights
from lockstep.weights.wire.network import NCCL, check_gpus

pytestmark = VLLM


def test_a_real_server_receives_computes_with_and_acknowledges_every_push(server: Server) -> None:
    engine, model = connect(server.url, transport=NCCL), make_model()
    for version, changed in enumerate([model, perturbed(model, scale=0.5), perturbed(model, scale=0.5)]):
        record = push_weights(changed, engine, version)
        check_probe(ModuleProbe(changed, engine, torch.float32).measure(version, every=True), version)
        assert record.sent_bytes == (0 if version == 2 else record.bytes)
        assert record.in_full == ""
    with pytest.raises(InputError, match=f"the server at {server.url} computes without an NVIDIA GPU"):
        check_gpus("GPU-0", engine.servers.all)
    engine.close()
