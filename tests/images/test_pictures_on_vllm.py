"""Pictures on real vLLM in this process: two GRPO steps are proven to the last token; the engine's faults are found.

Faults of the trainer, and an adapter on the language part alone, are tested here before a release. In CI,
`test_pictures_in_training.py` has these faults, and `test_adapters_with_pictures.py` has this adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from looking import (
    IN_THE_TRAINER,
    adapter,
    another_resize,
    expanded_twice,
    gaps,
    look,
    other_pixels,
    resized_rows,
    same_grid_rows,
    wrong_order,
)
from seeing import let_vllm_see, mixed_rows, save_seeing
from tiny import CONTEXT

from lockstep.engines.vllm import in_process
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, ProofError
from lockstep.watch.modules import ModuleProbe

pytestmark = [*VLLM, pytest.mark.long]
LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def vllm(folder: str) -> Iterator[VLLMInProcess]:
    let_vllm_see()
    started = VLLMInProcess(folder, dtype=torch.float32, max_model_len=CONTEXT)
    yield started
    started.close()


def test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns(
    folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    trainer = look(folder, tmp_path, engine=vllm)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert any("visual.blocks" in name for name in changed)
    assert any("visual.merger" in name for name in changed)
    vllm_now = trainer.rollouts()
    assert {len(group.prompt.pictures.pictures) if group.prompt.pictures else 0 for group in vllm_now} == {
        0,
        1,
        2,
    }
    probe = ModuleProbe(trainer.model, vllm, torch.float32).measure(1, every=True)
    assert not probe.failed
    assert any("visual.merger" in name for name in probe.errors)
    assert probe.unreached == ("visual.patch_embed.proj.weight",)


@pytest.mark.release
@pytest.mark.parametrize("fault", sorted(IN_THE_TRAINER))
def test_a_fault_of_the_trainer_is_found_by_the_gap(
    fault: str, folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    IN_THE_TRAINER[fault](monkeypatch)
    with pytest.raises(ProofError, match="gap") as found:
        look(folder, tmp_path, engine=vllm).train()
    assert found.value.check == "gap"


def test_a_picture_of_the_same_grid_in_the_engine_is_found_by_the_gap(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_process.prompt_with_pictures
    monkeypatch.setattr(
        in_process, "prompt_with_pictures", lambda ids, shown: whole(ids, other_pixels(shown))
    )
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, same_grid_rows(), engine=vllm).train()
    assert found.value.check == "gap"


@pytest.mark.parametrize("fault", ["another resize", "wrong order"])
def test_another_resize_or_another_order_of_pictures_in_the_engine_is_found_by_the_gap(
    fault: str, folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = resized_rows() if fault == "another resize" else same_grid_rows(pictures=2)
    change = another_resize(folder, rows) if fault == "another resize" else wrong_order
    whole = in_process.prompt_with_pictures
    monkeypatch.setattr(in_process, "prompt_with_pictures", lambda ids, shown: whole(ids, change(shown)))
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, rows, engine=vllm).train()
    assert found.value.check == "gap"


def test_placeholders_that_are_repeated_twice_are_found_by_the_echo(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_process.prompt_with_pictures
    monkeypatch.setattr(
        in_process, "prompt_with_pictures", lambda ids, shown: whole(expanded_twice(ids, shown), shown)
    )
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, engine=vllm).train()
    assert found.value.check == "echo"


def test_the_picture_of_another_row_is_found_by_the_gap(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows have the same ids, so that nothing but the pixels tells them apart."""
    whole, first = in_process.prompt_with_pictures, []

    def always_the_first(ids: list[int], shown: Any) -> Any:
        first.append(shown)
        return whole(ids, first[0])

    monkeypatch.setattr(in_process, "prompt_with_pictures", always_the_first)
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, same_grid_rows(), engine=vllm).train()
    assert found.value.check == "gap"


@pytest.mark.parametrize("proof", ["caches", "gap"])
def test_an_encoder_cache_that_outlives_a_push_is_found(
    proof: str, folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named proof finds it at the push. Without that proof, the gap finds it once the tower has learned."""
    monkeypatch.setattr(vllm.llm.llm_engine, "reset_encoder_cache", lambda: None)
    monkeypatch.setattr(vllm.llm.llm_engine, "reset_mm_cache", lambda: None)
    if proof == "gap":
        monkeypatch.setattr(in_process, "holds_no_pictures", lambda worker: True)
    trainer = look(folder, tmp_path, engine=vllm, learning_rate=0.05)
    with pytest.raises(ProofError) as found:
        trainer.train()
    assert found.value.check == proof
    monkeypatch.undo()
    vllm.reset_caches()


def test_a_placeholder_is_never_sampled_and_one_that_is_raises(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_pictures_in_training import likes_placeholders

    liking = likes_placeholders(folder)
    banned = liking.config.image_token_id
    trainer = look(liking, tmp_path, engine=vllm)
    trainer.train()
    assert max(gaps(trainer)) < LIMIT
    sampled = [c.token_ids for group in trainer.rollouts() for r in group.rollouts for c in r.branches]
    assert not any((ids == banned).any() for ids in sampled)

    unbanned = in_process.sampling_params

    def without_bans(request: Any, **more: Any) -> Any:
        params = unbanned(request, **more)
        params.extra_args = {}
        return params

    monkeypatch.setattr(in_process, "sampling_params", without_bans)
    with pytest.raises(ProofError, match=r"placeholder|bad_words"):
        look(likes_placeholders(folder), tmp_path / "again", engine=vllm).train()


def test_an_engine_that_normalises_pixels_again_is_refused(
    folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    settings = vllm.llm.llm_engine.vllm_config.model_config.multimodal_config
    assert settings.mm_device_do_normalize is False
    settings.mm_device_do_normalize = True
    try:
        with pytest.raises(ProofError, match="mm_device_do_normalize") as found:
            look(folder, tmp_path, engine=vllm)
    finally:
        settings.mm_device_do_normalize = False
    assert found.value.check == "handshake"


@pytest.mark.parametrize("where", [pytest.param("language", marks=pytest.mark.release), "all"])
def test_an_adapter_is_proven_with_pictures(
    where: str, folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    trainer = look(folder, tmp_path, engine=vllm, peft_config=adapter("qwen2_5_vl", where))
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    # This sends the merged weights of the last step.
    trainer.rollouts()
    assert not ModuleProbe(trainer.model, vllm, torch.float32).measure(1, every=True).failed


def test_text_alone_needs_no_pictures_of_a_model_that_reads_them(
    folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    rows = [{"prompt": f"{i} is"} for i in range(4)]
    trainer = look(folder, tmp_path, rows, engine=vllm)
    trainer.train()
    assert max(gaps(trainer)) < LIMIT


def test_a_prompt_that_vllm_has_no_room_for_is_named(
    folder: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    with pytest.raises(InputError, match=r"prompt train/\d has"):
        look(folder, tmp_path, mixed_rows(), engine=vllm, vllm_max_model_length=26)
