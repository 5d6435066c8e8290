"""A push is whole and acknowledged, or the engine stays closed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from tiny import make_model

from lockstep.engines.protocol import LoadedWeights
from lockstep.errors import ProofError
from lockstep.sync.push import check_loaded, push_weights
from lockstep.sync.source import PlainSource


class Recorder:
    """A receiver that does what it is told, and writes down the order of events."""

    def __init__(self, loses: str | None = None, resets: bool = True) -> None:
        self.events: list[str] = []
        self.version: int | None = 3
        self._loses = loses
        self._resets = resets

    def begin_update(self) -> None:
        self.events.append("begin")
        self.version = None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        self.events.append("load")
        specs = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors if n != self._loses]
        return LoadedWeights(tuple(specs), ())

    def reset_caches(self) -> bool:
        self.events.append("reset")
        return self._resets

    def commit_version(self, version: int) -> None:
        self.events.append("commit")
        self.version = version


def test_the_version_advances_last() -> None:
    receiver = Recorder()
    record = push_weights(make_model(), receiver, 4)
    assert receiver.events == ["begin", "load", "reset", "commit"]
    assert (receiver.version, record.version, record.tensors) == (4, 4, len(list(make_model().named_parameters())))


def test_a_tensor_that_did_not_arrive_stops_the_push() -> None:
    receiver = Recorder(loses="model.norm.weight")
    with pytest.raises(ProofError, match=r"model\.norm\.weight"):
        push_weights(make_model(), receiver, 4)
    assert receiver.version is None


def test_a_cache_reset_that_is_not_confirmed_stops_the_push() -> None:
    receiver = Recorder(resets=False)
    with pytest.raises(ProofError, match="reset of its caches"):
        push_weights(make_model(), receiver, 4)
    assert "commit" not in receiver.events


def test_an_engine_parameter_that_got_nothing_stops_the_push() -> None:
    manifest = PlainSource(make_model()).manifest(1)
    with pytest.raises(ProofError, match=r"lm_head\.weight"):
        check_loaded(manifest, LoadedWeights(manifest.tensors, ("lm_head.weight",)))


def test_an_empty_load_stops_the_push() -> None:
    with pytest.raises(ProofError, match="0 arrived"):
        check_loaded(PlainSource(make_model()).manifest(1), LoadedWeights((), ()))


def test_tied_weights_are_sent_once_and_the_digest_names_the_layout() -> None:
    tied, untied = PlainSource(make_model("llama", tied=True)), PlainSource(make_model("llama"))
    assert "lm_head.weight" not in [name for name, _ in tied]
    assert "lm_head.weight" in [name for name, _ in untied]
    assert tied.manifest(1).digest == tied.manifest(2).digest != untied.manifest(1).digest
