"""A long run on a server that survives a seeded schedule of SIGKILLs and SIGSTOPs of every process.

`long_schedule.py` draws the signals. It sends them to server, engine, supervisor, trainer and single ranks, in every
phase. Without staleness, the final weights and the metrics must equal those of an undisturbed run, bit for bit. With
generations ahead the ages of tokens depend on the clock (docs/reference/methods.md), so that the receipt is checked
instead. Another test fills the disk of such a run. Both tests are run before a release; in CI, `test_run.py` fills
the disk of a run without a server.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import VLLM
from forked import finish
from long_schedule import TARGETS, TRANSPORTS, Stack, run_disturbed, schedule, table
from safetensors.torch import load_file
from servers import KEY, Server

from lockstep.models.packaged import PACKAGED_MODEL
from lockstep.server.keys import KEY_VARIABLE
from lockstep.watch.receipt import check_receipt

pytestmark = VLLM

# Metrics that depend on the clock, or on which requests the engine computed in one batch.
LOOSE = ("time/", "push/", "step_time", "checked/", "parity/", "engine/", "sampling/", "train_")

# The scores differ within a group, and scoring takes long enough for a signal to interrupt it.
REWARDS = """
import time
def score(completion_ids, **_):
    time.sleep(0.1)
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


class Case(NamedTuple):
    """One long run.

    Attributes:
        model: the model of the run; None: a tiny one.
        ahead: generations ahead (`max_staleness`).
        rounds: number of rounds of 20 signals.
        steps: number of optimizer steps; more than the run has taken when the last signal is sent.
        stopped: seconds that a stopped process stays stopped.
        longest: the longest delay of a signal after the begin of a phase, in seconds.
    """

    model: str | None
    ahead: int
    rounds: int
    steps: int
    stopped: float
    longest: float

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "dataset_name": "arithmetic",
            "train_size": 64,
            "vllm_server_timeout": 300,
            "vllm_importance_sampling_correction": self.ahead > 0,
            "max_staleness": self.ahead,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 16,
            "max_steps": self.steps,
            "learning_rate": "1e-4",
            "logging_steps": 1,
            "save_steps": 1,
            "save_total_limit": 2,
            "bf16": False,
        }


def curve(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(LOOSE)} for line in lines]


def final_weights(run: Path, steps: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoint-{steps}" / "model.safetensors")


@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(None, 0, 1, 50, 1.0, 0.03), id="tiny, in turns", marks=pytest.mark.release),
        pytest.param(
            Case(None, 2, 1, 50, 1.0, 0.03), id="tiny, generations ahead", marks=pytest.mark.release
        ),
        pytest.param(
            Case(PACKAGED_MODEL, 0, 2, 50, 3.0, 0.5), id="real, in turns", marks=pytest.mark.release
        ),
        pytest.param(
            Case(PACKAGED_MODEL, 2, 2, 50, 3.0, 0.5), id="real, generations ahead", marks=pytest.mark.release
        ),
    ],
)
def test_a_run_under_signals_to_every_process_ends_as_if_nothing_had_happened(
    case: Case, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    events, began = schedule(case.rounds, seed=case.ahead), time.monotonic()
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    fields = {**case.fields, "reward_funcs": f"{rewards}:score"}
    with ExitStack() as held:
        stack = Stack(case.model or untied_dir, tmp_path, fields, 2, case.stopped, held)
        stack.server.await_health()
        if not case.ahead:
            assert stack.program("whole", TRANSPORTS[0]).wait(3600) == 0, (
                tmp_path / "whole-0.log"
            ).read_text()
        undisturbed = time.monotonic() - began
        sent = run_disturbed(stack, "disturbed", events, case.ahead, case.longest)
    print(
        f"\n{table(sent)}\nstarts: {dict(stack.starts)}; {undisturbed:.0f} s before, "
        f"{time.monotonic() - began:.0f} s in all"
    )
    # Nothing but the schedule ended a trainer or a supervisor, and every target met both signals under both transports.
    killed = Counter(one.who for one in sent if one.sign == "SIGKILL")
    assert stack.starts == {
        "trainer": 1 + killed["trainer"] + killed["rank"],
        "supervisor": 1 + killed["supervisor"],
    }
    met = {(one.who, one.sign, one.transport) for one in sent}
    assert met == {
        (who, sign, way) for who in TARGETS for sign in ("SIGKILL", "SIGSTOP") for way in TRANSPORTS
    }
    check_receipt(tmp_path / "disturbed" / "receipt.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "disturbed" / "receipt.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, case.steps + 1))
    parts = ("checked_tokens", "stale_tokens", "aside_tokens")
    assert all(line["sampled_tokens"] == sum(line.get(part, 0) for part in parts) for line in steps)
    if case.ahead:
        return
    expected, found = (final_weights(tmp_path / run, case.steps) for run in ("whole", "disturbed"))
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert curve(tmp_path / "disturbed") == curve(tmp_path / "whole")
    # Where all rewards of a group agree, a step has no gradient of its own, and Adam still moves the weights.
    learned = sum(line["grad_norm"] > 0 for line in curve(tmp_path / "whole") if "loss" in line)
    assert learned >= 10, f"only {learned} steps learned something"


FULL = """
import itertools, resource
_calls = itertools.count()
def score(completion_ids, **_):
    if next(_calls) == 3:
        # From here on no file can be larger: as on a disk that is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    return [float(sum(ids) % 7) for ids in completion_ids]
"""


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_disk_that_fills_in_server_mode_is_one_line_and_the_run_goes_on_to_the_same_weights(
    server: Server, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    rewards = tmp_path / "rewards.py"
    rewards.write_text(FULL)

    def run(name: str, **more: str) -> Any:
        fields = {
            "model_name_or_path": untied_dir, "dataset_name": "arithmetic", "train_size": "32", "bf16": "false",
            "reward_funcs": f"{rewards}:score", "output_dir": str(tmp_path / name), "vllm_server_base_url": server.url,
            "per_device_train_batch_size": "8", "num_generations": "4", "max_completion_length": "8", "max_steps": "4",
            "save_steps": "2", "logging_steps": "1", "learning_rate": "1e-3",
            "vllm_importance_sampling_correction": "false", "vllm_weight_transport": "gloo",
            # The function counts its calls.
            "recheck_rewards": "false",
            **more,
        }  # fmt: skip
        words = [word for key, value in fields.items() for word in (f"--{key}", value)]
        return finish([sys.executable, "-m", "lockstep.cli.main", "grpo", *words], timeout=600)

    failed = run("full")
    assert failed.returncode == 1, failed.stderr
    (line,) = failed.stderr.strip().splitlines()
    assert line.startswith("lockstep: checkpoint-4 could not be written")
    rewards.write_text(FULL.replace("== 3", "== -1"))
    for name in ("full", "whole"):
        # The reward that fills the disk is another one.
        done = run(name, resume_with_changes="true")
        assert done.returncode == 0, done.stderr
    ends = [final_weights(tmp_path / name, 4) for name in ("full", "whole")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
