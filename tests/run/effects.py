"""What a run shows of itself: what two runs with two values of a field are compared by.

A run has two steps of a tiny model on the transformers engine, which is deterministic to the bit. The record of a
setting itself is left out: `run.json`, `training_args.bin`, and what a config prints of itself.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from methods import FIELDS, PROMPTS, timeless
from torch.nn.modules.module import register_module_forward_pre_hook

import lockstep
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import LockstepError
from lockstep.learn.scoring import _Head

BASE: dict[str, Any] = {
    **{"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "bf16": False, "disable_tqdm": True},
    **{"report_to": "none", "learning_rate": 1e-2, "use_vllm": False, "use_cpu": True, "seed": 3},
}
# Files that record the settings, or differ from run to run.
_RECORDS = ("run.json", "training_args.bin")


@dataclass
class Shown:
    """What is seen of one run.

    Attributes:
        metrics: every log, without times.
        weights, optimizer: digests of the policy and of the optimizer's tensors.
        requests: what the engine was asked.
        batches: how many requests the engine computed together, each time.
        forwards: the shape of the input of each forward of the trainer's layers.
        logits: how many rows of logits the trainer computed together, each time.
        files: the files of the run's folder, by name.
        printed: the lines that a user reads, without numbers.
        calls: how many completions the reward function got, each time.
        error: by which sentence the run ended; empty: it did not.
        more: what a row of the table looks at itself.
    """

    metrics: list[dict[str, Any]] = field(default_factory=list)
    weights: str = ""
    optimizer: str = ""
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    forwards: list[tuple[int, ...]] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    printed: Counter[str] = field(default_factory=Counter)
    calls: list[int] = field(default_factory=list)
    error: str = ""
    more: Any = None


def by_length(shown: Shown) -> Callable[..., list[float]]:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        shown.calls.append(len(completion_ids))
        return [float(len(ids) + ids[0] % 7) for ids in completion_ids]

    return reward


def shown(
    method: str,
    model: str,
    folder: Path,
    fields: Mapping[str, Any],
    arguments: Mapping[str, Any],
    capsys: pytest.CaptureFixture[str],
    look: Callable[[Any], Any] = lambda run: None,
) -> Shown:
    """Train with these fields, and note what is seen."""
    found = Shown()
    capsys.readouterr()
    given = {"reward_funcs": by_length(found), "train_dataset": PROMPTS, **arguments}
    fields = {"output_dir": str(folder), **BASE, **FIELDS[method], **fields}
    fields = {name: value for name, value in fields.items() if value is not ...}
    run = None
    try:
        with _watched(found):
            config = getattr(lockstep, f"{method}Config")(**fields)
            run = getattr(lockstep, f"{method}Trainer")(model, args=config, **given)
            run.train()
            found.more = look(run)
    except LockstepError as error:
        found.error = str(error).replace(str(folder), "")
    finally:
        if run is not None:
            run.close()
            found.metrics = [_steady(log) for log in run.state.log_history]
            found.weights = _digest(dict(run.model.named_parameters()))
            found.optimizer = _digest(dict(_tensors(getattr(run.optimizer, "state", {}))))
    said = "".join(capsys.readouterr()).replace(str(folder), "")
    said = re.sub(r"  (verify [\d.]+s)?  +[\d:]+ left", "", said)
    found.printed = Counter(re.sub(r"[\d.,]+(e-\d+)?", "#", line) for line in said.splitlines())
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    found.files = sorted(re.sub(r"\d{6,}[.\w-]*", "#", name) for name in names if not name.endswith(_RECORDS))
    return found


def _steady(log: dict[str, Any]) -> dict[str, Any]:
    """A log without what depends on the clock or on other programs."""
    return {k: v for k, v in timeless(log).items() if not re.search("runtime|per_second|memory|^init_mem", k)}


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for number, value in enumerate(state.values()):
            yield from _tensors(value, f"{name}.{number}")


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


@contextmanager
def _watched(found: Shown) -> Iterator[None]:
    round_, run_, logits_ = TransformersEngine._round, TransformersEngine._run, _Head.logits

    def asked(engine: Any, requests: Any, inbox: Any) -> None:
        found.requests += sorted(
            (str(r.key), tuple(r.prompt_ids.tolist()), str(r.sampling), r.seed) for r in requests
        )
        round_(engine, requests, inbox)

    def computed(engine: Any, rows: Any, deadline: float) -> None:
        found.batches.append(len(rows))
        run_(engine, rows, deadline)

    def logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
        found.logits.append(len(hidden))
        return logits_(head, hidden)

    def layer(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if module.training and type(module).__name__.endswith("DecoderLayer"):
            found.forwards.append(tuple(given[0].shape))

    with (
        patch.object(TransformersEngine, "_round", asked),
        patch.object(TransformersEngine, "_run", computed),
        patch.object(_Head, "logits", logits),
        # The comparison takes as long as it needs.
        patch("lockstep.watch.rewards.SHARE", 1e9),
    ):
        hook = register_module_forward_pre_hook(layer)
        try:
            yield
        finally:
            hook.remove()
