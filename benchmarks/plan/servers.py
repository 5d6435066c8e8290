"""Simulates vLLM servers that sample the completions of a step: how many decode together, when the last one ends.

`run.py` uses it. A decoding step reads the weights once and the keys and values of every running sequence. It also
computes one token per sequence. The slower of the two decides how long the step takes. A sequence waits until there
is room for its keys and values. All completions of a prompt are on one server.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

# Shares of the memory rate and of the arithmetic of a data sheet that decoding reaches, and seconds per decoding step
# for kernel launches and the scheduler. docs/internals/plan.md gives the sources.
READING, COMPUTING, STEP = 0.6, 0.5, 0.005
# Share of a server's memory for weights, keys and values. It is vLLM's default.
_MEMORY_SHARE = 0.9
# Largest number of sequences that one server decodes together.
_MAX_RUNNING = 1024
_BYTES = 2


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet: bfloat16 operations per second without sparsity, bytes per second, and memory."""

    compute: float
    memory_rate: float
    memory: float


@dataclass(frozen=True)
class Model:
    """Sizes of a dense model in bfloat16. `keys` is the number of key heads times their size."""

    parameters: float
    layers: int
    width: int
    keys: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * _BYTES * self.layers * self.keys

    def narrowest(self, gpu: Gpu) -> int:
        """The number of GPUs of the smallest server: a power of two; weights take at most half of its memory."""
        width = 1
        while _BYTES * self.parameters > _MEMORY_SHARE * width * gpu.memory / 2:
            width *= 2
        return width


@dataclass(frozen=True)
class Lengths:
    """Lengths of completions: a log-normal distribution that is cut at `longest`.

    Attributes:
        typical: mean before the cut, in tokens.
        spread: standard deviation of the logarithm. 0: all lengths are equal.
    """

    typical: float
    longest: float
    spread: float

    def quantile(self, share: float) -> float:
        """The length that is not exceeded by this share of the completions."""
        middle = math.log(self.typical) - self.spread**2 / 2
        found = math.exp(middle + self.spread * NormalDist().inv_cdf(share)) if self.spread else self.typical
        return min(found, self.longest)

    @property
    def mean(self) -> float:
        """Mean length after the cut."""
        return sum(self.evenly(1000)) / 1000

    def evenly(self, number: int) -> list[float]:
        """`number` lengths that represent the distribution: its evenly spaced quantiles."""
        return [self.quantile((i + 0.5) / number) for i in range(number)]


@dataclass(frozen=True)
class Servers:
    """`number` servers of `width` GPUs each."""

    number: int
    width: int


def generation_seconds(
    prompts: int, completions: int, prompt: int, lengths: Lengths, model: Model, gpu: Gpu, servers: Servers
) -> float:
    """Seconds until the last completion of a step has ended.

    The prompts are divided evenly, so the server with the most prompts ends last. The lengths on this server
    represent the whole distribution, in a mixed order. The longest completion of the step is one of them.
    """
    own = math.ceil(prompts / servers.number) * completions
    drawn = [*lengths.evenly(own)[:-1], lengths.quantile(1 - 0.5 / (prompts * completions))]
    # Mix the order, as in a real queue: sort the lengths by the fractional parts of multiples of the golden ratio.
    mixed = [length for _, length in sorted((i * 0.6180339887 % 1, length) for i, length in enumerate(drawn))]
    prefill = (
        2
        * model.parameters
        * prompt
        * math.ceil(prompts / servers.number)
        / (servers.width * gpu.compute * COMPUTING)
    )
    return prefill + decoding_seconds(mixed, prompt, model, gpu, servers.width)


def decoding_seconds(lengths: list[float], prompt: int, model: Model, gpu: Gpu, width: int) -> float:
    """Seconds for sequences of these lengths on one server, in the order in which they enter.

    Between the ends of two sequences, the number of running sequences is constant. The running sequences are in a
    heap, sorted by the step at which they end.
    """
    room = (_MEMORY_SHARE * width * gpu.memory - _BYTES * model.parameters) / model.bytes_per_token
    waiting = iter(lengths)
    running: list[tuple[float, float]] = []
    reserved, now, seconds = 0.0, 0.0, 0.0
    next_length = next(waiting, None)
    while running or next_length is not None:
        while (
            next_length is not None
            and len(running) < _MAX_RUNNING
            and (not running or reserved + prompt + next_length <= room)
        ):
            heapq.heappush(running, (now + next_length, next_length))
            reserved += prompt + next_length
            next_length = next(waiting, None)
        end = running[0][0]
        # On average a running sequence has its prompt and half of its completion.
        seen = (reserved + prompt * len(running)) / 2
        seconds += (end - now) * step_seconds(len(running), seen, model, gpu, width)
        now = end
        while running and running[0][0] <= now:
            reserved -= prompt + heapq.heappop(running)[1]
    return seconds


def step_seconds(running: int, seen: float, model: Model, gpu: Gpu, width: int) -> float:
    """Seconds of one decoding step.

    Args:
        running: sequences that decode together.
        seen: tokens whose keys and values are read, over all of them.
    """
    read = (_BYTES * model.parameters + model.bytes_per_token * seen) / (width * gpu.memory_rate * READING)
    computed = 2 * model.parameters * running / (width * gpu.compute * COMPUTING)
    return max(read, computed) + STEP
