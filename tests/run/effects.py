"""What a run shows of itself: what two runs with two values of a field are compared by.

A run has two steps of a tiny model on the transformers engine, which is deterministic to the bit. The record of a
setting itself is left out: `run.json`, `training_args.bin`, and what a config prints of itself. In the place of vLLM,
of servers, of the hub and of trackio stand objects that only note what they are asked for.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from huggingface_hub import HfApi
from methods import FIELDS, PROMPTS, timeless
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import modelcard

import lockstep
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import LockstepError
from lockstep.learn.scoring import _Head
from lockstep.run import engine

BASE: dict[str, Any] = {
    **{"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "bf16": False, "disable_tqdm": True},
    **{"report_to": "none", "learning_rate": 1e-2, "use_vllm": False, "use_cpu": True, "seed": 3},
}
# Files that record the settings.
_RECORDS = ("run.json", "training_args.bin")


@dataclass
class Shown:
    """What is seen of one run.

    Attributes:
        metrics: every log, without times.
        weights, optimizer: digests of the policy and of the optimizer's tensors.
        requests: what the engine was asked.
        batches: how many requests the engine computed together, each time.
        forwards: the shape of the input of each forward of the trainer's layers, and whether it had a gradient.
        logits: how many rows of logits the trainer computed together, each time.
        files: the files of the run's folder, by name.
        printed: the lines that a user reads, without numbers.
        calls: how many completions the reward function got, each time.
        started: with what vLLM was started, or servers were connected to.
        sent: what the hub and trackio were asked.
        error: by which sentence the run ended; empty: it did not.
        more: what a row of the table looks at itself.
    """

    metrics: list[dict[str, Any]] = field(default_factory=list)
    weights: str = ""
    optimizer: str = ""
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    forwards: list[tuple[Any, ...]] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    printed: Counter[str] = field(default_factory=Counter)
    calls: list[int] = field(default_factory=list)
    started: str = ""
    sent: list[str] = field(default_factory=list)
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
    given: Mapping[str, Any],
    capsys: pytest.CaptureFixture[str],
    look: Callable[[Any], Any] = lambda run: None,
    do: Callable[[Any], Any] = lambda run: run.train(),
) -> Shown:
    """Train with these fields, and note what is seen.

    Args:
        fields: of the config. A function is called with the folder. `output_dir` is below the folder.
        given: further arguments of the trainer.
        look: sees the trainer after the training.
        do: what the trainer does instead.
    """
    found = Shown()
    capsys.readouterr()
    arguments = {"reward_funcs": by_length(found), "train_dataset": PROMPTS, **given}
    fields = {**BASE, **FIELDS[method], **fields}
    fields = {name: value(folder) if callable(value) else value for name, value in fields.items()}
    fields["output_dir"] = str(folder / fields.get("output_dir", "run"))
    run = None
    try:
        with _watched(found):
            config = getattr(lockstep, f"{method}Config")(**fields)
            run = getattr(lockstep, f"{method}Trainer")(model, args=config, **arguments)
            do(run)
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
    found.printed = Counter(re.sub(r"[\d.,]+(e-\d+)?", "#", line) for line in said.splitlines())
    for line in [line for line in found.printed if "left" in line or "took" in line]:
        # How much of a line of a step is shown depends on the time that it took.
        del found.printed[line]
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    kept = (name for name in names if not name.endswith(_RECORDS))
    found.files = sorted(re.sub(r"\d{6,}[.\w-]*|[A-Z][a-z]{2}\d\d_[^/]*", "#", name) for name in kept)
    return found


def _steady(log: dict[str, Any]) -> dict[str, Any]:
    """A log without what depends on the clock or on other programs. The names of its figures of memory stay."""
    clock = re.compile("runtime|per_second|memory")
    return {k: None if "_mem_" in k else v for k, v in timeless(log).items() if not clock.search(k)}


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

    def asked(here: Any, requests: Any, inbox: Any) -> None:
        found.requests += sorted(
            (str(r.key), tuple(r.prompt_ids.tolist()), str(r.sampling), r.seed) for r in requests
        )
        round_(here, requests, inbox)

    def computed(here: Any, rows: Any, deadline: float) -> None:
        found.batches.append(len(rows))
        run_(here, rows, deadline)

    def logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
        found.logits.append(len(hidden))
        return logits_(head, hidden)

    def layer(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if module.training and type(module).__name__.endswith("DecoderLayer"):
            found.forwards.append((tuple(given[0].shape), torch.is_grad_enabled()))

    with ExitStack() as patches:
        for kind, name, function in (
            (TransformersEngine, "_round", asked),
            (TransformersEngine, "_run", computed),
            (_Head, "logits", logits),
        ):
            patches.enter_context(patch.object(kind, name, function))
        # The comparison of rewards takes as long as it needs.
        patches.enter_context(patch("lockstep.watch.rewards.SHARE", 1e9))
        patches.enter_context(_played(found))
        hook = register_module_forward_pre_hook(layer)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def _played(found: Shown) -> Iterator[None]:
    """Objects in the place of vLLM, of servers, of the hub and of trackio."""
    start = engine.start_here

    def here(model: str, tokenizer: Any, **given: Any) -> Any:
        if given["use_vllm"] is not True:
            return start(model, tokenizer, **given)
        # The choice of a transport is a function with its settings.
        choice = given["vllm_arguments"].pop("transport")
        found.started = f"here {given} {[cell.cell_contents for cell in choice.__closure__]}"
        raise LockstepError("started")

    def connect(urls: Any, **given: Any) -> Any:
        found.started = f"{urls} {given}"
        raise LockstepError("started")

    def send(name: str) -> Callable[..., Any]:
        def sent(*words: Any, **said: Any) -> Any:
            said.pop("folder_path", None)
            found.sent.append(f"{name} {words[1:]} {said}")
            # An upload never ends by itself.
            return Future() if said.get("run_as_future") else SimpleNamespace(repo_id=said.get("repo_id", ""))

        return sent

    trackio = MagicMock(__version__="1.0")
    trackio.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    trackio.init, trackio.freeze = send("trackio.init"), send("trackio.freeze")
    trackio.context_vars.current_space_id.get.return_value = "a/space"
    with (
        patch.object(engine, "start_here", here),
        patch.object(engine, "connect", connect),
        patch.object(HfApi, "create_repo", send("create_repo")),
        patch.object(HfApi, "upload_folder", send("upload_folder")),
        patch("transformers.trainer.PushInProgress.wait_until_done"),
        patch.object(modelcard, "AUTOGENERATED_TRAINER_COMMENT", modelcard.AUTOGENERATED_TRAINER_COMMENT),
        patch.dict(sys.modules, {"trackio": trackio}),
        patch.dict("os.environ", {"HF_HUB_OFFLINE": "1"}),
    ):
        yield
