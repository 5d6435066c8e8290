"""Shared fixtures: model directories, and engines that many tests use one after the other."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# vLLM reads these variables at its import. They are set here because tests must not depend on which module imports vLLM first.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
# One thread per process: the tensors are small, and a result must not depend on the number of free cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "training")]

import draws  # noqa: F401 - the profile of Hypothesis
from servers import Server, connect, serve
from stages import stage_on
from tiny import CONTEXT, save_model, talkative

from lockstep.engines.protocol import Engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.vllm_inprocess import VLLMInProcess, vllm_installed
from lockstep.tokens.tokenizer import load_tokenizer
from lockstep.verify.stage import Stage

pytest_plugins = ["schedule"]

needs_vllm = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed here")


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """A trainer collects garbage at the end of each run. Without this fixture it scans all imported objects (up to 1 s)."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "untied"))


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tied", kind="llama", tied=True))


def start(name: str, model: str, **kwargs: object) -> Engine:
    """An engine for a tiny model, in fp32."""
    if name == "transformers":
        return TransformersEngine(model, load_tokenizer(model), dtype=torch.float32, max_model_len=CONTEXT, **kwargs)  # type: ignore[arg-type]
    return VLLMInProcess(model, dtype=torch.float32, max_model_len=CONTEXT, **kwargs)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def talkative_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return talkative(tmp_path_factory.mktemp("models") / "talkative")


@pytest.fixture(scope="module")
def hf_engine(untied_dir: str) -> Engine:
    """The transformers engine with the untied tiny model. It is deterministic to the bit; tests push their own weights."""
    return start("transformers", untied_dir)


@pytest.fixture(scope="session")
def server(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real vLLM server with the untied tiny model; tests leave it running."""
    # `schedule` is a plugin of pytest, so pytest must import it first.
    from schedule import check_served

    check_served(os.environ["PYTEST_CURRENT_TEST"])
    with serve(untied_dir, tmp_path_factory.mktemp("server")) as running:
        yield running


VLLM = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(
    scope="session", params=["transformers", pytest.param("vllm", marks=VLLM), pytest.param("server", marks=VLLM)]
)
def engine(request: pytest.FixtureRequest, untied_dir: str) -> Iterator[Engine]:
    """Every kind of engine, with the untied tiny model; tests push the weights that they want."""
    if request.param == "server":
        started: Engine = connect(request.getfixturevalue("server").url)
    else:
        started = start(request.param, untied_dir)
    yield started
    started.close()


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with biases. Its head is tied to its embedding."""
    return str(save_model(tmp_path_factory.mktemp("models") / "shared", tied=True))


STAGES = [
    "transformers-untied",
    pytest.param("vllm-shared", marks=VLLM),
    pytest.param("vllm-untied", marks=[*VLLM, pytest.mark.release]),
    pytest.param("vllm-tied", marks=[*VLLM, pytest.mark.release]),
]


@pytest.fixture(scope="module", params=STAGES)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A trainer with an engine, made like `lockstep verify` makes them, per kind of engine; tests must restore the weights."""
    engine, kind = request.param.split("-")
    model = request.getfixturevalue(f"{kind}_dir")
    with stage_on(model, tmp_path_factory.mktemp("stage"), use_vllm=engine == "vllm", bf16=False) as made:
        yield made


@pytest.fixture(scope="module")
def tied_vllm(tied_dir: str) -> Iterator[VLLMInProcess]:
    started = start("vllm", tied_dir)
    yield started  # type: ignore[misc]
    started.close()
