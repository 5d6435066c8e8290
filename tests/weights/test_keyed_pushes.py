"""Pushes whose digests have a key, as between GPUs, on the CPU: what arrives is proven, and no fault passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from test_changes import Receiver
from tiny import make_model

import lockstep.contract.tensors as device_digest
import lockstep.weights.push as push_module
from lockstep.contract.tensors import (
    LoadedWeights,
    begin_specs,
    finished,
    key_of,
    new_key,
    one_push,
    tensor_digest,
    tensor_specs,
)
from lockstep.errors import LockstepError, ProofError
from lockstep.weights.push import push_weights
from lockstep.weights.source import PlainSource
from lockstep.weights.wire.stream import part_of

Named = list[tuple[str, torch.Tensor]]
ONE, OTHER = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model lay on a GPU. Tiny tensors then have several chunks."""
    monkeypatch.setattr(push_module, "key_for", lambda tensors: new_key())
    monkeypatch.setattr(device_digest, "CHUNK", 1 << 14)


class Faulty:
    """An engine with a fault between what was sent and what it describes."""

    wire_dtype: torch.dtype | None = None

    def __init__(self, fault: Callable[[Named], Named]) -> None:
        self._fault = fault
        self.keys: list[int | None] = []

    def begin_update(self) -> None: ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        arrived = [(name, tensor.clone()) for name, tensor in tensors]
        specs = tensor_specs(self._fault(arrived))
        self.keys.append(key_of(specs[0].digest))
        return LoadedWeights(specs, ())

    def reset_caches(self) -> bool:
        return True

    def commit_version(self, version: int) -> None: ...


def one(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Named], Named]:
    return lambda arrived: [(name, change(tensor) if name == ONE else tensor) for name, tensor in arrived]


def exchanged_tensors(arrived: Named) -> Named:
    names = {ONE: OTHER, OTHER: ONE}
    by_name = dict(arrived)
    return [(name, by_name[names.get(name, name)]) for name, _ in arrived]


def exchanged_rows(tensor: torch.Tensor) -> torch.Tensor:
    order = torch.arange(len(tensor))
    order[[3, 40]] = order[[40, 3]]
    return tensor[order]


def same_sum(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.view(torch.int32).flatten()
    words[5] += 1
    words[77] -= 1
    return tensor


def highest_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Two changes that a product with odd numbers modulo 2^32, or a sum of words, cannot tell from none."""
    words = tensor.view(torch.int32).flatten()
    words[:2] ^= -(1 << 31)
    return tensor


def without_its_end(tensor: torch.Tensor) -> torch.Tensor:
    tensor.flatten().view(torch.uint8)[1 << 13 :] = 0
    return tensor


FAULTS: dict[str, tuple[Callable[[Named], Named], str]] = {
    "two tensors exchanged": (exchanged_tensors, "digest"),
    "two rows exchanged": (one(exchanged_rows), "digest"),
    "two shards of rows exchanged": (one(lambda t: t.roll(len(t) // 2, 0)), "digest"),
    "two shards of columns exchanged": (one(lambda t: t.roll(t.shape[1] // 2, 1)), "digest"),
    "a sum that wraps to the same": (one(same_sum), "digest"),
    "the highest bits of two words": (one(highest_bits), "digest"),
    "one bit of the last byte": (one(lambda t: without_last_bit(t)), "digest"),
    "the last chunk left out": (one(without_its_end), "digest"),
    "the copy not ended when the digest was taken": (one(torch.zeros_like), "digest"),
    "read as another dtype": (one(lambda t: t.view(torch.int32)), "manifest"),
    "read as another shape": (one(lambda t: t.flatten()), "manifest"),
}


def without_last_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor.flatten().view(torch.uint8)[-1] ^= 1
    return tensor


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_the_way_stops_the_push(name: str) -> None:
    fault, check = FAULTS[name]
    with pytest.raises(ProofError) as failed:
        push_weights(make_model(), Faulty(fault), 1)
    assert failed.value.check == check


def test_digests_of_an_old_buffer_stop_the_push_although_the_bytes_are_the_same() -> None:
    model, first = make_model(), []

    class Old(Faulty):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
            first.append(super().load(tensors, base))
            return first[0]

    engine = Old(list)
    push_weights(model, engine, 1)
    push_module.forget_push(engine)
    with pytest.raises(ProofError, match=r"bytes of (\d+) of \1 tensors differ"):
        push_weights(model, engine, 2)


def test_every_push_has_a_key_of_its_own_and_a_key_that_repeats_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, engine = make_model(), Faulty(list)
    for version in range(5):
        push_module.forget_push(engine)
        push_weights(model, engine, version)
    assert len(set(engine.keys)) == 5
    assert None not in engine.keys
    monkeypatch.setattr(device_digest.secrets, "randbits", lambda bits: engine.keys[2])
    with pytest.raises(LockstepError, match="same random key"):
        push_weights(model, engine, 5)


def test_digests_of_two_kinds_or_keys_are_never_equal() -> None:
    named = [("w", torch.zeros(4))]
    with one_push(1):
        keyed = tensor_specs(named)
        # A copy in main memory of another process gets the digest that its sender's has.
        assert tensor_specs(named, {"w": keyed[0]}) == keyed
    with one_push(2):
        assert tensor_specs(named)[0].digest != keyed[0].digest
        assert tensor_specs(named, {"w": keyed[0]}) == keyed
    assert tensor_specs(named)[0].digest == tensor_digest(named[0][1]) != keyed[0].digest
    assert tensor_specs(named, {"w": keyed[0]}) == keyed


def test_a_digest_is_of_the_bytes_at_the_time_when_it_was_begun() -> None:
    """The engine may write to a tensor, or its memory may go to another one, before anybody asks for the digest."""
    tensor = torch.arange(8.0)
    with one_push(3):
        wanted = tensor_specs([("w", tensor.clone())])
        begun = begin_specs([("w", tensor)])
        tensor.zero_()
        assert finished([begun]) == wanted


def test_memory_that_was_written_to_is_digested_again_within_a_push() -> None:
    tensor = torch.arange(8.0)
    with one_push(3):
        before = tensor_specs([("w", tensor)])
        assert tensor_specs([("w", tensor)]) == before
        # The same memory under another name is another tensor.
        assert tensor_specs([("v", tensor)])[0].digest != before[0].digest
        tensor.mul_(2)
        assert tensor_specs([("w", tensor)]) != before


def test_pushes_of_what_changed_send_it_and_nothing_else() -> None:
    model, receiver = make_model(), Receiver()
    changed = [[], [ONE], [], [OTHER, "model.norm.weight"], [name for name, _ in model.named_parameters()]]
    push_weights(model, receiver, 0)
    for version, names in enumerate(changed, 1):
        with torch.no_grad():
            for name in names:
                # The smallest change: the last bit of the last element.
                model.get_parameter(name).view(torch.int32).view(-1)[-1] ^= 1
        record = push_weights(model, receiver, version)
        assert record.in_full == ""
        parts = {part_of(name) for name in names}
        assert receiver.pushes[-1] == [name for name in receiver.loaded if part_of(name) in parts]
        assert all(torch.equal(receiver.loaded[name], tensor) for name, tensor in PlainSource(model))
