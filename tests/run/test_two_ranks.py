"""Training on two ranks (gloo) equals training on one rank, for every method.

Errors reach both ranks, and no rank hangs.

Both ranks do all the work in one pair of processes (`two_ranks.py`), because starting a process takes longer than
most of the work. CI leaves out the cases in which the ranks add up the same sums as in another case; they are run
before a release.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import CASES, OF_ONE_RANK, PROMPTS, difference
from caller import save_caller
from forked import Program, finish
from model_families import save_family
from servers import free_port
from two_ranks import ALONE, CLIPPED, WORK

from lockstep.run.files.checkpoints import last_checkpoint
from lockstep.watch.receipt import check_chain

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "two_ranks.py"
LIMIT = 400
Found = Callable[[str], list[dict[str, Any]]]
Alone = Callable[[str], dict[str, Any]]
COMPARED = ("methods", "experts", "clipped", "evaluated", "acting")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(untied_dir: str, folder: Path) -> Found:
    """The results of both ranks, by piece of work.

    A hang is a failure. The work in which a rank is killed comes last.
    """
    assert list(WORK)[-1] == "reward:killed"
    save_caller(folder / "caller")
    save_family("mixtral", folder / "experts")
    run_ranks([sys.executable, str(SCRIPT)], [untied_dir, str(folder), *WORK], folder, codes=[0, 9])

    @functools.cache
    def of(name: str) -> list[dict[str, Any]]:
        files = [folder / f"{name.replace(':', '-')}.{rank}.pt" for rank in (0, 1)]
        return [torch.load(file) for file in files if file.exists()]

    return of


@pytest.fixture(scope="module")
def alone(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The results of a single rank.

    It runs in a process of the same kind, because log-probs depend on threads and libraries.
    """
    folder = tmp_path_factory.mktemp("alone")
    save_caller(folder / "caller")
    save_family("mixtral", folder / "experts")
    run_ranks(
        [sys.executable, str(SCRIPT)], [untied_dir, str(folder), *COMPARED], folder, [0], names=(ALONE,)
    )
    return functools.cache(lambda name: torch.load(folder / f"{name}.{ALONE}.pt"))


def run_ranks(
    command: list[str],
    arguments: list[str],
    folder: Path,
    codes: list[int],
    names: Sequence[str] = ("0", "1"),
) -> None:
    """Start the ranks of a script that takes RANK, PORT and further arguments, and wait for them."""
    port, ranks = str(free_port()), []
    for rank in names:
        with (folder / f"{rank}.log").open("w") as log:
            words = [*command, rank, port, *arguments]
            ranks.append(Program(words, stdout=log, stderr=log))
    deadline = time.monotonic() + LIMIT
    try:
        for process in ranks:
            process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        pytest.fail(f"the ranks hung:\n{_logs(folder)}")
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == codes, _logs(folder)


def _logs(folder: Path) -> str:
    return "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log")))


def same_logs(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Assert that logs are equal except for times and the last digits of float32."""
    for mine, theirs in zip(one, other, strict=True):
        # Each rank counts the alarms of its own calls.
        mine, theirs = ({k: v for k, v in log.items() if k != "alarms"} for log in (mine, theirs))
        assert mine.keys() == theirs.keys()
        for name in mine:
            if not name.startswith(("time/", "push/", "step_time", "train_", "checked/")):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("case", [case for case in CASES if case not in OF_ONE_RANK])
def test_two_ranks_take_the_steps_of_one_and_log_them_alike(alone: Alone, found: Found, case: str) -> None:
    check_steps(alone("methods")[case], [rank[case] for rank in found("methods")])


def test_the_auxiliary_loss_of_experts_is_that_of_both_ranks_together(alone: Alone, found: Found) -> None:
    (one,), both = alone("experts").values(), [rank["grpo-grpo"] for rank in found("experts")]
    check_steps(one, both)
    assert all(log["aux_loss"] > 1 for log in one["logs"] if "loss" in log)


@pytest.mark.release
def test_the_other_cases_take_the_steps_of_one_rank_too(untied_dir: str, tmp_path: Path) -> None:
    command, arguments = [sys.executable, str(SCRIPT)], [untied_dir, str(tmp_path), "other cases"]
    run_ranks(command, arguments, tmp_path, [0], names=(ALONE,))
    run_ranks(command, arguments, tmp_path, [0, 0])
    one, *both = (torch.load(tmp_path / f"other cases.{rank}.pt") for rank in (ALONE, 0, 1))
    for case in OF_ONE_RANK:
        check_steps(one[case], [rank[case] for rank in both])


def check_steps(one: dict[str, Any], both: list[dict[str, Any]]) -> None:
    """Assert that both ranks took the steps of one, and logged them alike."""
    for own in both:
        for expected, got in zip(one["gradients"], own["gradients"], strict=True):
            assert difference(expected, got) <= 1e-6
        assert difference(one["weights"], own["weights"]) <= 1e-6
        assert own["tokens"] == one["tokens"]
        same_logs(one["logs"], own["logs"])
        assert own["logs"][0]["parity/checked_tokens"] > 0


def test_both_ranks_hold_the_very_same_weights_and_no_wrapper_averages_gradients(found: Found) -> None:
    one, other = found("methods")
    for case in one:
        assert all(
            torch.equal(tensor, other[case]["weights"][name]) for name, tensor in one[case]["weights"].items()
        )
        assert not one[case]["wrapped"]


def test_the_norm_that_is_clipped_is_that_of_all_ranks(alone: Alone, found: Found) -> None:
    one = alone("clipped")
    for own in found("clipped"):
        same_logs(one["logs"], own["logs"])
        assert own["logs"][0]["grad_norm"] > CLIPPED["max_grad_norm"]
        assert difference(one["weights"], own["weights"]) <= 1e-6


def test_one_rank_writes_the_receipt_and_every_token_of_both_is_in_it(found: Found, folder: Path) -> None:
    logs = found("methods")[0]["dpo-sigmoid"]["logs"]
    entries = check_entries(folder / "dpo-sigmoid")
    assert [entry["kind"] for entry in entries] == ["start", "step", "step"]
    for entry, log in zip(entries[1:], logs, strict=False):
        assert entry["checked_tokens"] == entry["sampled_tokens"] == log["parity/checked_tokens"]
        assert log["parity/checked_tokens"] == round(16 * log["completions/mean_length"])


def test_what_was_put_into_completions_is_counted_on_no_rank(found: Found, folder: Path) -> None:
    for own in found("methods"):
        log = own["interrupted"]["logs"][0]
        assert 0 < log["completions/interrupted"] < 1
        (entry,) = [e for e in check_entries(folder / "interrupted") if e["kind"] == "step"]
        assert entry["checked_tokens"] == entry["sampled_tokens"] == log["parity/checked_tokens"]
        assert log["parity/checked_tokens"] == round(8 * log["completions/mean_length"])


def check_entries(run: Path) -> list[dict[str, Any]]:
    lines = (run / "receipt.jsonl").read_text().splitlines()
    check_chain(lines)
    return [json.loads(line) for line in lines]


def test_a_run_goes_on_from_its_checkpoint_on_two_ranks_as_if_it_had_not_stopped(
    found: Found, folder: Path
) -> None:
    one, other = found("resumed")
    for name, tensor in one["whole"].items():
        assert torch.equal(tensor, one["resumed"][name]), name
        assert torch.equal(tensor, other["resumed"][name]), name
    assert [entry["step"] for entry in check_entries(folder / "resumed")][-1] >= 3
    assert (folder / "whole" / "checkpoint-2" / "rng_state_1.pth").exists()


def test_what_a_callback_changes_on_both_ranks_is_taken_and_written_once(found: Found, folder: Path) -> None:
    assert [own["decay"] for own in found("optimizer:callbacks")] == [[10.0] * 3] * 2
    (entry,) = [e for e in check_entries(folder / "optimizer-callbacks") if e["kind"] == "optimizer"]
    assert [(c["group"], c["before"], c["after"]) for c in entry["changes"]] == [
        (i, 0.0, 10.0) for i in range(3)
    ]


def test_an_evaluation_is_the_same_on_both_ranks_and_on_one(alone: Alone, found: Found) -> None:
    for own in found("evaluated"):
        # The figures of the proof have the rounding of other packs.
        assert own["metrics"] == pytest.approx(alone("evaluated")["metrics"], abs=1e-5)
    # Only the rank with the engine writes the receipt, and digests what stands in it.
    inputs = ["data", "code", "settings", "model", "surroundings", "clock of chat templates"]
    assert [own["inputs"] for own in found("evaluated")] == [inputs, []]


def test_each_rollout_is_scored_once_and_all_ranks_know_the_scores(found: Found) -> None:
    one, other = found("rewards")
    # There are three groups of two completions, and the first rank scores two of the groups.
    assert [[len(call) for call in own["evaluation"]] for own in (one, other)] == [[4], [2]]
    assert sorted(one["evaluation"][0] + other["evaluation"][0]) == sorted(PROMPTS["prompt"][:3] * 2)
    # A generation has four groups, and the trainer learns from it twice.
    assert [[len(call) for call in own["training"]] for own in (one, other)] == [[4], [4]]
    assert not set(one["training"][0]) & set(other["training"][0])
    for own in (one, other):
        assert own["extras"] == [0, 0, 0, 0, 1, 1]
        assert own["metrics"]["eval_rank"] == own["logs"][0]["rank"] == 0.5
    same_logs(one["logs"], other["logs"])


def test_each_pair_is_judged_once(found: Found) -> None:
    assert [own["seen"] for own in found("judged")] == [[2], [2]]
    assert [own["undecided"] for own in found("judged")] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["tools", "environments", "function"])
def test_rollouts_with_tools_are_the_same_on_both_ranks_and_on_one(
    alone: Alone, found: Found, kind: str
) -> None:
    one, (first, second) = alone("acting")[kind], [own[kind] for own in found("acting")]
    assert first["rollouts"] == second["rollouts"] == one["rollouts"]
    same_logs(first["logs"], second["logs"])
    # The gap itself is rounding, which differs with the packs.
    counted = ("loss", "grad_norm", "reward", "tools/", "extras/environments/", "completions/", "num_tokens")
    logs = [
        [{n: v for n, v in log.items() if n.startswith(counted)} for log in own["logs"]]
        for own in (first, one)
    ]
    same_logs(*logs)
    assert all(torch.equal(second["weights"][name], value) for name, value in first["weights"].items())
    # Environments are on one rank, and that rank scores all rollouts. Otherwise each rank scores its share.
    finished = sum(failed is None for *_, failed in one["rollouts"].values())
    if kind == "environments":
        assert second["scored"] == []
        assert first["scored"][-1] == one["scored"][-1] == finished
        assert any(failed is not None for *_, failed in one["rollouts"].values()) or finished == 16
    else:
        assert [first["scored"][-1], second["scored"][-1]] == [8, 8]


@pytest.mark.parametrize("kind", ["half", "nans"])
def test_a_share_without_a_score_is_no_error_while_the_other_has_some(found: Found, kind: str) -> None:
    for own in found(f"reward:{kind}"):
        assert own["steps"] == 1
        assert own["logs"][0]["rewards/unscored"] == 4


@pytest.mark.parametrize(
    ("work", "kind", "said"),
    [
        ("reward:nothing", "InputError", "scored any of the 8 completions, in 1 generations in a row"),
        (
            "reward:few",
            "InputError",
            "rank 0: reward function reward returned 1 scores for 2 completions (in a rehearsal",
        ),
        ("reward:fails", "InputError", "rank 1: reward function reward raised ZeroDivisionError: by design"),
        (
            "data:image",
            "InputError",
            "rank 1: the train dataset has a column 'image': images are not supported",
        ),
        ("data:parts", "InputError", "rank 1: prompt train/0: a message's content must be text"),
        ("data:fewer", "InputError", "rank 1 has other prompts than rank 0 (7 and 8 of them)"),
        ("data:order", "InputError", "rank 1 has other prompts than rank 0 (8 and 8 of them)"),
        ("data:none", "InputError", "rank 1: the train dataset is empty"),
        ("weights:policy", "ProofError", "at version 0 rank 1 holds other weights than rank 0"),
        ("weights:critic", "ProofError", "at version 0 rank 1 holds other weights than rank 0"),
        ("optimizer:middle", "ProofError", "proof 'optimizer' failed"),
        ("optimizer:middle", "ProofError", "is 10.0 and was 0.0"),
        (
            "optimizer:callback",
            "ProofError",
            "on rank 1 alone, callback Decays (on_step_begin) has changed weight_decay",
        ),
        ("optimizer:loaded", "ProofError", "changed since the checkpoint was loaded: exp_avg of"),
        ("breaks", "LockstepError", "rank 1: checkpoint-2 could not be written"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_the_same_error_on_both(
    found: Found, work: str, kind: str, said: str
) -> None:
    one, other = found(work)
    assert one["raised"] == other["raised"] == kind
    assert said in one["message"]
    assert one["message"] == other["message"]


@pytest.mark.parametrize(
    ("by", "proof", "step"),
    [("callback", "model_gradient", 2), ("other code", "hooks", 1)],
    ids=["callback", "other"],
)
def test_gradients_that_one_rank_reverses_later_stop_both(
    found: Found, by: str, proof: str, step: int
) -> None:
    one, other = found(f"reversed:{by}")
    assert one["raised"] == other["raised"] == "ProofError"
    assert f"proof {proof!r} failed" in one["message"]
    assert one["step"] == other["step"] == step


@pytest.mark.parametrize(("moment", "step"), [("first", 0), ("middle", 4)])
def test_a_backward_that_is_wrong_at_late_positions_of_one_rank_stops_both(
    found: Found, moment: str, step: int
) -> None:
    one, other = found(f"long:{moment}")
    assert one["raised"] == other["raised"] == "ProofError"
    assert one["message"] == other["message"]
    assert "proof 'model_gradient' failed" in one["message"]
    assert one["step"] == other["step"] == step


def test_a_forward_that_fails_on_one_rank_stops_the_other_before_the_step(found: Found) -> None:
    one, other = found("learn")
    assert one["raised"] == "LockstepError"
    assert "rank 1: RuntimeError: out of memory, by design" in one["message"]
    # The rank on which the error happened keeps its own error.
    assert (other["raised"], other["message"]) == ("RuntimeError", "out of memory, by design")


def test_a_checkpoint_that_one_rank_could_not_write_does_not_count(found: Found, folder: Path) -> None:
    assert found("breaks")
    assert last_checkpoint(folder / "breaks") is None


def test_a_rank_that_is_killed_is_missed_at_once(found: Found) -> None:
    (left,) = found("reward:killed")
    assert left["raised"] == "LockstepError"
    assert "waited at 'rewards' for every rank" in left["message"]


def test_the_rank_without_the_engine_prints_nothing_of_its_own(found: Found, folder: Path) -> None:
    assert found("methods")
    assert "engine: transformers" in (folder / "0.log").read_text()
    assert not any(word in (folder / "1.log").read_text() for word in ("engine:", "'loss'"))


def test_the_command_runs_on_two_ranks_and_leaves_and_says_everything_once(
    untied_dir: str, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(24))
    )
    (tmp_path / "rewards.py").write_text(
        "def size(completion_ids, **_):\n    return [float(ids[0] % 7) for ids in completion_ids]\n"
    )
    fields: dict[str, Any] = {
        "model_name_or_path": untied_dir,
        "dataset_name": tmp_path / "data.jsonl",
        "eval_size": 4,
    }
    fields |= {
        "reward_funcs": f"{tmp_path / 'rewards.py'}:size",
        "output_dir": tmp_path / "run",
        "use_vllm": "false",
    }
    fields |= {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "bf16": "false",
    }
    fields |= {
        "max_steps": 2,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
    }
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    words += ["-m", "lockstep.cli.main", "grpo"]
    words += [str(word) for name, value in fields.items() for word in (f"--{name}", value)]
    done = finish(words, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    for said in ("engine: transformers", "held-out reward", "report   "):
        assert done.stdout.count(said) == (3 if said == "held-out reward" else 1), done.stdout
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2]
    assert [entry["kind"] for entry in check_entries(tmp_path / "run")] == [
        "start",
        "evaluation",
        "step",
        "checkpoint",
        "step",
        "checkpoint",
    ]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2
    assert (tmp_path / "run" / "report.html").exists()
