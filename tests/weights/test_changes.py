"""A push sends what changed, and leaves the same bytes as a push of everything."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from conftest import start
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from test_transports import Worker
from tiny import make_model

from lockstep.contract.tensors import HeldWeights, LoadedWeights, tensor_specs
from lockstep.errors import ProofError
from lockstep.models.arithmetic import Precision
from lockstep.watch.push import ProvenPusher
from lockstep.weights.push import forget_push, push_weights
from lockstep.weights.source import LastPush, PlainSource, Update
from lockstep.weights.wire import stream as deltas
from lockstep.weights.wire.network import GlooTransport, NCCLTransport
from lockstep.weights.wire.shared_memory import SharedMemoryTransport
from lockstep.weights.wire.stream import (
    NO_CHANGES,
    Changes,
    ReceivedWeights,
    apply_changes,
    changes_between,
    part_of,
)

HALVES = [torch.bfloat16, torch.float16]


# ---- one tensor
# ----------------------------------------------------------------------------------------------------------


@draws(200)
@given(
    st.sampled_from([*HALVES, torch.float32, torch.int64, torch.int8]),
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 399), st.integers(-(2**15), 2**15 - 1)), max_size=40),
    st.sampled_from([3, 50, 0xFFFF]),
)
def test_changes_give_the_new_tensor_bit_for_bit(
    dtype: torch.dtype, size: int, drawn: list[tuple[int, int]], longest: int
) -> None:
    """The bits are drawn, so that NaN and minus zero are among them. A short limit makes gaps that must be bridged."""
    bits = deltas.BITS[dtype.itemsize]
    old = torch.arange(size).to(bits)
    new = old.clone()
    for place, value in drawn:
        if place < size:
            new[place] = torch.tensor(value).to(bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "LARGEST_GAP", longest)
        patch.setattr(deltas, "WORDS_AT_A_TIME", 8)
        differing, changes = changes_between(old.view(dtype), new.view(dtype))
    assert differing == int((old != new).sum())
    if changes is None:
        return
    assert changes.raw.nbytes < max(new.nbytes, 1)
    assert (changes is NO_CHANGES) == torch.equal(old, new)
    put_together = old.clone().view(dtype)
    apply_changes(put_together, changes)
    assert torch.equal(put_together.view(bits), new)


def test_a_far_change_costs_a_few_bytes_and_arrives() -> None:
    old = torch.zeros(300_000, dtype=torch.bfloat16)
    new = old.clone()
    new[[7, 299_999]] = 1.0
    _, changes = changes_between(old, new)
    assert changes is not None
    assert changes.raw.nbytes <= 4 * 7
    apply_changes(old, changes)
    assert torch.equal(old, new)


def test_a_tensor_that_changed_in_most_places_is_sent_whole() -> None:
    old = torch.zeros(64, 32, dtype=torch.bfloat16)
    assert changes_between(old, old + 1) == (64 * 32, None)


@pytest.mark.parametrize(("count", "gaps"), [(2, [1, 9]), (2, [0, 3]), (3, [1, 1])])
def test_changes_that_do_not_fit_their_tensor_are_refused(count: int, gaps: list[int]) -> None:
    raw = torch.cat([torch.ones(len(gaps), dtype=torch.bfloat16).view(torch.uint8), bytes_of(gaps)])
    with pytest.raises(ValueError, match="do not fit"):
        apply_changes(torch.zeros(8, dtype=torch.bfloat16), Changes(count, raw))


def bytes_of(gaps: list[int]) -> torch.Tensor:
    return torch.tensor(gaps, dtype=torch.int16).view(torch.uint8)


def test_what_engines_fuse_is_one_part_and_whole_layers_are_not() -> None:
    layer = "model.layers.11"
    assert {part_of(f"{layer}.self_attn.{x}_proj.weight") for x in "qkvo"} == {f"{layer}.self_attn"}
    assert {
        part_of(f"{layer}.mlp.{x}.weight") for x in ("gate_proj", "experts.3.up_proj", "experts.9.down_proj")
    } == {f"{layer}.mlp"}
    assert part_of("transformer.h.0.attn.c_attn.bias") == part_of("transformer.h.0.attn.c_attn.weight")
    assert (
        len({part_of(n) for n in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")}) == 3
    )


# ---- whole pushes
# --------------------------------------------------------------------------------------------------------


class Receiver:
    """An engine that keeps what it loads, as the given dtype, and a copy of it if it takes changed elements."""

    def __init__(self, dtype: torch.dtype | None = None, *, keeps: bool = False) -> None:
        self.wire_dtype, self.keeps = dtype, keeps
        self.held, self.reference = HeldWeights(), ReceivedWeights()
        self.loaded: dict[str, torch.Tensor] = {}
        self.pushes: list[list[str]] = []
        self.version: int | None = None

    def begin_update(self) -> None:
        self.held.open()

    def load(self, tensors: Iterable[Any], base: str = "") -> LoadedWeights:
        if not self.held.accepts_base(base):
            return self.held.close(self.loaded)
        assert isinstance(tensors, Update)
        if self.keeps:
            if not base:
                self.reference.clear()
            # The trainer reads every tensor before the next is made: the bytes are copied, as on a wire.
            assert all(
                self.reference.take([(name, wire(piece))])
                for name, piece in tensors.pieces(deltas=True)
                if sent(piece)
            )
            arrived = self.reference.to_load()
        else:
            arrived = [(name, tensor.clone()) for name, tensor in tensors]
        self.pushes.append([name for name, _ in arrived])
        self.loaded |= {name: tensor.clone() for name, tensor in arrived}
        names = [name for name, _ in arrived]
        self.held.add(tensor_specs(arrived), names, names)
        return self.held.close(self.loaded)

    def reset_caches(self) -> bool:
        return True

    def commit_version(self, version: int) -> None:
        self.version = version


def sent(piece: torch.Tensor | Changes) -> bool:
    return piece is not NO_CHANGES


def wire(piece: torch.Tensor | Changes) -> torch.Tensor | Changes:
    return Changes(piece.elements, piece.raw.clone()) if isinstance(piece, Changes) else piece.clone()


def holds(receiver: Receiver, model: Any) -> bool:
    """Whether a receiver holds what a receiver that is new would hold after one push."""
    fresh = Receiver(receiver.wire_dtype)
    push_weights(model, fresh, 1)
    same = receiver.loaded.keys() == fresh.loaded.keys()
    return same and all(torch.equal(tensor, fresh.loaded[name]) for name, tensor in receiver.loaded.items())


NAMES = [name for name, _ in make_model().named_parameters()]
CHANGE = st.tuples(
    st.sampled_from(NAMES), st.integers(0, 10**6), st.sampled_from([1e-6, 1e-3, 1.0]), st.integers(1, 300)
)


@draws(25)
@given(
    st.booleans(),
    st.sampled_from([None, *HALVES]),
    st.lists(st.lists(CHANGE, max_size=4), min_size=1, max_size=4),
)
def test_pushes_of_what_changed_end_in_the_bytes_of_a_whole_push(
    keeps: bool, dtype: torch.dtype | None, steps: list[list[tuple[str, int, float, int]]]
) -> None:
    model, receiver = make_model(), Receiver(dtype, keeps=keeps)
    push_weights(model, receiver, 0)
    for version, step in enumerate(steps, 1):
        before = {name: tensor.clone() for name, tensor in receiver.loaded.items()}
        with torch.no_grad():
            for name, start, size, count in step:
                flat = model.get_parameter(name).view(-1)
                flat[start % len(flat) :][:count] += size
        record = push_weights(model, receiver, version)
        assert record.in_full == ""
        assert record.digest == Update(PlainSource(model), dtype).manifest(version).digest
        assert holds(receiver, model)
        differing = sum(int((tensor != before[name]).sum()) for name, tensor in receiver.loaded.items())
        assert record.changed == (differing / sum(t.numel() for t in before.values()) if keeps else None)
        changed = {
            part_of(name) for name, tensor in receiver.loaded.items() if not torch.equal(tensor, before[name])
        }
        assert receiver.pushes[-1] == [name for name in receiver.loaded if part_of(name) in changed]


@pytest.mark.parametrize("keeps", [False, True], ids=["parts", "elements"])
def test_frozen_layers_cost_no_bytes(keeps: bool) -> None:
    model, receiver = make_model(), Receiver(torch.bfloat16, keeps=keeps)
    whole = push_weights(model, receiver, 0)
    assert whole.sent_bytes == whole.bytes
    assert push_weights(model, receiver, 1).sent_bytes == 0
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1
    record = push_weights(model, receiver, 2)
    mlp = sum(2 * p.numel() for p in model.model.layers[1].mlp.parameters())
    # Of the copy, only the tensor that changed is sent. Engines load the whole part in both cases.
    assert record.sent_bytes == (mlp // 3 if keeps else mlp)
    assert {part_of(name) for name in receiver.pushes[-1]} == {"model.layers.1.mlp"}


@pytest.mark.parametrize("keeps", [False, True], ids=["parts", "elements"])
def test_merged_adapters_are_sent_where_they_change_the_weights(keeps: bool) -> None:
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    receiver = Receiver(torch.bfloat16, keeps=keeps)
    push_weights(model, receiver, 0)
    for version in (1, 2):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name and "layers.0." in name:
                    p += torch.randn(p.shape, generator=torch.Generator().manual_seed(version)) / 10
        record = push_weights(model, receiver, version)
        assert 0 < record.sent_bytes < record.bytes / 4
        assert {part_of(name) for name in receiver.pushes[-1]} == {"model.layers.0.self_attn"}
        assert holds(receiver, model)


def test_a_tied_weight_that_changes_is_sent_under_its_first_name() -> None:
    model, receiver = make_model(tied=True), Receiver()
    push_weights(model, receiver, 0)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    push_weights(model, receiver, 1)
    assert receiver.pushes[-1] == ["model.embed_tokens.weight"]


# ---- lost states
# ---------------------------------------------------------------------------------------------------------


def moved(model: Any, start: int = 0) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[start::50] += 1
    return model


def in_full(model: Any, receiver: Receiver, caplog: pytest.LogCaptureFixture, why: str) -> None:
    with caplog.at_level(logging.WARNING, "lockstep"):
        record = push_weights(moved(model), receiver, 9)
    assert why in record.in_full
    assert record.sent_bytes == record.bytes
    assert "all weights of version 9 are sent" in caplog.text
    assert why in caplog.text
    assert holds(receiver, model)
    # After it, changes are sent again.
    assert push_weights(moved(model), receiver, 10).in_full == ""
    assert holds(receiver, model)


@pytest.fixture(params=[False, True], ids=["parts", "elements"])
def pushed(request: pytest.FixtureRequest) -> tuple[Any, Receiver]:
    model, receiver = make_model(), Receiver(torch.bfloat16, keeps=request.param)
    push_weights(model, receiver, 0)
    push_weights(moved(model), receiver, 1)
    return model, receiver


def test_an_engine_that_was_started_again_is_sent_everything(
    pushed: tuple[Any, Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    model, receiver = pushed
    receiver.held, receiver.reference, receiver.loaded = HeldWeights(), ReceivedWeights(), {}
    in_full(model, receiver, caplog, "does not hold the version that was pushed last")


def test_an_engine_to_which_another_trainer_pushed_is_sent_everything(
    pushed: tuple[Any, Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    model, receiver = pushed
    receiver.begin_update()
    receiver.load(Update(PlainSource(make_model(seed=5)), torch.bfloat16))
    in_full(model, receiver, caplog, "does not hold the version that was pushed last")


def test_changes_that_meet_an_old_base_are_found_and_everything_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The trainer's copy is one push ahead of the engine's."""
    model, receiver = make_model(), Receiver(torch.bfloat16, keeps=True)
    push_weights(model, receiver, 0)
    old = copy.deepcopy(receiver.reference)
    # Other places than those of the next changes: new values that are written twice would be right.
    push_weights(moved(model, start=7), receiver, 1)
    receiver.reference = old
    in_full(model, receiver, caplog, "tensors differ from those that were sent")


def test_a_tensor_that_is_left_out_although_it_changed_is_found(
    pushed: tuple[Any, Receiver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, receiver = pushed
    kept = "model.layers.1.mlp.up_proj.weight"

    def without(real: Callable[..., Any]) -> Callable[..., Any]:
        def pieces(self: Update, **how: bool) -> Any:
            for name, piece in real(self, **how):
                yield name, NO_CHANGES if name == kept and self.base else piece

        return pieces

    with monkeypatch.context() as patch:
        patch.setattr(Update, "pieces", without(Update.pieces))
        with caplog.at_level(logging.WARNING, "lockstep"):
            record = push_weights(moved(model), receiver, 9)
    assert "the bytes of 1 of" in record.in_full
    assert kept in record.in_full
    assert holds(receiver, model)


def test_a_wrong_comparison_is_found_by_the_live_model(
    pushed: tuple[Any, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer takes the last digest for that of tensors that have changed, in the manifest too.

    The engine agrees with it.
    """
    model, receiver = pushed
    receiver.wire_dtype, receiver.keeps = None, False
    push_weights(model, receiver, 2)
    before = Update(PlainSource(model)).manifest(2)
    monkeypatch.setattr(Update, "is_same", lambda self, spec: True)
    monkeypatch.setattr(Update, "manifest", lambda self, version: replace(before, version=version))
    with pytest.raises(ProofError, match="not those of the live model"):
        push_weights(moved(model), receiver, 3)


def test_a_push_after_one_that_failed_sends_everything(
    pushed: tuple[Any, Receiver], monkeypatch: Any
) -> None:
    model, receiver = pushed
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "reset_caches", lambda: False)
        with pytest.raises(ProofError, match="reset of its caches"):
            push_weights(moved(model), receiver, 2)
    record = push_weights(moved(model), receiver, 3)
    assert record.sent_bytes == record.bytes
    assert record.in_full == ""
    forget_push(receiver)
    assert push_weights(model, receiver, 4).sent_bytes == record.bytes


def test_a_fault_in_the_engines_memory_is_found_by_the_probe_and_then_overwritten(untied_dir: str) -> None:
    """Nothing changed, so that nothing is sent: the engine's weights are not overwritten until a proof has failed."""
    engine, model = start("transformers", untied_dir), make_model()
    pusher = ProvenPusher(model, engine, torch.float32, Precision(None))
    pusher.push(1)
    with torch.no_grad():
        engine.model.model.layers[1].mlp.up_proj.weight[3] += 1  # type: ignore[attr-defined]
    with pytest.raises(ProofError, match=r"layers\.1\.mlp\.up_proj"):
        pusher.push(2, every_module=True)
    assert pusher.push(3, every_module=True).push.sent_bytes == sum(p.nbytes for p in model.parameters())
    assert pusher.push(4, every_module=True).push.sent_bytes == 0


# ---- on the wire
# ---------------------------------------------------------------------------------------------------------


class KeepingWorker(Worker):
    """A server's worker that takes pieces as the real one does (`engines/vllm/port/receive.py`)."""

    def __init__(self) -> None:
        super().__init__()
        self.reference, self.keeps = ReceivedWeights(), False

    def update_weights(self, info: dict[str, Any]) -> None:
        self.keeps = info.get("keeps", False)
        super().update_weights(info)

    def take(self, arrived: Sequence[Any]) -> None:
        if self.keeps:
            assert self.reference.take(arrived)
            self.found |= {name: tensor.clone() for name, tensor in self.reference.to_load()}
        else:
            super().take(arrived)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SharedMemoryTransport(20.0),
        lambda: GlooTransport("127.0.0.1", 0, 20.0),
        lambda: NCCLTransport("127.0.0.1", 0, 20.0, torch.device("cpu")),
    ],
    ids=["shared_memory", "gloo", "nccl"],
)
def test_every_transport_carries_what_changed(make: Callable[[], Any], dtype: torch.dtype) -> None:
    model, sent, transport = make_model().to(dtype), LastPush(), make()
    workers = [KeepingWorker(), KeepingWorker()]
    sizes = []
    for version in range(4):
        update = Update(PlainSource(model), None, sent)
        transport.send(update, workers, update.base)
        sent.manifest = update.manifest(version)
        sizes.append(update.sent_bytes)
        for worker in workers:
            assert all(torch.equal(worker.found[name], tensor) for name, tensor in PlainSource(model))
        with torch.no_grad():
            if version == 1:
                model.model.layers[1].self_attn.k_proj.weight[0, :3] += 1
            if version == 2:
                moved(model)
    transport.close()
    keeps = dtype is torch.bfloat16 and type(transport) is GlooTransport
    attention = sum(p.nbytes for p in model.model.layers[1].self_attn.parameters())
    assert sizes[:3] == [update.bytes, 0, 3 * 4 if keeps else attention]
    assert sizes[3] <= 0.05 * update.bytes if keeps else sizes[3] == update.bytes


def test_no_copies_are_made_where_a_machine_has_no_room_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    model, sent, transport, worker = (
        make_model().to(torch.bfloat16),
        LastPush(),
        GlooTransport("127.0.0.1", 0, 20.0),
        KeepingWorker(),
    )
    worker.available_bytes = 3 * sum(p.nbytes for p in model.parameters()) // 2
    for version in range(2):
        update = Update(PlainSource(model), None, sent)
        transport.send(update, [worker], update.base)
        sent.manifest = update.manifest(version)
    assert not sent.copies
    assert not worker.keeps
    assert capsys.readouterr().out.count("too little main memory for a copy of the weights") == 1
