"""Variables of `accelerate launch` that change numerics beside the config: each is taken or refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import lockstep
from lockstep import progress as waits
from lockstep.config.launcher import meeting_ranks, take_launcher
from lockstep.errors import InputError

PRECISION = "ACCELERATE_MIXED_PRECISION"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def config(tmp_path: Path, **fields: Any) -> lockstep.GRPOConfig:
    return lockstep.GRPOConfig(output_dir=str(tmp_path), use_vllm=False, **fields)


@pytest.mark.parametrize(
    ("name", "value", "fields", "says"),
    [
        (PRECISION, "bf16", {"bf16": False}, "bf16 is false in the config"),
        (PRECISION, "fp16", {"bf16": True}, f"{PRECISION}=fp16 is not supported"),
        (PRECISION, "fp8", {}, "fp8 is not supported"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {}, "compiled forward"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", {}, "Megatron-LM is not supported"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", {}, "parallelism config is not supported"),
        (ACCUMULATION, "4", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
    ],
)
def test_a_variable_of_the_launcher_that_contradicts_the_config_is_refused(
    name: str, value: str, fields: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says):
        config(tmp_path, **fields)


@pytest.mark.parametrize(
    ("name", "value", "fields", "expected"),
    [
        (PRECISION, "bf16", {}, {"bf16": True, "mixed_precision": "bf16"}),
        (PRECISION, "bf16", {"bf16": True}, {"bf16": True, "mixed_precision": "bf16"}),
        # What the launcher sets unless it is told otherwise.
        (PRECISION, "no", {"bf16": True}, {"mixed_precision": "bf16"}),
        (PRECISION, "no", {"bf16": False}, {"mixed_precision": "no"}),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", {"bf16": False}, {"bf16": False}),
        (ACCUMULATION, "2", {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    ],
)
def test_what_the_launcher_asks_for_and_the_config_leaves_open_is_taken(
    name: str,
    value: str,
    fields: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a machine with fast bfloat16 the config would choose it without the launcher.
    monkeypatch.setattr("lockstep.config.run.has_fast_bf16", lambda: False)
    monkeypatch.setenv(name, value)
    made = config(tmp_path, **fields)
    assert {field: getattr(made, field) for field in expected} == expected


def test_a_launch_on_the_cpu_is_one_of_the_config() -> None:
    """On its own: without a GPU every config is on the CPU."""
    fields: Any = SimpleNamespace(use_cpu=False, deepspeed=None)
    take_launcher(fields, {"ACCELERATE_USE_CPU": "true"})
    assert fields.use_cpu is True


def of_ranks(rank: int, port: int) -> dict[str, str]:
    return {"WORLD_SIZE": "4", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_rank_says_that_it_waits_for_rank_0_and_does_so_no_longer_than_its_limit(
    closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    real = socket.create_connection

    def connect(*args: Any, **kwargs: Any) -> socket.socket:
        said.extend(waits.WAITS.lines(time.monotonic(), 0))
        return real(*args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", connect)
    for name, value in of_ranks(1, closed_port).items():
        monkeypatch.setenv(name, value)
    expected = (
        rf"4 processes meet at 127\.0\.0\.1:{closed_port} .*nobody answers there "
        rf"\(.*refused.*\).*unset WORLD_SIZE"
    )
    with pytest.raises(InputError, match=expected):
        config(tmp_path, ddp_timeout=1)
    assert said[0] == f"waiting for rank 0 to answer at 127.0.0.1:{closed_port} (MASTER_ADDR, MASTER_PORT)"


def test_rank_0_says_that_it_waits_and_torchs_error_becomes_one_sentence(closed_port: int) -> None:
    said: list[str] = []

    def meet() -> None:
        with meeting_ranks(of_ranks(0, closed_port), 60.0, use_cpu=True):
            said.extend(waits.WAITS.lines(time.monotonic(), 0).values())
            dist.TCPStore("127.0.0.1", 0, 4, True, timedelta(milliseconds=10))

    # transformers gives torch no limit on a CPU, so that no field is advised.
    with pytest.raises(
        InputError, match=r"not all came in time \(.*\): start all of them.*unset WORLD_SIZE$"
    ):
        meet()
    where = f"127.0.0.1:{closed_port}"
    assert said == [f"waiting for the 4 processes of WORLD_SIZE to meet at {where}: 0 s of at most 1800 s"]


def test_one_process_waits_for_nobody() -> None:
    with meeting_ranks({"WORLD_SIZE": "1"}, 60.0, use_cpu=True):
        assert waits.WAITS.lines(time.monotonic(), 0) == {}
