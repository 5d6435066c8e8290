"""The prediction of a step on many GPUs (`make plan`) agrees with a simulation by token, and with simple limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan import run as plan
from benchmarks.plan.servers import Lengths, Servers, decoding_seconds, generation_seconds, step_seconds

MODEL, GPU = plan.MODELS["7b"], plan.GPUS["h100"]
TASK = plan.Task(64, 8, 512, Lengths(1000.0, 4000.0, 0.6))
CONSTANTS = plan.Constants(
    learning=0.4, recomputed=True, push_rate=1e9, sent=1.0, changes=0.0, host=4e-6, proofs=0.05
)


def token_by_token(lengths: list[int], prompt: int, together: int) -> float:
    """Decode one token of every running sequence per step; the next sequence enters when one has ended."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < together:
            running.append([waiting.pop(0), 0])
        held = sum(prompt + length for length, _ in running)
        seconds += step_seconds(len(running), (held + prompt * len(running)) / 2, MODEL, GPU, 1)
        for sequence in running:
            sequence[1] += 1
        running = [sequence for sequence in running if sequence[1] < sequence[0]]
    return seconds


@pytest.mark.parametrize("together", [1, 3, 100])
def test_decoding_takes_as_long_as_token_by_token(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.plan.servers._MAX_RUNNING", together)
    lengths = [50, 7, 120, 7, 64, 1, 90, 33]
    expected = token_by_token(lengths, 512, together)
    assert decoding_seconds([float(n) for n in lengths], 512, MODEL, GPU, 1) == pytest.approx(expected)


def test_sequences_wait_for_memory() -> None:
    narrow = plan.Gpu(
        GPU.compute, GPU.memory_rate, (2 * MODEL.parameters + 2000 * MODEL.bytes_per_token) / 0.9
    )
    one = decoding_seconds([1000.0], 512, MODEL, narrow, 1)
    assert decoding_seconds([1000.0] * 3, 512, MODEL, narrow, 1) == pytest.approx(3 * one)


def test_no_number_of_servers_is_faster_than_the_longest_completion_or_slower_than_one_server() -> None:
    def seconds(number: int) -> float:
        shape = Servers(number, 1)
        return generation_seconds(
            TASK.prompts, TASK.completions, TASK.prompt, TASK.lengths, MODEL, GPU, shape
        )

    one, *more = (seconds(number) for number in (1, 4, 16, 64))
    longest = TASK.lengths.quantile(1 - 0.5 / 512)
    assert all(longest * step_seconds(1, 512, MODEL, GPU, 1) <= found < one for found in more)


def test_learning_falls_with_the_trainers_and_grows_with_the_proofs() -> None:
    one, two = (plan.learning_seconds(TASK, MODEL, GPU, trainers, CONSTANTS) for trainers in (1, 2))
    assert one == pytest.approx(2 * two)
    half = replace(CONSTANTS, proofs=0.5)
    assert plan.learning_seconds(TASK, MODEL, GPU, 1, half) == pytest.approx(one * 0.95 / 0.5)


def test_a_push_of_changes_sends_less_and_takes_time_to_find_them() -> None:
    shape = Servers(3, 1)
    whole = plan.push_seconds(MODEL, shape, CONSTANTS)
    assert whole == pytest.approx(2 * 2 * MODEL.parameters / 1e9)
    part = plan.push_seconds(MODEL, shape, replace(CONSTANTS, sent=0.1, changes=1e-9))
    assert part == pytest.approx(0.1 * whole + 1e-9 * MODEL.parameters)


def test_the_best_division_is_the_shortest_of_all_and_fits() -> None:
    found = plan.splits(64, TASK, MODEL, GPU, CONSTANTS)
    for ahead in (False, True):
        chosen = plan.best(found, ahead)
        assert chosen is not None
        assert all(chosen.step(ahead) <= split.step(ahead) for split in found)
        assert plan.fits(MODEL, GPU, chosen.trainers)
    assert plan.best(plan.splits(8, TASK, plan.MODELS["72b"], GPU, CONSTANTS), True) is None


def test_a_mean_length_counts_what_the_cut_takes_away() -> None:
    assert Lengths(1000.0, 1e9, 0.6).mean == pytest.approx(1000.0, rel=0.02)
    assert Lengths(1000.0, 1000.0, 0.6).mean < 900
    assert Lengths(1000.0, 4000.0, 0.0).mean == 1000.0
