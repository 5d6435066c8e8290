"""Each family on real vLLM in this process: two proven steps in fp32 and bf16, and faults of some families.

CI has one family per implementation in fp32. Adapters, tools and bf16 do not know the family; there CI has Qwen3-VL
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from looking import adapter, gaps, leave_pixels_out, look, other_pixels, same_grid_rows
from portions import portion
from seeing import IN_VLLM, let_vllm_see, save_seeing
from seeing_caller import caller_in
from test_pictures_in_turns import play
from test_turns_on_vllm import check
from tiny import CONTEXT

from lockstep.engines.vllm import in_process
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import ProofError
from lockstep.images.packs import PackPictures
from lockstep.watch.modules import ModuleProbe

pytestmark = [*VLLM, pytest.mark.long]
LIMIT, BF16_LIMIT = 1e-3, 0.15
# Qwen2.5-VL has its fp32 tests elsewhere; Idefics3 and SmolVLM are one implementation.
OF_RELEASES = {"qwen2_5_vl", "idefics3"}
# By family, what the module probe does not reach: convolutions, and embeddings of positions.
OF_TILES = {
    "model.vision_model.embeddings.patch_embedding.weight",
    "model.vision_model.embeddings.patch_embedding.bias",
    "model.vision_model.embeddings.position_embedding.weight",
}
UNREACHED = {
    "qwen2_vl": {"visual.patch_embed.proj.weight"},
    "qwen3_vl": {"visual.patch_embed.proj.weight", "visual.patch_embed.proj.bias", "visual.pos_embed.weight"},
    "smolvlm": OF_TILES,
    "idefics3": OF_TILES,
}
ONE_FAMILY = pytest.mark.parametrize(
    "family", portion(IN_VLLM, lambda family: family == "qwen3_vl"), indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=portion(IN_VLLM, lambda family: family not in OF_RELEASES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", family)


def started(folder: str, family: str, dtype: torch.dtype) -> Iterator[VLLMInProcess]:
    let_vllm_see(family)
    engine = VLLMInProcess(folder, dtype=dtype, max_model_len=CONTEXT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def vllm(folder: str, family: str) -> Iterator[VLLMInProcess]:
    if family not in UNREACHED:
        pytest.skip("test_pictures_on_vllm.py has the fp32 tests of this family")
    yield from started(folder, family, torch.float32)


@pytest.fixture(scope="module")
def narrow(folder: str, family: str) -> Iterator[VLLMInProcess]:
    """An engine that computes in bfloat16."""
    yield from started(folder, family, torch.bfloat16)


def test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns(
    family: str, folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    trainer = look(folder, tmp_path, engine=vllm)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    # This sends the weights of the last step.
    groups = trainer.rollouts()
    assert {len(group.prompt.pictures.pictures) if group.prompt.pictures else 0 for group in groups} == {
        0,
        1,
        2,
    }
    probe = ModuleProbe(trainer.model, vllm, torch.float32).measure(1, every=True)
    assert not probe.failed
    assert set(probe.unreached) == UNREACHED[family]


@ONE_FAMILY
def test_an_adapter_on_all_layers_is_proven_with_pictures(
    family: str, folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    trainer = look(folder, tmp_path, engine=vllm, peft_config=adapter(family, "all"))
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT


@ONE_FAMILY
def test_results_with_pictures_are_proven_turn_by_turn(
    family: str, folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    model, tokenizer = caller_in(folder, family)
    check(play(model, tmp_path, processing_class=tokenizer, engine=vllm))


def test_other_pixels_of_the_same_grid_in_the_engine_are_found_by_the_gap(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_process.prompt_with_pictures
    monkeypatch.setattr(
        in_process, "prompt_with_pictures", lambda ids, shown: whole(ids, other_pixels(shown))
    )
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, same_grid_rows(), engine=vllm).train()
    assert found.value.check == "gap"


def test_vectors_for_deeper_layers_that_the_trainer_leaves_out_are_found_by_the_gap(
    family: str, folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL adds vectors of the picture after its first layers too (DeepStack)."""
    if family != "qwen3_vl":
        pytest.skip("only Qwen3-VL has such vectors")
    whole = PackPictures.arguments

    def shallow(*given: Any) -> Any:
        arguments = whole(*given)
        # A pack without pictures has no arguments.
        if found := arguments.get("mm_encoder_outputs", {}).get("image"):
            found.deepstack_features = [(torch.zeros_like(part[0]),) for part in found.deepstack_features]
        return arguments

    monkeypatch.setattr(PackPictures, "arguments", shallow)
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, engine=vllm).train()
    assert found.value.check == "gap"


@ONE_FAMILY
def test_two_steps_in_bf16_are_proven_with_pictures(
    folder: str, tmp_path: Path, narrow: VLLMInProcess
) -> None:
    trainer = look(folder, tmp_path, engine=narrow, bf16=True)
    trainer.train()
    means = [
        entry["parity/mean_abs_gap"] for entry in trainer.state.log_history if "parity/mean_abs_gap" in entry
    ]
    assert len(means) == 2
    assert max(means) < BF16_LIMIT


@ONE_FAMILY
def test_pixels_left_out_are_found_in_bf16_too(
    folder: str, tmp_path: Path, narrow: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pixels_out(monkeypatch)
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, engine=narrow, bf16=True).train()
    assert found.value.check == "gap"
