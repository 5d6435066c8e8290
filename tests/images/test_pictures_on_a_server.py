"""Pictures on a real vLLM server: two GRPO steps are proven to the last token; faults on the way are found.

Faults of the trainer, faults of vLLM's own reading, and weights over gloo, are tested here before a release. In CI,
`test_pictures_in_training.py` has the first, `test_pictures_on_vllm.py` the second, and `tests/server` has gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import VLLM
from looking import (
    IN_THE_TRAINER,
    another_resize,
    expanded_twice,
    gaps,
    look,
    resized_rows,
    same_grid_rows,
    wrong_order,
)
from seeing import make_seeing, make_seeing_tokenizer, save_seeing, seeing_plugin
from servers import KEY, Server, begin, connect, serve
from tiny import CONTEXT
from transformers import PreTrainedModel

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers import messages as server_messages
from lockstep.engines.servers import messages as server_pictures
from lockstep.engines.servers import requests as server_requests
from lockstep.engines.servers.calls import ServerCalls
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import EngineLost, InputError, ProofError
from lockstep.images.prompts import ImagePrompts
from lockstep.models.arithmetic import Precision
from lockstep.server.keys import KEY_VARIABLE
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.plain_forward import completion_logps
from lockstep.weights.push import push_weights

pytestmark = [*VLLM, pytest.mark.long]
LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeing_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def seeing(folder: str, path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", path)
        with serve(folder, tmp_path_factory.mktemp("server"), max_model_len=CONTEXT) as running:
            yield running


@pytest.fixture(params=["shared_memory", pytest.param("gloo", marks=pytest.mark.release)])
def either(seeing: Server, request: pytest.FixtureRequest) -> Iterator[VLLMServer]:
    made = connect(seeing.url, transport=request.param)
    yield made
    made.close()


@pytest.fixture
def engine(seeing: Server) -> Iterator[VLLMServer]:
    made = connect(seeing.url)
    yield made
    made.close()


def broken(folder: str, tmp_path: Path, engine: VLLMServer, *rows: Any, **given: Any) -> str:
    """The name of the proof that ends a run."""
    with pytest.raises(ProofError) as found:
        look(folder, tmp_path, *rows, engine=engine, **given).train()
    return found.value.check


def test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns(
    folder: str, tmp_path: Path, either: VLLMServer
) -> None:
    trainer = look(folder, tmp_path, engine=either)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    changed = {name for name, p in trainer.model.named_parameters() if not (p == before[name]).all()}
    assert any("visual.blocks" in name for name in changed)
    shown = {len(g.prompt.pictures.pictures) if g.prompt.pictures else 0 for g in trainer.rollouts()}
    assert shown == {0, 1, 2}
    probe = ModuleProbe(trainer.model, either, trainer.model.dtype).measure(1, every=True)
    assert not probe.failed
    assert probe.unreached == ("visual.patch_embed.proj.weight",)


def test_rollouts_ahead_on_a_server_of_the_config_see_their_pictures(
    folder: str, tmp_path: Path, seeing: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    where = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": seeing.url}
    ahead = {"max_staleness": 1, "vllm_importance_sampling_correction": True}
    trainer = look(folder, tmp_path, max_steps=4, **where, **ahead)
    trainer.train()
    trainer.close()
    assert trainer.state.global_step == 4
    assert gaps(trainer)
    assert max(gaps(trainer)) < LIMIT


def test_the_pixels_of_a_picture_are_sent_once(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all completions of its prompt, and over pushes: twelve requests, and four pictures."""
    sent: list[str] = []
    whole = server_requests.ServerRequests.post

    async def noted(self: Any, server: Any, body: dict[str, Any], *more: Any) -> Any:
        shown = body.get("features", {"mm_hashes": {"image": []}, "kwargs_data": {"image": []}})
        sent.extend(
            digest
            for digest, data in zip(shown["mm_hashes"]["image"], shown["kwargs_data"]["image"], strict=True)
            if data is not None
        )
        return await whole(self, server, body, *more)

    monkeypatch.setattr(server_requests.ServerRequests, "post", noted)
    trainer = look(folder, tmp_path, engine=engine)
    trainer.train()
    seen = {
        digest
        for group in trainer.rollouts()
        if group.prompt.pictures
        for digest in group.prompt.pictures.digests
    }
    assert len(seen) == 4
    assert sorted(sent) == sorted(seen)


def test_each_of_two_servers_is_sent_the_pictures_of_its_requests(
    folder: str, path: str, tmp_path: Path, seeing: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    with serve(folder, tmp_path, max_model_len=CONTEXT) as other:
        before = seeing.sampled_tokens()
        engine = connect(seeing.url, other.url)
        trainer = look(folder, tmp_path, engine=engine)
        trainer.train()
        assert max(gaps(trainer)) < LIMIT
        assert seeing.sampled_tokens() > before
        assert other.sampled_tokens() > 0
        engine.close()


def test_a_restarted_server_is_sent_every_picture_again(folder: str, tmp_path: Path, seeing: Server) -> None:
    engine = connect(seeing.url)
    trainer = look(folder, tmp_path, engine=engine, max_steps=3)
    step, done = trainer.training_step, []

    def restarting(*args: Any, **given: Any) -> Any:
        # The first step has sent the pictures.
        if len(done) == 1:
            seeing.restart()
        done.append(step(*args, **given))
        return done[-1]

    trainer.training_step = restarting  # type: ignore[method-assign]
    trainer.train()
    assert len(gaps(trainer)) == 3
    assert max(gaps(trainer)) < LIMIT
    engine.close()


@pytest.mark.release
@pytest.mark.parametrize("fault", sorted(IN_THE_TRAINER))
def test_a_fault_of_the_trainer_is_found_by_the_gap(
    fault: str, folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    IN_THE_TRAINER[fault](monkeypatch)
    assert broken(folder, tmp_path, engine) == "gap"


@pytest.mark.parametrize("proof", ["echo", "gap"])
def test_other_pixels_under_the_digest_of_a_picture_are_found(
    proof: str, folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers report the digest of what they encode. Without this proof, the gap finds it."""
    whole = server_pictures.encoded

    def swapped(picture: Any) -> str:
        return whole(replace(picture, pixel_values=picture.pixel_values.flip(-1)))

    monkeypatch.setattr(server_pictures, "encoded", swapped)
    if proof == "gap":
        monkeypatch.setattr(server_requests, "check_encoded", lambda *given: None)
    assert broken(folder, tmp_path, engine) == proof


@pytest.mark.release
def test_another_resize_is_found_by_the_gap_if_the_server_does_not_report_what_it_encoded(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = resized_rows()
    other, whole = another_resize(folder, rows), server_pictures.encoded
    changed = {p.digest: other(shown).pictures[0] for shown in shown_by(folder, rows) for p in shown.pictures}
    monkeypatch.setattr(server_pictures, "encoded", lambda piece: whole(changed[piece.digest]))
    monkeypatch.setattr(server_requests, "check_encoded", lambda *given: None)
    assert broken(folder, tmp_path, engine, rows) == "gap"


def shown_by(folder: str, rows: list[dict[str, Any]]) -> list[Any]:
    """The pictures of each row."""
    reader = ImagePrompts(make_seeing(), make_seeing_tokenizer(), folder)
    return [reader.read(row)[1] for row in rows]


@pytest.mark.release
def test_placeholders_that_are_repeated_twice_are_found_by_the_echo(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = server_requests.generation_body

    def twice(request: Any, name: str) -> dict[str, Any]:
        body = whole(request, name)
        return {**body, "token_ids": expanded_twice(body["token_ids"], request.pictures)}

    monkeypatch.setattr(server_requests, "generation_body", twice)
    assert broken(folder, tmp_path, engine) == "echo"


@pytest.mark.release
def test_pictures_in_the_wrong_order_are_found_by_the_gap(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = server_messages.features
    monkeypatch.setattr(server_messages, "features", lambda shown, *sent: whole(wrong_order(shown), *sent))
    assert broken(folder, tmp_path, engine, same_grid_rows(pictures=2)) == "gap"


@pytest.mark.release
def test_the_picture_of_another_row_is_found_by_the_gap(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows have the same ids, so that nothing but the pixels tells them apart."""
    whole, first = server_messages.features, []

    def always_the_first(shown: Any, *sent: Any) -> Any:
        if sent:
            return whole(shown, *sent)
        first.append(shown)
        return whole(first[0])

    monkeypatch.setattr(server_messages, "features", always_the_first)
    assert broken(folder, tmp_path, engine, same_grid_rows()) == "gap"


def test_pictures_that_do_not_reach_the_server_are_found_by_the_echo(
    folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = server_requests.generation_body

    def without(request: Any, name: str) -> dict[str, Any]:
        return {key: value for key, value in whole(request, name).items() if key != "features"}

    monkeypatch.setattr(server_requests, "generation_body", without)
    assert broken(folder, tmp_path, engine) == "echo"


@pytest.mark.parametrize("proof", ["caches", "gap"])
def test_an_encoder_cache_that_outlives_a_push_is_found(
    proof: str, folder: str, tmp_path: Path, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named proof finds it at the push. Without that proof, the gap finds it."""
    ask, workers = ServerCalls.ask, ServerCalls.workers

    async def without_reset(self: Any, method: str, path: str, *given: Any, **more: Any) -> Any:
        return None if path == "/reset_encoder_cache" else await ask(self, method, path, *given, **more)

    def without_report(self: Any, method: str, *given: str) -> Any:
        return [{"holding": False}] if method == "lockstep_encoded" else workers(self, method, *given)

    monkeypatch.setattr(ServerCalls, "ask", without_reset)
    if proof == "gap":
        monkeypatch.setattr(ServerCalls, "workers", without_report)
    assert broken(folder, tmp_path, engine, learning_rate=0.05) == proof
    monkeypatch.undo()
    assert engine.reset_caches()


def test_a_placeholder_is_never_sampled(folder: str, tmp_path: Path, engine: VLLMServer) -> None:
    from test_pictures_in_training import likes_placeholders

    liking = likes_placeholders(folder)
    trainer = look(liking, tmp_path, engine=engine)
    trainer.train()
    assert max(gaps(trainer)) < LIMIT
    sampled = [c.token_ids for group in trainer.rollouts() for r in group.rollouts for c in r.branches]
    assert not any((ids == liking.config.image_token_id).any() for ids in sampled)


def test_a_server_that_normalises_pixels_again_or_keeps_none_is_refused(
    folder: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    wrong = ("--mm-device-do-normalize", "--mm-processor-cache-gb", "0")
    with serve(folder, tmp_path, *wrong, max_model_len=CONTEXT) as server:
        engine = connect(server.url)
        with pytest.raises(ProofError, match="mm_device_do_normalize") as found:
            look(folder, tmp_path, engine=engine)
        assert found.value.check == "handshake"
        with pytest.MonkeyPatch.context() as unseen:
            claimed = replace(engine.settings(), normalises_pixels=False)
            unseen.setattr(engine, "settings", lambda: claimed)
            with pytest.raises(InputError, match="--mm-processor-cache-gb"):
                look(folder, tmp_path, engine=engine).train()
        engine.close()


def asked(folder: str, count: int, tokens: int) -> list[GenerationRequest]:
    """Requests for two prompts with the same ids and different pictures."""
    reader = ImagePrompts(make_seeing(), make_seeing_tokenizer(), folder)
    prompts = [reader.read(row) for row in same_grid_rows()[:2]]
    sampling = Sampling(tokens, bad_words=tuple((token,) for token in reader.banned_ids))
    return [
        GenerationRequest(RequestKey(f"p{i % 2}", i), prompts[i % 2][0], sampling, 100 + i, prompts[i % 2][1])
        for i in range(count)
    ]


def gap_by_version(models: dict[int, PreTrainedModel], found: list[Completion], sampling: Sampling) -> float:
    """The largest difference of a token's log-prob and a plain forward's with the weights of the token's version."""
    worst = 0.0
    for c in found:
        for version in set(c.weight_versions.tolist()):
            model = models[version]
            own = completion_logps(
                model, c.prompt_ids, c.token_ids, sampling, Precision(None), pictures=c.pictures
            ).numpy()
            worst = max(worst, float(abs(own - c.logprobs)[c.weight_versions == version].max()))
    return worst


def test_a_push_computes_the_pictures_of_running_requests_anew(
    folder: str, either: VLLMServer, seeing: Server
) -> None:
    first, second = make_seeing(), make_seeing(seed=1)
    push_weights(first, either, 1)
    requests = asked(folder, 50, 400)
    # The pictures arrive here, so that the first tokens that the server counts below are those of the requests.
    either.generate(asked(folder, 2, 1))
    answers: dict[RequestKey, Completion] = {}
    worker = begin(seeing, lambda: answers.update(either.generate(requests)))
    push_weights(second, either, 2)
    worker.join(100)
    across = [c for c in answers.values() if set(c.weight_versions) == {1, 2}]
    assert across, "no request was running when the update landed"
    few = [c for prompt in ("p0", "p1") for c in [c for c in across if c.key.prompt_id == prompt][:2]]
    assert {c.key.prompt_id for c in few} == {"p0", "p1"}
    assert gap_by_version({1: first, 2: second}, few, requests[0].sampling) < LIMIT
    assert gap_by_version({1: second, 2: first}, few, requests[0].sampling) > 0.1


def test_a_picture_that_the_server_has_dropped_loses_the_engine_and_is_sent_again(
    folder: str, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = make_seeing(), asked(folder, 2, 4)
    push_weights(model, engine, 1)
    (calls,) = engine.servers.all
    calls.call("POST", "/reset_mm_cache")
    with monkeypatch.context() as mistaken:
        mistaken.setattr(server_pictures.SentPictures, "missing", lambda *given: ())
        with pytest.raises(EngineLost):
            engine.generate(requests)
    engine.recover()
    push_weights(model, engine, 2)
    found = list(engine.generate(requests).values())
    assert gap_by_version({2: model}, found, requests[0].sampling) < LIMIT
