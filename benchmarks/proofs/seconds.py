"""Measures the seconds that each proof takes in a run, for `benchmarks/proofs/overhead.py`.

The functions of the proofs are wrapped during a run. If one proof runs inside another, its seconds count for the
inner proof only. A second of the clock in which two threads compute the same proof counts once. Processor seconds are
counted too, because other programs on the machine hardly change them. The processor seconds of all threads are added
up. For the main thread, those of the whole process are used, so that the threads of PyTorch are included.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

# The forward over groups without a gradient. It counts as a proof, because a trainer without proofs would not compute
# it.
FORWARD = "forward without gradient"
DIGEST, PROBE = "digest", "module_probe"


class Spent(NamedTuple):
    """Seconds of the clock, and of the processor."""

    wall: float
    cpu: float

    def __add__(self, other: Any) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Any) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


NOTHING = Spent(0.0, 0.0)


def now() -> Spent:
    """The current time of the clock and of the processor, for this thread."""
    main = threading.current_thread() is threading.main_thread()
    return Spent(time.perf_counter(), time.process_time() if main else time.thread_time())


class Seconds:
    """Seconds per proof since the last `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, Spent] = defaultdict(lambda: NOTHING)
        self._lock, self._open = threading.Lock(), threading.local()
        # By proof: the number of threads that compute it, and the time of the last change of this number.
        self._inside: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def take(self) -> dict[str, Spent]:
        """The seconds since the last call. The count starts again at 0."""
        with self._lock:
            found = dict(self._spent)
            self._spent.clear()
        return found

    def _thread_moved(self, proof: str, threads: int, time_now: float) -> None:
        """Count a thread that enters (1) or leaves (-1) a proof."""
        with self._lock:
            inside, since = self._inside[proof]
            if inside:
                self._spent[proof] += Spent(time_now - since, 0.0)
            self._inside[proof] = (inside + threads, time_now)

    @contextmanager
    def of(self, proof: str) -> Iterator[None]:
        """Count the seconds of a block for a proof, without the blocks of other proofs inside it."""
        # The open blocks of this thread: the proof, and the processor seconds of the blocks inside.
        blocks: list[tuple[str, float]] = getattr(self._open, "blocks", [])
        self._open.blocks = blocks
        start = now()
        if blocks:
            self._thread_moved(blocks[-1][0], -1, start.wall)
        self._thread_moved(proof, 1, start.wall)
        blocks.append((proof, 0.0))
        try:
            yield
        finally:
            end = now()
            whole = end.cpu - start.cpu
            _, others = blocks.pop()
            self._thread_moved(proof, -1, end.wall)
            if blocks:
                outer, spent = blocks[-1]
                blocks[-1] = (outer, spent + whole)
                self._thread_moved(outer, 1, end.wall)
            with self._lock:
                self._spent[proof] += Spent(0.0, whole - others)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context that counts the proofs of the runs inside it."""
        with ExitStack() as stack:
            for proof, owner, names, when in _places():
                for name in names:
                    stack.enter_context(
                        patch.object(owner, name, self._clocked(proof, getattr(owner, name), when))
                    )
            yield

    def _clocked(self, proof: str, real: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if not when():
                return real(*args, **kwargs)
            with self.of(proof):
                return real(*args, **kwargs)

        return clocked


def _places() -> list[tuple[str, Any, tuple[str, ...], Callable[[], bool]]]:
    """The counted functions: the proof's name, their owner, their names, and a function that tells when they count."""
    import torch

    import lockstep.contract.inbox as inbox
    import lockstep.contract.tensors as reading
    import lockstep.rollouts.driver as driver
    import lockstep.watch.engine as proofs
    import lockstep.watch.evidence as evidence
    import lockstep.watch.run as watch
    from lockstep.learn.id_classes import TokenClasses
    from lockstep.learn.token_logps import DrawSums
    from lockstep.learn.update import Policy
    from lockstep.watch.advantages import AdvantageProof
    from lockstep.watch.custody import Record
    from lockstep.watch.draws import DrawEvidence
    from lockstep.watch.elements import AccumulationProof, DrawnElements
    from lockstep.watch.evidence import DrawnRows
    from lockstep.watch.finite_differences import Added
    from lockstep.watch.forward import HeldHooks, PlainForward
    from lockstep.watch.held_weights import HeldWeights
    from lockstep.watch.kept_sets import KeptSetProof, KeptSetStats
    from lockstep.watch.loss_gradient import LossGradient
    from lockstep.watch.model_gradient import ModelGradient
    from lockstep.watch.modules import ModuleProbe
    from lockstep.watch.optimizer_rules import Rates
    from lockstep.watch.receipt import Receipt
    from lockstep.watch.reference import FrozenWeights
    from lockstep.watch.rewards import AskedAgain
    from lockstep.watch.samples import Ends, Seeds
    from lockstep.watch.settings import SettingsProof
    from lockstep.watch.update import UpdateProof

    found: list[tuple[str, Any, tuple[str, ...]]] = [
        (DIGEST, reading, ("tensor_digest",)),
        (PROBE, ModuleProbe, ("measure",)),
        ("held_weights", HeldWeights, ("compare",)),
        ("echo, keys, logprobs, version", inbox, ("check_answer",)),
        ("ends", Ends, ("check",)),
        ("turns", Record, ("note", "check")),
        ("samples", proofs, ("check_samples",)),
        ("samples", Seeds, ("check",)),
        ("kept_ids", KeptSetProof, ("check",)),
        ("kept_ids", KeptSetStats, ("check_mean",)),
        ("draws", TokenClasses, ("__init__",)),
        ("draws", DrawSums, ("of_rows", "of_sets")),
        ("draws", evidence, ("draws_of",)),
        ("draws", DrawEvidence, ("add", "check")),
        ("gap", evidence, ("gap_of",)),
        ("gap", proofs.Proofs, ("check_gap",)),
        ("rows", watch, ("check_rows",)),
        ("scores", AskedAgain, ("check",)),
        ("advantages", AdvantageProof, ("__init__", "check")),
        ("advantages", watch, ("advantage_proof",)),
        # The proof that the trainer learns from what was sampled: the seal of each rollout, and its comparison with
        # each pack.
        ("learned", driver, ("seal_of",)),
        ("learned", watch, ("sampled_tokens",)),
        ("learned", watch, ("check_entering",)),
        ("forward", PlainForward, ("check",)),
        ("loss_gradient", LossGradient, ("watch", "check")),
        ("model_gradient", ModelGradient, ("begin", "finish")),
        ("model_gradient", Added, ("__init__", "read")),
        ("hooks", HeldHooks, ("check",)),
        ("settings", DrawnRows, ("add", "check")),
        ("settings", SettingsProof, ("check_request", "check_completion", "check_reward")),
        ("accumulation", AccumulationProof, ("__init__", "added", "check")),
        # The work of the hooks during the backward.
        ("accumulation", DrawnElements, ("of_tensor",)),
        ("clipping", UpdateProof, ("clipped", "before")),
        ("learning_rate", Rates, ("at",)),
        ("update", UpdateProof, ("begin_step", "gradients", "after")),
        ("reference", FrozenWeights, ("check", "check_elements")),
        ("ranks", watch, ("check_same_weights",)),
        ("receipt", Receipt, ("append",)),
    ]
    always = [(*place, lambda: True) for place in found]
    return [*always, (FORWARD, Policy, ("score",), lambda: not torch.is_grad_enabled())]
