"""Pictures in later turns on real vLLM, in this process and on a server: every turn is proven, with prefix caching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from looking import gaps, other_pixels
from seeing import let_vllm_see, seeing_plugin
from seeing_caller import save_seeing_caller
from servers import connect, serve
from test_pictures_in_turns import check_ids, count, play, rollouts_of
from tiny import CONTEXT

from lockstep.engines.vllm import in_process
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import ProofError
from lockstep.run.trainers.methods import GRPOTrainer

pytestmark = [*VLLM, pytest.mark.long]
LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing_caller(tmp_path_factory.mktemp("models") / "caller")


@pytest.fixture(scope="module")
def vllm(folder: str) -> Iterator[VLLMInProcess]:
    let_vllm_see()
    started = VLLMInProcess(folder, dtype=torch.float32, max_model_len=CONTEXT)
    yield started
    started.close()


def check(trainer: GRPOTrainer) -> None:
    """Two proven steps, with rollouts that have several pictures, the later ones in results."""
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    shown = {g.prompt.prompt_id: g.prompt.pictures for g in trainer.loop.generation.groups}
    own = {name: len(pictures.pictures) for name, pictures in shown.items()}
    later = [count(r) - own[r.key.prompt_id] for r in rollouts_of(trainer)]
    assert sum(later) > 1
    for completion in (c for r in rollouts_of(trainer) for c in r.branches):
        check_ids(trainer, completion)


def test_results_with_pictures_are_proven_turn_by_turn_with_prefix_caching(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cached = in_process.completion, []

    def noted(key: Any, output: Any, **more: Any) -> Any:
        if key.call:
            cached.append(output.num_cached_tokens)
        return whole(key, output, **more)

    monkeypatch.setattr(in_process, "completion", noted)
    trainer = play(folder, tmp_path, engine=vllm)
    check(trainer)
    assert vllm.settings().prefix_caching
    # Later turns find the ids before them in the cache, which is cut into blocks.
    assert max(cached) > 0


def test_a_later_picture_of_another_rollout_is_found_by_the_gap(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_process.prompt_with_pictures
    monkeypatch.setattr(
        in_process, "prompt_with_pictures", lambda ids, shown: whole(ids, other_pixels(shown))
    )
    rows = [{"prompt": [{"role": "user", "content": f"what is {i}"}]} for i in range(4)]
    with pytest.raises(ProofError) as found:
        play(folder, tmp_path, rows, engine=vllm)
    assert found.value.check == "gap"


def test_placeholders_without_their_pictures_are_found_by_the_gap(
    folder: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes placeholders without pictures for ordinary ids, and says nothing."""
    monkeypatch.setattr(in_process, "prompt_with_pictures", lambda ids, shown: {"prompt_token_ids": ids})
    rows = [{"prompt": [{"role": "user", "content": f"what is {i}"}]} for i in range(4)]
    with pytest.raises(ProofError) as found:
        play(folder, tmp_path, rows, engine=vllm)
    assert found.value.check == "gap"


def test_a_server_is_sent_later_pictures_too(
    folder: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", seeing_plugin(tmp_path_factory.mktemp("plugin")))
    with serve(folder, tmp_path_factory.mktemp("server"), max_model_len=CONTEXT) as running:
        engine = connect(running.url)
        check(play(folder, tmp_path, engine=engine))
        engine.close()
