"""Each family on a real vLLM server: two proven steps in fp32 and in bf16, and faults on the way and in the server.

CI has Qwen3-VL, whose layout asks most of a server. `test_families_on_vllm.py` has bf16 and one family per
implementation of reading pictures. The others, and the server in bf16, are tested before a release.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from looking import adapter, gaps, leave_pixels_out, look, same_grid_rows, wrong_order
from PIL import Image
from portions import portion
from seeing import IN_VLLM, picture, save_seeing, seeing_plugin
from seeing_caller import caller_in
from servers import Server, connect, serve
from test_pictures_in_turns import play
from test_turns_on_vllm import check
from tiny import CONTEXT

from lockstep.engines.servers import messages as server_messages
from lockstep.engines.servers import messages as server_pictures
from lockstep.engines.servers import requests as server_requests
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import ProofError
from lockstep.watch.modules import ModuleProbe

pytestmark = [*VLLM, pytest.mark.long]
LIMIT, BF16_LIMIT = 1e-3, 0.15


@pytest.fixture(scope="module", params=portion(IN_VLLM, lambda family: family == "qwen3_vl"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", family)


def started(family: str, folder: str, here: Path, dtype: str) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", seeing_plugin(here / "plugin", family))
        with serve(folder, here, dtype=dtype, max_model_len=CONTEXT) as running:
            yield running


@pytest.fixture(scope="module")
def seeing(family: str, folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if family == "qwen2_5_vl":
        pytest.skip("test_pictures_on_a_server.py has the fp32 tests of this family")
    yield from started(family, folder, tmp_path_factory.mktemp("server"), "float32")


@pytest.fixture
def engine(seeing: Server) -> Iterator[VLLMServer]:
    made = connect(seeing.url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def narrow(family: str, folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """An engine on a server that computes in bfloat16."""
    for server in started(family, folder, tmp_path_factory.mktemp("narrow"), "bfloat16"):
        made = connect(server.url)
        yield made
        made.close()


def broken(folder: str, tmp_path: Path, engine: VLLMServer, *rows: Any, **given: Any) -> str:
    """The name of the proof that ends a run."""
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, *rows, engine=engine, **given).train()
    return found.value.check


def test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns(
    folder: str, tmp_path: Path, engine: VLLMServer
) -> None:
    trainer = look(folder, tmp_path, engine=engine)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    shown = {len(g.prompt.pictures.pictures) if g.prompt.pictures else 0 for g in trainer.rollouts()}
    assert shown == {0, 1, 2}
    assert not ModuleProbe(trainer.model, engine, trainer.model.dtype).measure(1, every=True).failed


def test_an_adapter_on_all_layers_is_proven_with_pictures(
    family: str, folder: str, tmp_path: Path, engine: VLLMServer
) -> None:
    trainer = look(folder, tmp_path, engine=engine, peft_config=adapter(family, "all"))
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT


def test_results_with_pictures_are_proven_turn_by_turn(
    family: str, folder: str, tmp_path: Path, engine: VLLMServer
) -> None:
    model, tokenizer = caller_in(folder, family)
    check(play(model, tmp_path, processing_class=tokenizer, engine=engine))


def test_equal_tiles_of_one_picture_are_proven_too(folder: str, tmp_path: Path, engine: VLLMServer) -> None:
    """All tiles of an even picture have one digest, so that vLLM computes them once."""
    rows = [
        {"prompt": [{"role": "user", "content": "what is it"}], "image": image} for image in _even_and_noisy()
    ]
    trainer = look(folder, tmp_path, rows, engine=engine)
    trainer.train()
    assert max(gaps(trainer)) < LIMIT
    (first, *_) = (p.pictures for p in trainer.loop.prompts)
    assert first is not None
    assert len(set(first.in_pieces.digests)) < len(first.in_pieces.digests) or not first.pictures[0].in_tiles


def _even_and_noisy() -> list[Image.Image]:
    return [Image.new("RGB", (32, 32), "teal"), *(picture(i, 32, 32) for i in range(3))]


def test_pixels_left_out_in_the_trainer_are_found_by_the_gap(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pixels_out(monkeypatch)
    assert broken(folder, tmp_path, engine) == "gap"


@pytest.mark.parametrize("proof", ["echo", "gap"])
def test_other_pixels_under_the_digest_of_a_picture_are_found(
    proof: str, folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers report the digest of what they encode. Without this proof, the gap finds it."""
    whole = server_pictures.encoded
    monkeypatch.setattr(
        server_pictures,
        "encoded",
        lambda piece: whole(replace(piece, pixel_values=piece.pixel_values.flip(-1))),
    )
    if proof == "gap":
        monkeypatch.setattr(server_requests, "check_encoded", lambda *given: None)
    # Pictures that no earlier test has sent: the server keeps those.
    rows = same_grid_rows(seed=100 if proof == "echo" else 200)
    assert broken(folder, tmp_path, engine, rows) == proof


def test_pictures_in_the_wrong_order_are_found_by_the_gap(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = server_messages.features
    monkeypatch.setattr(server_messages, "features", lambda shown, *sent: whole(wrong_order(shown), *sent))
    assert broken(folder, tmp_path, engine, same_grid_rows(pictures=2)) == "gap"


def test_tiles_in_other_places_than_were_sent_are_found_by_the_echo(
    family: str, folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program on the way merges the tiles of a picture: vLLM would put parts of it in the place of the marks."""
    if "qwen" in family:
        pytest.skip("this family has no tiles")
    whole = server_messages.features

    def moved(shown: Any, *sent: Any) -> Any:
        found = whole(shown, *sent)
        places = found["mm_placeholders"]["image"]
        found["mm_placeholders"] = {"image": [{**place, "offset": place["offset"] - 1} for place in places]}
        return found

    monkeypatch.setattr(server_messages, "features", moved)
    assert broken(folder, tmp_path, engine) == "echo"


@pytest.mark.release
def test_two_steps_in_bf16_are_proven_with_pictures(folder: str, tmp_path: Path, narrow: VLLMServer) -> None:
    trainer = look(folder, tmp_path, engine=narrow, bf16=True)
    trainer.train()
    means = [
        entry["parity/mean_abs_gap"] for entry in trainer.state.log_history if "parity/mean_abs_gap" in entry
    ]
    assert len(means) == 2
    assert max(means) < BF16_LIMIT


@pytest.mark.release
def test_pixels_left_out_are_found_in_bf16_too(
    folder: str, tmp_path: Path, narrow: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pixels_out(monkeypatch)
    assert broken(folder, tmp_path, narrow, bf16=True) == "gap"
