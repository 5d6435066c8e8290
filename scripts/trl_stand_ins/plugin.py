"""A pytest plugin for TRL's tests: it gives their data sets, and puts our trainers in the places of TRL's.

`scripts/trl_tests.py` starts pytest with it, once for each column, and tells it what to do in the variable `TRL_TESTS`. The outcome
of every test goes into a JSON file.

Some tests replace `generate` of the trainer's model by a function that returns made-up ids. Our trainers sample with an engine that
has a model of its own. In such a test, this engine takes its ids from that function, with the log-probs that its model gives them.
The two checks that the ids were drawn (`samples`, `draws`) are left out there: nobody drew them.
"""

from __future__ import annotations

import codecs
import dataclasses
import gc
import importlib
import json
import os
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

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
# Images per row of the data sets that have some.
IMAGES = {"trl-internal-testing/zen-image": 1, "trl-internal-testing/zen-multi-image": 2}
_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
_results: dict[str, tuple[str, str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    import datasets

    # Before our package, which hides a torchvision of another build than torch.
    load_torchvision()
    datasets.load_dataset = load_dataset
    if ASKED["who"] == "lockstep":
        put_ours()
    else:
        for where, name in OURS.items():
            if name.endswith("Config"):
                shorten(getattr(importlib.import_module(where), name))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
        reason = ""
        if call.excinfo is not None:
            said = str(call.excinfo.value).strip().splitlines() or [""]
            reason = f"{call.excinfo.type.__name__}: {said[0]}"[:300]
        _results[item.nodeid] = (outcome, reason)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any) -> None:
    for trainer in list(_trainers):
        trainer.close()
    _trainers.clear()
    gc.collect()


def pytest_sessionfinish(session: Any) -> None:
    Path(ASKED["results"]).write_text(json.dumps(_results))


def load_dataset(path: str, name: str | None = None, split: str | None = None, **_: Any) -> Any:
    """The data set of this name: lines of "The Zen of Python", cut into a prompt and its end."""
    import contextlib
    import io

    from datasets import Dataset, DatasetDict

    images = IMAGES.get(path, 0)
    if name is None or not (images or path == "trl-internal-testing/zen"):
        pytest.skip(f"there is no stand-in for the data set {path}")
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").split("\n")[2:]
    halves = [(" ".join(words[: len(words) // 2]), words) for words in (line.split() for line in lines if line)]
    if name == "standard_prompt_only":
        rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt, _ in halves]
    elif name == "conversational_prompt_only":
        rows = [{"prompt": [{"role": "user", "content": f"What comes after: {prompt}"}]} for prompt, _ in halves]
    else:
        pytest.skip(f"there is no stand-in for the part {name} of {path}")
    if images:
        rows = [row | {"images": [noise(images * i + place) for place in range(images)]} for i, row in enumerate(rows)]
    parts = DatasetDict(train=Dataset.from_list(rows[:17]), test=Dataset.from_list(rows[17:]))
    return parts if split is None else parts[split]


def noise(seed: int) -> Any:
    """An image of the sizes that TRL's data sets have."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (*draw.integers(32, 64, 2), 3), dtype=np.uint8))


def shorten(config: type) -> None:
    """End runs of this configuration after a few steps and tokens, unless the test says how many. Without a GPU, run in fp32."""
    import torch

    made, known = config.__init__, {field.name for field in dataclasses.fields(config)}

    def init(self: Any, *args: Any, **fields: Any) -> None:
        # A test of the defaults themselves gives no folder.
        runs = "output_dir" in fields
        if not any(name in fields for name in LENGTHS):
            fields["max_steps"] = ASKED["steps"]
        if runs and "max_new_tokens" in known:
            fields = {"max_new_tokens": NEW_TOKENS} | fields
        if fields.get("use_liger_kernel") and not torch.cuda.is_available():
            # Its kernels would stay in this process and fail every test that follows.
            pytest.skip("Liger's kernels need a GPU")
        if not torch.cuda.is_available():
            # TRL's configurations ask for a machine with bf16 units otherwise.
            fields = {"use_cpu": True, "bf16": False} | fields
        made(self, *args, **fields)

    config.__init__ = init  # type: ignore[misc]


def put_ours() -> None:
    """Put our trainers and configurations in the places of TRL's. Like TRL's, they sample with transformers by default."""
    import trl

    import lockstep
    import lockstep.training.generate.engine as starting
    import lockstep.training.generate.proofs.proofs as proofs
    from lockstep.engines.transformers_engine import TransformersEngine
    from lockstep.parity.sampling.draws import DrawEvidence
    from lockstep.training.trainers.online import OnlineTrainer

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

    from lockstep.engines.filters.sampling import processed_logprobs
    from lockstep.engines.protocol import Completion
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
            logits = engine._model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        logprobs = [
            float(processed_logprobs(row, request.sampling, prompt, sampled[:place], end_ids=ends)[sampled[place]])
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
