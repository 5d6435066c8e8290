"""Fault W2 on real vLLM: a tied lm_head keeps its old packed copy.

Lockstep repairs it; without the repair the proofs catch it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import needs_vllm
from safetensors.torch import load_file, save_file
from tiny import make_model, perturbed, save_model
from transformers import PreTrainedModel

import lockstep.engines.vllm.port.receive
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.engine import effective_settings
from lockstep.errors import ProofError
from lockstep.watch.gap import GapStats, measure_gap, over_limits
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.watch.tolerances import tolerance
from lockstep.weights.push import push_weights

pytestmark = [pytest.mark.vllm, needs_vllm]
LIMIT = tolerance(torch.float32, torch.float32)


def rollout_gap(engine: VLLMInProcess, model: PreTrainedModel) -> GapStats:
    asked = [
        GenerationRequest(RequestKey(f"p{i}", 0), (5 + i, 9, 40, 7), Sampling(max_tokens=8), i)
        for i in range(8)
    ]
    stats = GapStats()
    for completion in engine.generate(asked).values():
        ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logps = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        scored = logps[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
        stats = stats + measure_gap(
            torch.tensor(completion.logprobs), scored, [str(completion.key)], [len(scored)]
        )
    return stats


def test_a_tied_model_whose_files_also_have_the_head_is_tied_in_both_programs(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    path = save_model(tmp_path / "tied", kind="llama", tied=True) / "model.safetensors"
    weights = load_file(path)
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path, {"format": "pt"}
    )
    found = EngineArgs(str(path.parent), max_model_len=64, dtype="float32").create_engine_config()
    assert not found.model_config.hf_config.tie_word_embeddings
    assert effective_settings(found)["model_config"]["tie_word_embeddings"]


def test_a_tied_head_follows_the_embedding(tied_vllm: VLLMInProcess) -> None:
    moved = perturbed(make_model("llama", tied=True), scale=0.5)
    push_weights(moved, tied_vllm, 1)
    stats = rollout_gap(tied_vllm, moved)
    assert over_limits(stats, LIMIT) == []


def test_the_gap_catches_a_stale_tied_head(tied_vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model("llama", tied=True)
    push_weights(base, tied_vllm, 1)
    monkeypatch.setattr(lockstep.engines.vllm.port.receive, "repack_heads", lambda model, written: None)
    moved = perturbed(base, scale=0.5)
    # vLLM reports only success: the load is acknowledged and the version advances.
    assert push_weights(moved, tied_vllm, 2).version == tied_vllm.version == 2
    stats = rollout_gap(tied_vllm, moved)
    assert len(over_limits(stats, LIMIT)) >= 2


def test_the_probe_names_a_stale_tied_head(tied_vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model("llama", tied=True)
    push_weights(base, tied_vllm, 1)
    monkeypatch.setattr(lockstep.engines.vllm.port.receive, "repack_heads", lambda model, written: None)
    moved = perturbed(base, scale=0.01)
    push_weights(moved, tied_vllm, 2)
    probe = ModuleProbe(moved, tied_vllm, torch.float32)
    # Every sampled probe finds it too, not only the probe of all modules.
    for version in range(2, 6):
        record = probe.measure(version, every=False)
        assert record.failed == ["lm_head.weight"]
        with pytest.raises(ProofError, match=r"(?s)lm_head\.weight by .*older copy of this layer"):
            check_probe(record, version)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("model.layers.1.mlp.down_proj.weight", r"layers\.1\.mlp\.down_proj"),
        # Only one part of a fused layer is sent; vLLM itself counts the whole layer as loaded.
        ("model.layers.0.self_attn.q_proj.weight", r"layers\.0\.self_attn\.qkv_proj \(\d+ of \d+ elements\)"),
    ],
)
def test_a_tensor_that_was_not_sent_is_noticed_by_vllms_own_layers(
    tied_vllm: VLLMInProcess, missing: str, named: str
) -> None:
    whole = make_model("llama", tied=True)

    class Partial(torch.nn.Module):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            return iter([(n, p) for n, p in whole.named_parameters() if n != missing])

    with pytest.raises(ProofError, match=named):
        push_weights(Partial(), tied_vllm, 3)
    assert tied_vllm.version is None
    push_weights(whole, tied_vllm, 4)
    stats = rollout_gap(tied_vllm, whole)
    assert over_limits(stats, LIMIT) == []
