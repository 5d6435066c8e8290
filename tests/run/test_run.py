"""Whole runs as a user starts them: the same again, interrupted, killed, and out of disk.

Real vLLM generates, with a tiny model. What decides is `metrics.jsonl`, which must be the same up to its times. A run
that is sent a signal, or that runs out of disk, has a process of its own; the others are calls of the command line in
this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_vllm
from datasets import Dataset
from forked import finish
from methods import timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.cli.main import main
from lockstep.watch.receipt import check_chain

STEPS = 8
REWARD = """
import os, resource, signal
calls = 0

def by_length(completion_ids, answer, **_):
    global calls
    calls += 1
    number, _, at = os.environ.get("TEST_SIGNAL_AT", "SIGINT:-1").partition(":")
    if calls == int(at):
        os.kill(os.getpid(), getattr(signal, number))
    if calls == int(os.environ.get("TEST_DISK_FULL_AT", "-1")):
        # No file may grow beyond this from here on, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    return [float(len(ids) % 5 + ids[0] % 3) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": f"what is {i} + {i}", "answer": str(2 * i)} for i in range(40)]
    Dataset.from_list(rows).to_json(folder / "data.jsonl")
    (folder / "rewards.py").write_text(REWARD)
    return folder


def command(home: Path, model: str, name: str, **fields: Any) -> list[str]:
    base: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": home / "data.jsonl",
        "reward_funcs": f"{home / 'rewards.py'}:by_length",
        "eval_size": 6,
        "num_generations_eval": 2,
        "output_dir": home / name,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "bf16": False,
        # The function counts its calls.
        "recheck_rewards": False,
    }
    if fields.get("eval_size") == 0:
        # It would have no effect, and a line would say so.
        del base["num_generations_eval"]
    words = [word for key, value in {**base, **fields}.items() for word in (f"--{key}", str(value))]
    return ["grpo", *words]


def in_a_process(words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return finish([sys.executable, "-m", "lockstep.cli.main", *words], timeout=600, env={**os.environ, **env})


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [timeless(line) for line in lines]


def steps(folder: Path) -> list[int]:
    """Steps whose loss was logged."""
    return [line["step"] for line in curve(folder) if "loss" in line]


@pytest.fixture(scope="module")
def uninterrupted(home: Path, untied_dir: str) -> Path:
    assert main(command(home, untied_dir, "whole")) == 0
    return home / "whole"


@pytest.mark.vllm
@needs_vllm
class TestRuns:
    def test_a_run_leaves_what_it_promises(self, uninterrupted: Path) -> None:
        summary = json.loads((uninterrupted / "summary.json").read_text())
        assert summary["steps"] == STEPS
        assert set(summary["time"]) == {
            "generate",
            "rewards",
            "reference",
            "forward_backward",
            "optimizer",
            "sync",
            "verify",
        }
        assert {"eval_reward_before", "eval_reward_after", "wall_s", "tokens_per_s"} <= summary.keys()
        assert summary["eval_samples"] == 12
        parity = summary["parity"]
        assert 0 < parity["mean_abs_gap"] < parity["max_abs_gap"] < 1e-3
        logs = [line for line in curve(uninterrupted) if "loss" in line]
        # There are 8 completions per step, and all of their tokens are checked.
        sampled = round(sum(8 * line["completions/mean_length"] for line in logs))
        assert parity["checked_tokens"] == sampled == sum(line["parity/checked_tokens"] for line in logs)
        assert parity["failed"] == 0

        receipt = (uninterrupted / "receipt.jsonl").read_text().splitlines()
        check_chain(receipt)
        steps = [entry for entry in map(json.loads, receipt) if entry["kind"] == "step"]
        assert [entry["version"] for entry in steps] == list(range(STEPS))

        page = (uninterrupted / "report.html").read_text()
        for words in (
            "All proofs passed; finished after 8 steps",
            "Held-out rollouts",
            "Rollouts through training",
        ):
            assert words in page
        assert len(list((uninterrupted / "rollouts").iterdir())) == STEPS
        last = uninterrupted / f"checkpoint-{STEPS}"
        assert AutoModelForCausalLM.from_pretrained(last).num_parameters() > 0
        assert AutoTokenizer.from_pretrained(last).eos_token == "<|end|>"

    def test_interrupted_and_then_killed_it_goes_on_each_time_as_if_nothing_had_been(
        self, home: Path, untied_dir: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words, folder = command(home, untied_dir, "stopped"), home / "stopped"
        # Calls of the reward function: the rehearsal, the evaluation, then one per step.
        stopped = in_a_process(words, TEST_SIGNAL_AT="SIGINT:5")
        assert stopped.returncode == 130, stopped.stdout + stopped.stderr
        assert "the same command goes on from checkpoint-3" in stopped.stderr
        assert not (folder / "summary.json").exists()
        assert steps(folder) == [1, 2, 3]

        # It continues with step 4, and its third step is not finished.
        killed = in_a_process(words, TEST_SIGNAL_AT="SIGKILL:4")
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        assert "going on from" in killed.stdout
        assert steps(folder)[-1] in range(5, STEPS)

        assert main(words) == 0
        assert "going on from" in capsys.readouterr().out
        # The steps of three processes are those of one.
        assert curve(folder) == curve(uninterrupted)
        check_chain((folder / "receipt.jsonl").read_text().splitlines())


def test_another_seed_gives_another_run_and_the_same_seed_the_same(home: Path, untied_dir: str) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        assert main(command(home, untied_dir, name, use_vllm=False, max_steps=2, eval_size=0, seed=seed)) == 0
    assert curve(home / "same") == curve(home / "one")
    assert curve(home / "other")[0] != curve(home / "one")[0]


def test_a_full_disk_is_one_error_and_keeps_the_last_good_checkpoint(home: Path, untied_dir: str) -> None:
    words = command(home, untied_dir, "full", use_vllm=False, max_steps=4, eval_size=0)
    # The first reward call is the rehearsal, and the fourth belongs to step 3: checkpoint-2 is complete, checkpoint-4
    # cannot be written.
    failed = in_a_process(words, TEST_DISK_FULL_AT="4")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    (line,) = failed.stderr.strip().splitlines()
    assert line.startswith("lockstep: checkpoint-4 could not be written")
    assert "checkpoint-2" in line
    assert not (home / "full" / "checkpoint-4").exists()
    assert main(words) == 0
    assert steps(home / "full") == [1, 2, 3, 4]


def test_a_run_that_only_lacks_its_last_evaluation_takes_no_further_step(
    home: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def words_with(secret: str) -> list[str]:
        tokens = {"hub_token": f"hub{secret}", "model_init_kwargs": json.dumps({"token": f"nested{secret}"})}
        name = f"https://me:{secret}@host/name"
        fields = {"use_vllm": False, "max_steps": 2, "report_to": "tensorboard", "run_name": name}
        return command(home, untied_dir, "nearly", **fields, **tokens)

    assert main(words_with("s3cretOne")) == 0
    whole = curve(home / "nearly")
    # The directory looks as if the run was killed between the last checkpoint and the summary.
    (home / "nearly" / "summary.json").unlink()
    # A token is no setting of a run: it goes on with another one.
    assert main(words_with("s3cretTwo")) == 0
    assert json.loads((home / "nearly" / "summary.json").read_text())["steps"] == 2
    assert curve(home / "nearly") == whole
    files = [path for path in (home / "nearly").rglob("*") if path.is_file()]
    assert {"training_args.bin", "run.json", "about.json", "receipt.jsonl", "report.html"} <= {
        path.name for path in files
    }
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    assert "s3cret" not in "".join(capfd.readouterr())


def test_several_updates_a_generation_run_through_the_command_line(home: Path, untied_dir: str) -> None:
    assert main(command(home, untied_dir, "twice", use_vllm=False, max_steps=4, num_iterations=2)) == 0
    summary = json.loads((home / "twice" / "summary.json").read_text())
    lines = [line for line in curve(home / "twice") if "completions/mean_length" in line and "loss" in line]
    # There are two generations; the trainer learns from each twice, and each counts once.
    assert summary["parity"]["checked_tokens"] == round(
        sum(8 * line["completions/mean_length"] for line in lines)
    )


def test_without_vllm_the_same_command_runs_and_says_so(
    home: Path, untied_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(home, untied_dir, "plain", use_vllm=False, max_steps=1)) == 0
    assert "engine: transformers" in capsys.readouterr().out
    assert json.loads((home / "plain" / "summary.json").read_text())["parity"]["failed"] == 0


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"dataset_name": "/no/such.jsonl"}, 2, "data file /no/such.jsonl does not exist"),
        ({"model_name_or_path": "/no/such/model"}, 2, "model directory /no/such/model does not exist"),
        ({"reward_funcs": "/no/such.py:f"}, 2, "/no/such.py does not exist"),
        ({"max_completion_length": 600}, 2, "lower max_completion_length"),
        ({"eval_size": 40}, 2, "cannot be held out"),
        ({"eval_size": 0, "eval_strategy": "steps"}, 2, "eval"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    home: Path,
    untied_dir: str,
    fields: dict[str, Any],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(home, untied_dir, "bad", use_vllm=False, **fields)) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lockstep: ")
    assert message in line
