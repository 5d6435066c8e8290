"""Trainer and worker take turns at a segment: no data is read before it is written; a wait ends with its other end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from lockstep.weights.wire import shared_memory
from lockstep.weights.wire.shared_memory import (
    TrainerLock,
    TrainerSlots,
    is_unlocked,
    segment_bytes,
    worker_chunks,
)
from lockstep.weights.wire.stream import Named

SLOT, WORKERS = 256, 2
# A wait that lasts to its limit of NEVER seconds runs into the limit of the test.
NEVER, TEST_LIMIT = 3600.0, 60


class Pair:
    """A segment, its trainer, and its workers, which behave like other processes."""

    def __init__(self, folder: Path, timeout: float = 20.0) -> None:
        self.path, size = folder / "segment", segment_bytes(SLOT, WORKERS)
        self.lock = TrainerLock(shared_memory.new_file(self.path, size))
        self.slots = TrainerSlots(shared_memory.map_file(self.path, size), SLOT, WORKERS, timeout)
        self.memory = shared_memory.map_file(self.path, size)
        self.other = os.open(self.path, os.O_RDONLY)
        self.timeout = timeout

    def worker(self, number: int, push: int, chunks: int) -> Generator[list[Named], None, None]:
        placed = [[["t", "uint8", [SLOT], self.slots.offset(i)]] for i in range(chunks)]
        return worker_chunks(
            self.memory, self.other, placed, push=push, worker=number, workers=WORKERS, timeout=self.timeout
        )

    def fill(self, number: int) -> None:
        self.slots.wait_until_free(number, nothing).fill_(number)
        self.slots.announce_filled(number)


def nothing() -> None:
    """The check of a trainer whose workers have not failed."""


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_every_worker_reads_every_chunk_whole_however_slow_it_is(pair: Pair) -> None:
    push, count = pair.slots.begin_push(), 40
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def read(number: int) -> None:
        for ((_, tensor),) in pair.worker(number, push, count):
            time.sleep(0.002 * number)
            found[number].append(tensor.clone())

    threads = [threading.Thread(target=read, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for number in range(count):
        pair.fill(number)
    for thread in threads:
        thread.join()
    assert [[int(t.min()) for t in own] for own in found.values()] == [list(range(count))] * 2
    assert [[int(t.max()) for t in own] for own in found.values()] == [list(range(count))] * 2


def test_a_slot_is_not_filled_again_before_the_last_worker_has_left_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout=0.3)
    push = pair.slots.begin_push()
    fast, slow = pair.worker(0, push, 3), pair.worker(1, push, 3)
    pair.fill(0)
    pair.fill(1)
    for worker in (fast, fast, slow):
        next(worker)
    with pytest.raises(RuntimeError, match="a server did not load a chunk within"):
        pair.slots.wait_until_free(2, nothing)
    next(slow)
    pair.slots.wait_until_free(2, nothing)


@pytest.mark.timeout(TEST_LIMIT)
@pytest.mark.parametrize(
    ("end", "limit"),
    [
        (lambda pair: pair.slots.give_up(), NEVER),
        (lambda pair: pair.slots.begin_push(), NEVER),
        (lambda pair: pair.lock.close(), NEVER),
        (lambda pair: None, 0.5),
    ],
    ids=["gives up", "begins another", "dies", "fills nothing"],
)
def test_a_worker_waits_no_longer_than_its_trainer_goes_on(
    tmp_path: Path, end: Callable[[Pair], None], limit: float
) -> None:
    pair = Pair(tmp_path, timeout=limit)
    worker = pair.worker(0, pair.slots.begin_push(), 3)
    pair.fill(0)
    next(worker)
    end(pair)
    # The worker raises no error, because vLLM would then not wait for the other workers of the server.
    assert list(worker) == []


@pytest.mark.timeout(TEST_LIMIT)
def test_a_child_of_a_trainer_does_not_stand_in_for_it_when_it_dies(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout=NEVER)
    worker = pair.worker(0, pair.slots.begin_push(), 2)
    pair.fill(0)
    next(worker)
    until, done = os.pipe()
    child = os.fork()
    if not child:
        os.close(done)
        os.read(until, 1)
        os._exit(0)
    try:
        assert not is_unlocked(pair.other), "the child took the trainer's lock away"
        pair.lock.close()
        assert list(worker) == []
    finally:
        os.close(done)
        os.waitpid(child, 0)


@pytest.mark.timeout(TEST_LIMIT)
def test_a_trainer_does_not_wait_for_a_worker_that_has_left(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout=NEVER)
    push = pair.slots.begin_push()
    leaving, staying = pair.worker(0, push, 4), pair.worker(1, push, 4)
    pair.fill(0)
    pair.fill(1)
    for worker in (leaving, staying):
        next(worker)
    leaving.close()
    with pytest.raises(RuntimeError, match="left the push before its end"):
        pair.fill(2)
    with pytest.raises(RuntimeError, match="left the push before its end"):
        pair.slots.check_all_loaded(4)


def test_a_push_has_ended_when_every_worker_has_taken_all_of_it(pair: Pair) -> None:
    push = pair.slots.begin_push()
    pair.fill(0)
    assert len(list(pair.worker(0, push, 1))) == 1
    with pytest.raises(RuntimeError, match="left the push"):
        pair.slots.check_all_loaded(1)
    assert len(list(pair.worker(1, push, 1))) == 1
    pair.slots.check_all_loaded(1)


def test_a_push_begins_with_nothing_filled_and_nothing_taken(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout=0.3)
    push = pair.slots.begin_push()
    for number in range(2):
        pair.fill(number)
    for number in range(WORKERS):
        list(pair.worker(number, push, 2))
    push = pair.slots.begin_push()
    # Nothing arrives within the time limit.
    assert list(pair.worker(0, push, 1)) == []
    push = pair.slots.begin_push()
    pair.fill(0)
    pair.fill(1)
    with pytest.raises(RuntimeError, match="did not load a chunk"):
        pair.slots.wait_until_free(2, nothing)


def test_a_call_of_an_earlier_push_that_comes_late_takes_nothing_of_this_one(pair: Pair) -> None:
    late, later = (pair.worker(0, pair.slots.begin_push(), 1) for _ in range(2))
    push = pair.slots.begin_push()
    pair.fill(0)
    assert list(late) == []
    assert pair.slots.fewest_loaded() == 0
    assert len(list(pair.worker(0, push, 1))) == 1
    assert list(later) == []
    assert len(list(pair.worker(1, push, 1))) == 1
    pair.slots.check_all_loaded(1)


def test_a_worker_that_wakes_up_in_another_push_is_not_counted_in_it(pair: Pair) -> None:
    worker = pair.worker(0, pair.slots.begin_push(), 2)
    pair.fill(0)
    next(worker)
    pair.slots.begin_push()
    pair.fill(0)
    assert list(worker) == []
    assert pair.slots.counters[2:].tolist()[:WORKERS] == [0, 0]


def test_a_chunk_that_was_given_up_is_not_read(pair: Pair) -> None:
    worker = pair.worker(0, pair.slots.begin_push(), 1)
    pair.fill(0)
    pair.slots.give_up()
    assert list(worker) == []


def test_a_trainer_hears_of_a_worker_that_failed(pair: Pair) -> None:
    pair.slots.begin_push()
    pair.fill(0)
    pair.fill(1)

    def failed() -> None:
        raise ConnectionError("by design")

    with pytest.raises(ConnectionError, match="by design"):
        pair.slots.wait_until_free(2, failed)
