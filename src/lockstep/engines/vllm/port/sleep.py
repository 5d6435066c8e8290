"""vLLM's sleep mode: an engine in the trainer's process gives its memory back while the trainer learns.

The order is: sleep → learn → wake the weights → push and its proofs → wake the key-value cache → sample → sleep. Between the two
wakes vLLM holds no cache, so that a push has its room. There are two levels:

- Level 1 moves the weights to main memory. Their digests before and after show that they came back.
- Level 2 discards the weights. The engine forgets what it holds, so that only a push of all weights is accepted afterwards.

vLLM has it on GPUs only; it has run on a pretend GPU, and not on a real one yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lockstep.contract.device_digest import new_key
from lockstep.contract.tensors import digests_of
from lockstep.errors import InputError, LockstepError

if TYPE_CHECKING:
    from vllm import LLM

SleepLevel = Literal[0, 1, 2]
_WEIGHTS, _CACHE = "weights", "kv_cache"


def sleep_arguments(level: SleepLevel) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that sleeps. Level 0: it never sleeps.

    Raises:
        InputError: vLLM has no sleep mode on this platform.
    """
    if level == 0:
        return {}
    from vllm.platforms import current_platform

    if not current_platform.is_sleep_mode_available():
        raise InputError(
            "vllm_enable_sleep_mode: vLLM has sleep mode on GPUs only, and this engine runs on "
            f"{current_platform.device_name or 'another device'}; leave it out"
        )
    return {"enable_sleep_mode": True}


class Woken(NamedTuple):
    """One worker's parameters after a sleep: how many it has, and the names of those that have other bytes."""

    parameters: int
    differing: list[str]


class Sleep:
    """The sleep of one engine.

    Args:
        llm: vLLM's engine.
        call: calls a function with every worker as its first argument, and returns the results.
        level: 1 or 2.
    """

    def __init__(self, llm: LLM, call: Callable[..., list[Any]], level: SleepLevel) -> None:
        self._llm, self._call, self.level = llm, call, level
        self._asleep: tuple[str, ...] = ()
        self._key = 0
        self._digests: list[dict[str, str]] = []

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has no weights to compute with."""
        return _WEIGHTS in self._asleep

    def begin(self) -> None:
        """Fall asleep. Does nothing if the weights sleep already. No request may run."""
        if self.is_asleep:
            return
        # vLLM sleeps as a whole, so that a cache which was not needed since the last push wakes first.
        self.wake_cache()
        if self.level == 1:
            self._key = new_key()
            self._digests = self._call(weight_digests, f"{self._key:x}")
        else:
            # Before the weights are gone, so that no failure can leave the engine with a record of weights that it lost.
            self._call(forget_weights)
        self._llm.sleep(level=self.level)
        self._asleep = (_WEIGHTS, _CACHE)

    def wake_weights(self) -> list[Woken]:
        """Wake the weights, and not the cache. The engine can then receive a push, and its modules can be probed.

        Returns:
            Of each worker, the parameters that do not have the bytes with which they fell asleep. Empty if nothing slept, or after
            level 2.
        """
        if not self.is_asleep:
            return []
        self._wake(_WEIGHTS)
        if self.level == 2:
            return []
        now = self._call(weight_digests, f"{self._key:x}")
        return [_differing(before, after) for before, after in zip(self._digests, now, strict=True)]

    def wake_cache(self) -> None:
        """Wake what sleeps beside the weights. The engine can then answer requests."""
        if self._asleep:
            self._wake(_CACHE)

    def _wake(self, part: str) -> None:
        if part not in self._asleep:
            return
        if torch.cuda.is_available():
            # The trainer's free memory must be free for vLLM too.
            torch.cuda.empty_cache()
        left = tuple(other for other in self._asleep if other != part)
        is_awake = self._llm.wake_up(tags=[part])
        if is_awake is not (not left):
            raise LockstepError(f"vLLM did not wake its {part.replace('_', ' ')} (awake: {is_awake})")
        self._asleep = left


def _differing(before: dict[str, str], now: dict[str, str]) -> Woken:
    return Woken(len(before), sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)))


def weight_digests(worker: Any, key: str) -> dict[str, str]:
    """The digest of each parameter as a worker holds it. vLLM calls it inside the worker.

    Args:
        key: the key of the digests, in hex.
    """
    return digests_of(dict(worker.model_runner.model.named_parameters()), int(key, 16))


def forget_weights(worker: Any) -> None:
    """Let a worker forget which weights it holds. It then refuses a push of changes. vLLM calls it inside the worker."""
    worker.weight_transfer_engine.forget_weights()
