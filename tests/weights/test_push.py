"""After a push that is not complete and acknowledged, the engine refuses to generate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import make_model

from lockstep.contract.tensors import LoadedWeights, tensor_digest, tensor_specs
from lockstep.engines.servers.messages import loaded_by
from lockstep.engines.vllm.port.receive import StoredNames
from lockstep.errors import InputError, ProofError
from lockstep.weights.push import check_loaded, push_weights
from lockstep.weights.source import PlainSource, Update


class Recorder:
    """A receiver that does what it is told, and records the order of events."""

    wire_dtype: torch.dtype | None = None

    def __init__(self, loses: str | None = None, resets: bool = True, damages: str | None = None) -> None:
        self.events: list[str] = []
        self.version: int | None = 3
        self._loses = loses
        self._resets = resets
        self._damages = damages

    def begin_update(self) -> None:
        self.events.append("begin")
        self.version = None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        self.events.append("load")
        arrived = [(n, self._damage(n, t)) for n, t in tensors if n != self._loses]
        return LoadedWeights(tensor_specs(arrived), ())

    def _damage(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != self._damages:
            return tensor
        changed = tensor.clone()
        changed.view(torch.int32).flatten()[-1] ^= 1
        return changed

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
    assert (receiver.version, record.version, record.tensors) == (
        4,
        4,
        len(list(make_model().named_parameters())),
    )


@pytest.mark.parametrize("version", [-1, 1 << 63, 1.0, "4", True, None])
def test_a_version_that_is_no_number_of_a_version_is_refused_before_anything_is_sent(version: Any) -> None:
    receiver = Recorder()
    with pytest.raises(InputError, match="a weight version must be a whole number"):
        push_weights(make_model(), receiver, version)
    assert (receiver.events, receiver.version) == ([], 3)


def test_a_tensor_that_did_not_arrive_stops_the_push() -> None:
    receiver = Recorder(loses="model.norm.weight")
    with pytest.raises(ProofError, match=r"model\.norm\.weight"):
        push_weights(make_model(), receiver, 4)
    assert receiver.version is None


def test_one_flipped_bit_stops_the_push_and_names_the_tensor() -> None:
    receiver = Recorder(damages="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ProofError, match=r"bytes of 1 of \d+ tensors .*layers\.1\.mlp\.up_proj") as failed:
        push_weights(make_model(), receiver, 4)
    assert failed.value.check == "digest"
    assert receiver.version is None


def test_the_digest_is_that_of_the_bytes() -> None:
    model = make_model()
    before = PlainSource(model).manifest(1).digest
    assert PlainSource(make_model()).manifest(7).digest == before
    with torch.no_grad():
        # Two rows of one matrix are swapped: every sum over the tensor stays the same.
        model.model.layers[0].mlp.up_proj.weight[[3, 5]] = model.model.layers[0].mlp.up_proj.weight[[5, 3]]
    assert PlainSource(model).manifest(1).digest != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_digest_does_not_depend_on_how_a_tensor_lies_in_memory(dtype: torch.dtype) -> None:
    tensor = (torch.randn(6, 10) * 50).to(dtype)
    assert tensor_digest(tensor.T.contiguous().T) == tensor_digest(tensor)
    assert tensor_digest(tensor[2:3]) == tensor_digest(tensor[2].clone())
    assert tensor_digest(torch.empty(0)) == tensor_digest(torch.empty(0, 4))


class Narrow(Recorder):
    """A receiver that loads everything in bf16 and keeps it."""

    wire_dtype = torch.bfloat16

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        self.arrived = dict(tensors)
        return LoadedWeights(tensor_specs(list(self.arrived.items())), ())


def test_wider_tensors_are_cast_for_an_engine_that_would_cast_them_and_no_others() -> None:
    model, receiver = make_model(), Narrow()
    model.model.norm.to(torch.float16)
    record = push_weights(model, receiver, 1)
    for name, parameter in model.named_parameters():
        expected = parameter if parameter.dtype == torch.float16 else parameter.to(torch.bfloat16)
        assert receiver.arrived[name].dtype == expected.dtype
        assert torch.equal(receiver.arrived[name], expected)
    assert record.bytes == 2 * sum(p.numel() for p in model.parameters())
    assert record.digest == Update(PlainSource(model), torch.bfloat16).manifest(1).digest
    assert record.digest != PlainSource(model).manifest(1).digest


def test_a_cache_reset_that_is_not_confirmed_stops_the_push() -> None:
    receiver = Recorder(resets=False)
    with pytest.raises(ProofError, match="reset of its caches"):
        push_weights(make_model(), receiver, 4)
    assert "commit" not in receiver.events


def test_an_engine_parameter_that_got_nothing_stops_the_push() -> None:
    manifest = PlainSource(make_model()).manifest(1)
    with pytest.raises(ProofError, match=r"lm_head\.weight"):
        check_loaded(manifest, LoadedWeights(manifest.tensors, ("lm_head.weight",)))


def test_a_weight_for_which_the_engine_has_no_place_stops_the_push_and_is_named() -> None:
    manifest = PlainSource(make_model()).manifest(1)
    lacking = LoadedWeights(manifest.tensors, (), "http://two:8000", unstored=("lm_head.weight",))
    for acknowledged in (lacking, LoadedWeights(manifest.tensors, (), others=(lacking,))):
        with pytest.raises(InputError, match=r"http://two:8000 has no place for 1 of .*lm_head\.weight"):
            check_loaded(manifest, acknowledged)


def test_a_weight_is_stored_if_one_of_the_workers_that_share_a_model_has_stored_it() -> None:
    stages = [
        {"tensors": [], "untouched": [], "unknown_base": False, "unstored": unstored}
        for unstored in (["bias", "layers.1.weight"], ["bias", "layers.0.weight"])
    ]
    first, second = loaded_by(stages, ["first", "second"])
    assert first.unstored == second.unstored == ("bias",)


def test_a_tensor_counts_as_stored_where_it_or_what_is_made_of_it_is_copied() -> None:
    kinds = ("whole", "cast", "part", "transposed", "negated", "number", "read", "dropped")
    sent = {name: torch.ones(1) if name == "number" else torch.ones(2, 2) for name in kinds}
    place, narrow = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False), torch.zeros(1, 2)
    with StoredNames(list(sent.items())) as stored:
        place.data.copy_(sent["whole"])
        place.data.copy_(sent["cast"].to(torch.bfloat16))
        narrow.copy_(sent["part"].chunk(2)[1])
        place.data.copy_(sent["transposed"].t().contiguous())
        place.copy_(torch.cat([-sent["negated"].exp(), torch.zeros(0, 2)]))
        place.fill_(sent["number"].item())
        sent["read"].sum()
        del sent["dropped"]
    assert stored.names == set(kinds) - {"read", "dropped"}


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"shape": (1,)}, {"name": "other"}])
def test_a_tensor_that_arrived_as_another_stops_the_push_although_its_bytes_are_the_same(
    change: dict[str, Any],
) -> None:
    manifest = PlainSource(make_model()).manifest(1)
    first, *others = manifest.tensors
    with pytest.raises(ProofError, match=re.escape(first.name)) as failed:
        check_loaded(manifest, LoadedWeights((first._replace(**change), *others), ()))
    assert failed.value.check == "manifest"


def test_an_empty_load_stops_the_push() -> None:
    with pytest.raises(ProofError, match="0 arrived"):
        check_loaded(PlainSource(make_model()).manifest(1), LoadedWeights((), ()))


def test_tied_weights_are_sent_once_and_the_digest_names_the_layout() -> None:
    tied, untied = PlainSource(make_model("llama", tied=True)), PlainSource(make_model("llama"))
    assert "lm_head.weight" not in [name for name, _ in tied]
    assert "lm_head.weight" in [name for name, _ in untied]
    assert tied.manifest(1).digest == tied.manifest(2).digest != untied.manifest(1).digest


def test_what_every_server_acknowledges_is_compared_and_the_wrong_one_is_named() -> None:
    manifest = PlainSource(make_model()).manifest(1)
    right = LoadedWeights(manifest.tensors, (), "http://one:8000")
    first, *others = manifest.tensors
    wrong = LoadedWeights((first._replace(digest="0" * 32), *others), (), "http://two:8000")
    check_loaded(manifest, replace(right, others=(right,)))
    for acknowledged in (replace(right, others=(wrong,)), replace(wrong, others=(right,))):
        with pytest.raises(ProofError, match=r"differ at http://two:8000 from") as failed:
            check_loaded(manifest, acknowledged)
        assert "one:8000" not in failed.value.found
