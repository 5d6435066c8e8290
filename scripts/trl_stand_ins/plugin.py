"""A pytest plugin for TRL's tests: it gives their data sets, and puts our trainers in the places of TRL's.

`scripts/trl_tests.py` starts pytest with it, once for each column, and tells it what to do in the variable
`TRL_TESTS`. The outcome of every test goes into a JSON file.

Some tests replace `generate` of the trainer's model by a function that returns made-up ids. Our trainers sample with
an engine that has a model of its own. In such a test, this engine takes its ids from that function, with the
log-probs that its model gives them. The two checks that the ids were drawn (`samples`, `draws`) are left out there:
nobody drew them.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import importlib.util
import inspect
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trl_stand_ins.hub import data_of
from trl_stand_ins.private import insides, models
from trl_stand_ins.vision import load_torchvision

ASKED = json.loads(os.environ["TRL_TESTS"])
OURS = {
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.grpo_config": "GRPOConfig",
    "trl.trainer.rloo_trainer": "RLOOTrainer",
    "trl.trainer.rloo_config": "RLOOConfig",
    "trl.experimental.online_dpo.online_dpo_trainer": "OnlineDPOTrainer",
    "trl.experimental.online_dpo.online_dpo_config": "OnlineDPOConfig",
}
# Names that give a run its own length.
LENGTHS = ("max_steps", "num_train_epochs")
# New tokens of a completion, where TRL's default would be used; nearly all of its tests name so few.
NEW_TOKENS = 8
ENVIRONMENT = pytest.StashKey[dict[str, str]]()
_whole_runs: list[bool] = []
_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
_results: dict[str, tuple[str, str, str, str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    import datasets

    # Before our package, which hides a torchvision of another build than torch.
    load_torchvision()
    datasets.load_dataset = load_dataset
    skip_liger_without_gpu()
    parse_tokenizers_once()
    add_missing_questions(Path(config.rootpath) / "tests" / "testing_utils.py")
    if ASKED["who"] == "lockstep":
        put_ours()
    else:
        for where, name in OURS.items():
            if name.endswith("Config"):
                shorten(getattr(importlib.import_module(where), name))


def add_missing_questions(tests: Path) -> None:
    """Give `trl.import_utils` the functions `is_…_available` that the tests import and the installed TRL does not have.

    They only decide which tests are skipped. The tests' commit and the installed TRL need not be of one version.
    """
    questions = importlib.import_module("trl.import_utils")
    for name, package in sorted(
        {*re.findall(r"\b(is_(\w+)_available)\b", tests.read_text(encoding="utf-8"))}
    ):
        if not hasattr(questions, name):
            is_there = importlib.util.find_spec(package) is not None
            setattr(questions, name, lambda is_there=is_there: is_there)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
        reason = ""
        if call.excinfo is not None:
            said = str(call.excinfo.value).strip().splitlines() or [""]
            reason = f"{call.excinfo.type.__name__}: {said[0]}"[:300]
        _results[item.nodeid] = (outcome, reason, insides(item.function), models(item.function, item.name))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    # A test that counts the calls of a run needs the whole of it.
    _whole_runs[:] = [True] if "call_count" in inspect.getsource(inspect.unwrap(item.function)) else []
    item.stash[ENVIRONMENT] = dict(os.environ)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any) -> None:
    """Close what the test left.

    TRL's tests with vLLM leave variables by which the next trainer takes itself for one of several.
    """
    from accelerate.state import AcceleratorState

    for trainer in list(_trainers):
        trainer.close()
    _trainers.clear()
    os.environ.clear()
    os.environ.update(item.stash[ENVIRONMENT])
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which packages the tests have used."""
    import trl

    import lockstep

    said = f"trl {trl.__version__}, {trl.__file__}"
    if ASKED["who"] == "lockstep":
        said = f"lockstep, {lockstep.__file__}, in the places of the trainers of {said}"
    terminalreporter.write_line(f"measured: {said}")


def pytest_sessionfinish(session: Any) -> None:
    Path(ASKED["results"]).write_text(json.dumps(_results), encoding="utf-8")


def load_dataset(
    path: str, name: str | None = None, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    """The data set of this name, as a stream if asked."""
    from datasets import IterableDatasetDict, load_from_disk

    where = data_of(Path(ASKED["folder"]), path, name or "default")
    if not where.exists():
        pytest.skip(f"the checkout has no program for the part {name} of {path}")
    parts: Any = load_from_disk(str(where))
    if streaming:
        parts = IterableDatasetDict({part: rows.to_iterable_dataset() for part, rows in parts.items()})
    return parts if split is None else parts[split]


def parse_tokenizers_once() -> None:
    """Parse each tokenizer.json once per process. Nearly every test loads two, with 151,669 tokens each."""
    load = json.load
    known: dict[str, Any] = {}

    def load_once(file: Any, **options: Any) -> Any:
        name = getattr(file, "name", "")
        if not str(name).endswith("tokenizer.json"):
            return load(file, **options)
        path = f"{os.path.realpath(name)} {os.stat(name).st_mtime_ns}"
        parsed = known[path] if path in known else known.setdefault(path, load(file, **options))
        # transformers changes the list of added tokens, and not the vocabulary.
        return {**copy.deepcopy({**parsed, "model": None}), "model": dict(parsed["model"])}

    json.load = load_once


def skip_liger_without_gpu() -> None:
    """Skip tests that train with Liger's kernels without a GPU: they would stay in the process and fail later tests."""
    import torch
    from transformers import Trainer

    train = Trainer.train

    def or_skip(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.use_liger_kernel and not torch.cuda.is_available():
            pytest.skip("Liger's kernels need a GPU")
        return train(self, *args, **kwargs)

    Trainer.train = or_skip  # type: ignore[method-assign]


def shorten(config: type) -> None:
    """End runs of this configuration after a few steps and tokens, unless the test says how many.

    Without a GPU, run in fp32.
    """
    import torch

    made, known = config.__init__, {field.name for field in dataclasses.fields(config)}

    def init(self: Any, *args: Any, **fields: Any) -> None:
        # A test of the defaults themselves gives no folder.
        runs = "output_dir" in fields
        if ASKED["steps"] and not _whole_runs and not any(name in fields for name in LENGTHS):
            fields["max_steps"] = ASKED["steps"]
        if runs and "max_new_tokens" in known:
            fields = {"max_new_tokens": NEW_TOKENS} | fields
        if not torch.cuda.is_available():
            # TRL's configurations ask for a machine with bf16 units otherwise.
            fields = {"use_cpu": True, "bf16": False} | fields
        made(self, *args, **fields)

    config.__init__ = init  # type: ignore[misc]


def put_ours() -> None:
    """Put our trainers and configurations in the places of TRL's.

    Like TRL's, they sample with transformers by default.
    """
    import trl

    import lockstep
    import lockstep.run.engine as starting
    import lockstep.watch.engine as proofs
    from lockstep.engines.transformers_engine import TransformersEngine
    from lockstep.run.trainers.online import OnlineTrainer
    from lockstep.watch.draws import DrawEvidence

    starting.vllm_installed = lambda: False  # type: ignore[assignment]
    for where, name in OURS.items():
        ours = getattr(lockstep, name)
        if name.endswith("Config"):
            shorten(ours)
        module = importlib.import_module(where)
        setattr(module, name, ours)
        for holder in (trl, importlib.import_module(where.rpartition(".")[0])):
            if hasattr(holder, name) or holder is not trl:
                setattr(holder, name, ours)
    made, rounds = OnlineTrainer.__init__, TransformersEngine._round
    samples, draws = proofs.check_samples, DrawEvidence.check

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _trainers.add(self)

    def one_round(self: Any, requests: Any, inbox: Any) -> None:
        asked = next((t.model.generate for t in _trainers if t.source.engine is self), None)
        (replayed if isinstance(asked, Mock) else rounds)(self, requests, inbox)

    def replayed(self: Any, requests: Any, inbox: Any) -> None:
        asked = next(t.model.generate for t in _trainers if t.source.engine is self)
        for completion in from_test(self, asked, requests):
            inbox.answer(completion, [self.version], self._vocab_size)

    def drawn() -> bool:
        return not any(isinstance(t.model.generate, Mock) for t in _trainers)

    proofs.check_samples = lambda groups: samples(groups) if drawn() else None
    DrawEvidence.check = lambda self, *given: draws(self, *given) if drawn() else None  # type: ignore[method-assign]
    OnlineTrainer.__init__ = init  # type: ignore[method-assign]
    TransformersEngine._round = one_round  # type: ignore[method-assign]


def from_test(engine: Any, generate: Any, requests: Any) -> list[Any]:
    """Completions whose ids come from a test's `generate`, with the log-probs of the engine's model."""
    import torch

    from lockstep.contract.distribution import processed_logprobs
    from lockstep.contract.protocol import Completion
    from lockstep.tokens.arrays import reals, whole_numbers

    longest = max(len(request.prompt_ids) for request in requests)
    ends = engine._end_ids
    ids = torch.full((len(requests), longest), ends[0])
    for row, request in zip(ids, requests, strict=True):
        row[longest - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids.astype("int64"))
    given = generate(input_ids=ids, attention_mask=(ids != ends[0]).long())
    completions = []
    for request, row in zip(requests, given.tolist(), strict=True):
        sampled = row[longest:][: request.sampling.max_tokens]
        end = next((place + 1 for place, token in enumerate(sampled) if token in ends), None)
        sampled = sampled[:end]
        prompt = request.prompt_ids.tolist()
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        logprobs = [
            float(
                processed_logprobs(row, request.sampling, prompt, sampled[:place], end_ids=ends)[
                    sampled[place]
                ]
            )
            for place, row in enumerate(logits)
        ]
        completions.append(
            Completion(
                key=request.key,
                prompt_ids=request.prompt_ids,
                token_ids=whole_numbers(sampled),
                logprobs=reals(logprobs),
                weight_versions=whole_numbers([engine.version] * len(sampled)),
                finish_reason="length" if end is None else "stop",
            )
        )
    return completions
