"""What Lockstep changes in vLLM's second model runner, which runs on GPUs only: the names are read from vLLM's sources."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VLLM

from lockstep.engines.vllm.arguments import MAX_KEPT_IDS
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.limits import request_limits
from lockstep.engines.vllm.patches.kept_ids import SecondRunnerKeptIds
from lockstep.errors import InputError

pytestmark = VLLM
RUNNER, SAMPLER = "v1/worker/gpu/model_runner.py", "v1/worker/gpu/sample/sampler.py"


def source(path: str) -> ast.Module:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())


def class_of(path: str, name: str) -> ast.ClassDef:
    return next(n for n in ast.walk(source(path)) if isinstance(n, ast.ClassDef) and n.name == name)


def arguments(path: str, name: str, method: str) -> list[str]:
    (found,) = [n for n in class_of(path, name).body if isinstance(n, ast.FunctionDef) and n.name == method]
    return [argument.arg for argument in found.args.args]


def own_names(path: str, name: str) -> set[str]:
    """Attributes that the class assigns to itself, and its fields."""
    body = class_of(path, name)
    stores = {n.attr for n in ast.walk(body) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return stores | {n.target.id for n in body.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def test_vllm_has_every_name_that_is_replaced_or_read() -> None:
    assert arguments(RUNNER, "GPUModelRunner", "sample")[:3] == ["self", "hidden_states", "input_batch"]
    assert {"sampler", "max_num_reqs"} <= own_names(RUNNER, "GPUModelRunner")
    assert arguments(SAMPLER, "Sampler", "add_request") == ["self", "req_idx", "sampling_params"]
    places = ["self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np"]
    assert arguments(SAMPLER, "Sampler", "sample")[:5] == places
    assert "return_sampling_mask" in own_names(SAMPLER, "Sampler")
    assert "idx_mapping_np" in own_names("v1/worker/gpu/input_batch.py", "InputBatch")
    assert "sampling_mask_tensors" in own_names("v1/worker/gpu/sample/output.py", "SamplerOutput")
    assert "counts" in own_names("v1/worker/gpu/sample/output.py", "SamplingMaskTensors")
    assert "use_v2_model_runner" in own_names("v1/worker/gpu_worker.py", "Worker")


def test_sets_are_computed_only_while_a_request_asks_and_larger_ones_become_empty() -> None:
    """The runner is played: vLLM's own needs a GPU."""
    sampler: Any = SimpleNamespace(return_sampling_mask=False, add_request=lambda *_: None, sample=lambda *_: None)

    def step(hidden_states: Any, batch: Any) -> tuple[Any]:
        sampler.sample(None, None, None, batch.idx_mapping_np)
        sets = SimpleNamespace(counts=torch.tensor(batch.counts)) if sampler.return_sampling_mask else None
        return (SimpleNamespace(sampling_mask_tensors=sets),)

    runner = SimpleNamespace(sampler=sampler, max_num_reqs=4, sample=step)
    SecondRunnerKeptIds(runner)

    def counts(places: list[int], counts: list[int]) -> list[int] | None:
        batch = SimpleNamespace(idx_mapping_np=np.array(places), counts=counts)
        sets = runner.sample(None, batch)[0].sampling_mask_tensors
        return None if sets is None else sets.counts.tolist()

    sampler.add_request(0, SimpleNamespace(extra_args={MAX_KEPT_IDS: 20}))
    sampler.add_request(2, SimpleNamespace(extra_args=None))
    assert counts([2, 0], [300, 20]) == [0, 20]
    assert counts([0], [21]) == [0]
    assert counts([2], [300]) is None
    # Another request in the place of the first one.
    sampler.add_request(0, SimpleNamespace(extra_args={}))
    assert counts([0, 2], [20, 20]) is None


def test_the_limits_of_a_request_are_those_of_vllms_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(use_v2_model_runner=True)
    sizes = {"allowed_token_ids": 1024, "logit_bias": 1024, "end_ids": 128, "bad_words": 128, "bad_word_ids": 1024}
    assert request_limits(second) == sizes
    assert request_limits(SimpleNamespace(use_v2_model_runner=False)) == {}
    # A user can make two of the tables larger.
    monkeypatch.setenv("VLLM_MAX_NUM_BAD_WORDS", "300")
    assert request_limits(second) == sizes | {"bad_words": 300}


@pytest.mark.parametrize("error", [AttributeError("no 'requests'"), AssertionError()])
def test_an_engine_that_does_not_start_says_why(
    error: Exception, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(VLLMInProcess, "_run", fails)
    with pytest.raises(
        InputError, match="no 'requests'" if str(error) else r"AssertionError: without a text .*raise error"
    ):
        VLLMInProcess(untied_dir, dtype=torch.float32, max_model_len=64)
