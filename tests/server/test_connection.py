"""`lockstep.engines.connect` on a real server: the four calls for users with a trainer of their own."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest
import torch
from conftest import VLLM
from servers import KEY, Server
from tiny import make_model, perturbed

from lockstep.connection import Connection
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines import connect
from lockstep.errors import InputError, ProofError
from lockstep.models.arithmetic import Precision
from lockstep.server.keys import KEY_VARIABLE
from lockstep.watch.plain_forward import completion_logps

pytestmark = VLLM

REQUESTS = [GenerationRequest(RequestKey(f"p{i}", 0), (7, 8, 9 + i), Sampling(12), 50 + i) for i in range(4)]


@pytest.fixture
def servers(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    made = connect(server.url)
    yield made
    made.close()


def test_nothing_is_served_before_weights_were_given(servers: Connection) -> None:
    for call in (lambda: servers.generate(REQUESTS), lambda: servers.score({"a": (1, 2, 3)}), servers.verify):
        with pytest.raises(ProofError, match="version"):
            call()


def test_update_generate_score_and_verify_agree_with_the_model(servers: Connection) -> None:
    model = perturbed(make_model(), scale=0.5)
    assert servers.update_weights(model, 3).version == servers.version == 3
    for c in servers.generate(REQUESTS).values():
        own = completion_logps(model, c.prompt_ids, c.token_ids, Sampling(1), Precision(None))
        assert torch.allclose(own, torch.tensor(c.logprobs), atol=1e-3)
        assert set(c.weight_versions) == {3}
        scored = servers.score({"it": (*c.prompt_ids.tolist(), *c.token_ids.tolist())})["it"]
        assert torch.allclose(own, torch.tensor(scored[len(c.prompt_ids) - 1 :]), atol=1e-3)
    probed, gap = servers.verify()
    assert probed.modules == probed.of_modules
    assert gap.tokens > 0


def test_verify_detects_a_model_that_has_changed(servers: Connection) -> None:
    model = make_model()
    servers.update_weights(model, 1)
    servers.verify()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(ProofError, match=r"layers\.0\.mlp\.down_proj"):
        servers.verify()


def test_a_model_of_another_kind_is_refused_before_anything_is_sent(servers: Connection) -> None:
    with pytest.raises(ProofError, match="architecture is 'Qwen2ForCausalLM'"):
        servers.update_weights(make_model("llama"), 1)
    assert servers.version is None


def test_a_transport_that_nobody_knows_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(InputError, match="must be one of auto, shared_memory, cuda_ipc, gloo"):
        connect(server.url, transport="pigeon")


def test_a_server_without_lora_is_refused_with_the_command_that_starts_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    made = connect(server.url, enable_lora=True)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(
        InputError, match="start it with 'lockstep serve MODEL --enable_lora --max_lora_rank 4'"
    ):
        made.update_weights(peft.get_peft_model(make_model(), adapter), 1)  # type: ignore[arg-type]
    made.close()
