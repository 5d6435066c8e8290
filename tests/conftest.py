"""Shared fixtures: model directories, and engines that many tests use one after the other.

With `-n`, the process that starts the workers reads this file too, and the workers wait for it. Therefore this file
imports nothing heavy: each fixture imports what it needs.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# vLLM reads these variables at its import. They are set here because tests must not depend on which module imports
# vLLM first.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
# One thread per process: the tensors are small, and a result must not depend on the number of free cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# On a CPU, torch compiles one function of vLLM's sampler (the ranks of log-probs) with g++: up to 10 CPU seconds per
# process. Without compilation the function gives the same ranks. A test of `server/test_examples.py` compiles it
# before a release.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parent / room) for room in ("run", "learn"))]
# The package `benchmarks` is not part of what is installed.
sys.path.append(str(Path(__file__).parents[1]))

import draws  # noqa: F401 - the profile of Hypothesis
from forked import start_fork_server, stop_fork_server
from vllm_once import search_kernels_once

if TYPE_CHECKING:
    from servers import Server

    from lockstep.contract.protocol import Engine
    from lockstep.engines.vllm.in_process import VLLMInProcess
    from lockstep.extras.verify.stage import Stage

pytest_plugins = ["portions", "schedule"]

# The disk takes 3 ms or more to confirm what it has, and a run asks for that several times per checkpoint. A killed
# process loses nothing that it has written. Only a crash of the machine would show the difference, and no test makes
# one. The tests of what a run asks of the disk put a function of their own in this place.
os.fsync = lambda fd: None

FORK_SERVER = pytest.StashKey[subprocess.Popen[bytes]]()
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")

# A trainer collects garbage at the end of each run, and vLLM seven times per engine. A full collection looks at every
# object made since the last freeze: 0.04 to 0.15 s, and more after imports. What a run leaves is young. Therefore
# these calls collect young objects only; full collections happen before each file, and automatically.
_collect, _freeze = gc.collect, gc.freeze
gc.collect = lambda generation=1: _collect(generation)
# vLLM unfreezes all objects whenever an engine is closed. Then a full collection would look at all imported objects
# (up to 1 s). Some libraries print what is left at the end of the interpreter.
atexit.register(gc.unfreeze)
gc.freeze = gc.unfreeze = lambda: None
# Imports make a million objects that stay. With Python's own thresholds a fifth of their time is spent on looking for
# garbage.
gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """Later collections do not look at objects that exist before the first test of a file."""
    search_kernels_once()
    _collect()
    _freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Start one fork server for all workers."""
    if not hasattr(config, "workerinput"):
        config.stash[FORK_SERVER] = start_fork_server()


def pytest_unconfigure(config: pytest.Config) -> None:
    if FORK_SERVER in config.stash:
        stop_fork_server(config.stash[FORK_SERVER])


@pytest.fixture(scope="session")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny import save_model

    return str(save_model(tmp_path_factory.mktemp("models") / "untied"))


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny import save_model

    return str(save_model(tmp_path_factory.mktemp("models") / "tied", kind="llama", tied=True))


def start(name: str, model: str, **kwargs: object) -> Engine:
    """An engine for a tiny model, in fp32."""
    import torch
    from tiny import CONTEXT

    from lockstep.engines.transformers_engine import TransformersEngine
    from lockstep.engines.vllm.in_process import VLLMInProcess
    from lockstep.tokens.chat import load_tokenizer

    if name == "transformers":
        return TransformersEngine(
            model, load_tokenizer(model), dtype=torch.float32, max_model_len=CONTEXT, **kwargs
        )  # type: ignore[arg-type]
    return VLLMInProcess(model, dtype=torch.float32, max_model_len=CONTEXT, **kwargs)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def talkative_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny import talkative

    return talkative(tmp_path_factory.mktemp("models") / "talkative")


@pytest.fixture(scope="session")
def caller_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that calls tools."""
    from caller import save_caller

    return save_caller(tmp_path_factory.mktemp("models") / "caller")


@pytest.fixture(scope="module")
def hf_engine(untied_dir: str) -> Engine:
    """The transformers engine with the untied tiny model.

    It is deterministic to the bit; tests push their own weights.
    """
    return start("transformers", untied_dir)


@pytest.fixture(scope="session")
def server(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real vLLM server with the untied tiny model; tests leave it running."""
    from servers import serve

    with serve(untied_dir, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def server_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of this test find the key of the tests' servers in the environment."""
    from servers import KEY

    from lockstep.server.keys import KEY_VARIABLE

    monkeypatch.setenv(KEY_VARIABLE, KEY)


VLLM = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(
    scope="session",
    params=["transformers", pytest.param("vllm", marks=VLLM), pytest.param("server", marks=VLLM)],
)
def engine(request: pytest.FixtureRequest, untied_dir: str) -> Iterator[Engine]:
    """Every kind of engine, with the untied tiny model; tests push the weights that they want."""
    from servers import connect

    if request.param == "server":
        started: Engine = connect(request.getfixturevalue("server").url)
    else:
        started = start(request.param, untied_dir)
    yield started
    started.close()


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with biases. Its head is tied to its embedding."""
    from tiny import save_model

    return str(save_model(tmp_path_factory.mktemp("models") / "shared", tied=True))


STAGES = [
    "transformers-untied",
    pytest.param("vllm-shared", marks=VLLM),
    pytest.param("vllm-untied", marks=[*VLLM, pytest.mark.release]),
    pytest.param("vllm-tied", marks=[*VLLM, pytest.mark.release]),
]


@pytest.fixture(scope="module", params=STAGES)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A trainer with an engine, as `lockstep verify` makes them, per kind of engine; tests must restore the weights.

    vLLM loads weights in parts, as it does for a model of real size. Embedding and head are larger than a part.
    """
    from stages import in_small_parts, stage_on

    engine, kind = request.param.split("-")
    model, uses_vllm = request.getfixturevalue(f"{kind}_dir"), engine == "vllm"
    with (
        in_small_parts() if uses_vllm else nullcontext(),
        stage_on(model, tmp_path_factory.mktemp("stage"), use_vllm=uses_vllm, bf16=False) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def tied_vllm(tied_dir: str) -> Iterator[VLLMInProcess]:
    started = start("vllm", tied_dir)
    yield started  # type: ignore[misc]
    started.close()
