"""The seconds that `make proof-overhead` prints belong to the right proofs."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.proofs import seconds as proof_seconds
from benchmarks.proofs.seconds import FORWARD, Seconds, Spent
from lockstep.learn.update import Policy
from lockstep.watch.draws import DrawEvidence, DrawStats


def test_a_proof_inside_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 10.0, 12.0])
    monkeypatch.setattr(proof_seconds, "now", lambda: Spent(time := next(clock), 2 * time))
    seconds = Seconds()
    with seconds.of("outer"), seconds.of("inner"):
        pass
    with seconds.of("outer"):
        pass
    assert seconds.take() == {"outer": (7.0, 14.0), "inner": (2.0, 4.0)}
    assert seconds.take() == {}


def test_a_second_in_which_two_threads_compute_a_proof_counts_once_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Enters at 0 s and leaves at 5 s; the other thread enters at 2 s and leaves at 9 s.
    times = {"main": iter([0.0, 5.0]), "other": iter([2.0, 9.0])}
    who = threading.local()
    monkeypatch.setattr(
        proof_seconds, "now", lambda: Spent(time := next(times[getattr(who, "name", "main")]), time)
    )
    seconds, entered, main_left = Seconds(), threading.Event(), threading.Event()

    def other() -> None:
        who.name = "other"
        with seconds.of("digest"):
            entered.set()
            assert main_left.wait(60)

    thread = threading.Thread(target=other)
    with seconds.of("digest"):
        thread.start()
        assert entered.wait(60)
    main_left.set()
    thread.join(60)
    assert seconds.take() == {"digest": (9.0, 12.0)}


def test_proofs_of_a_run_are_counted_and_the_forward_only_without_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Policy, "score", lambda self: None)
    seconds, real = Seconds(), DrawEvidence.add
    with seconds.counted():
        DrawEvidence().add(DrawStats())
        Policy.score(object())  # type: ignore[arg-type,call-arg]
        assert seconds.take().keys() == {"draws"}
        with torch.no_grad():
            Policy.score(object())  # type: ignore[arg-type,call-arg]
        assert seconds.take().keys() == {FORWARD}
    assert DrawEvidence.add is real
