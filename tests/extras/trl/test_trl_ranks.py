"""Two trainer processes and one engine: each gets its own answers, both get errors, and no wait is endless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_vllm
from forked import Program
from servers import KEY, Server, free_port

from lockstep.server.keys import KEY_VARIABLE

Results = list[dict[str, Any]]
SCRIPT = Path(__file__).parent / "trl_two_ranks.py"


def run_ranks(model: str, folder: Path, *arguments: str, limit: float) -> Results:
    """Both ranks' results; a hang is a failure."""
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        with (folder / f"{rank}.log").open("w") as log:
            command = [
                sys.executable,
                str(SCRIPT),
                rank,
                port,
                model,
                str(folder / f"{rank}.json"),
                *arguments,
            ]
            ranks.append(Program(command, stdout=log, stderr=log, env={**os.environ, KEY_VARIABLE: KEY}))
    try:
        for process in ranks:
            process.wait(limit)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the ranks hung:\n{_logs(folder)}")
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], _logs(folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ("0", "1")]


def _logs(folder: Path) -> str:
    return "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in ("0", "1"))


@pytest.fixture(scope="module")
def results(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(untied_dir, tmp_path_factory.mktemp("ranks"), limit=400)


@pytest.fixture(scope="module")
def served(untied_dir: str, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same calls with a real server, after two steps of TRL's trainer."""
    pytest.importorskip("trl", reason="TRL is not installed here")
    return run_ranks(untied_dir, tmp_path_factory.mktemp("served"), server.url, limit=400)


# The number of prompts of each rank.
ASKED = {
    "uneven": [[[5, 6], [5, 6], [7]], [[8, 9]]],
    "none on the owner": [[], [[8, 9], [5, 6]]],
    "none on the other": [[[8, 9], [5, 6]], []],
    "none at all": [[], []],
    "engine lost once": [[[4, 5]], [[4, 5]]],
    "after all that": [[[5, 6]], [[5, 7]]],
    "after the tool loop": [[[5, 6]], [[5, 7]]],
}
SERVED = [pytest.mark.long, pytest.mark.vllm, needs_vllm]
# A real server is lost in tests/server.
ON_SERVER = [case for case in ASKED if case not in ("engine lost once", "after the tool loop")]
CALLS = [
    *(("results", case) for case in ASKED),
    *(pytest.param("served", case, marks=SERVED) for case in ON_SERVER),
]


@pytest.mark.parametrize(("engine", "case"), CALLS)
def test_each_rank_gets_the_answers_to_its_own_prompts(
    request: pytest.FixtureRequest, engine: str, case: str
) -> None:
    results, asked = request.getfixturevalue(engine), ASKED[case]
    for found, own in zip(results, asked, strict=True):
        assert found[case]["prompt_ids"] == own
        assert len(found[case]["completion_ids"]) == len(own)
        # A plain forward on the rank itself shows that the tokens, the prompt and the log-probs belong together.
        assert found[case]["worst"] < 1e-4
    sampled = [tuple(ids) for found in results for ids in found[case]["completion_ids"]]
    assert len(set(sampled)) == len(sampled)


def test_versions_are_the_same_on_both_ranks(results: Results) -> None:
    assert [found["sync"] for found in results] == [[None, 1]] * 2
    assert [found["uneven"]["version"] for found in results] == [1, 1]
    # There were four losses and one more. Each has one push, except the last of the four, where the work was abandoned.
    versions = [found["engine lost once"]["version"] for found in results]
    assert versions[0] == versions[1] > 1


@pytest.mark.parametrize(
    ("case", "kinds", "said"),
    [
        ("images on rank 1", ["InputError"] * 2, "rank 1: this model is shown no images"),
        ("proof fails", ["ProofError"] * 2, "rank 0: other ids"),
        ("engine breaks", ["ZeroDivisionError", "LockstepError"], "in the engine"),
        ("engine lost for good", ["LockstepError"] * 2, "rank 0: the engine was lost 4 times"),
        ("another call", ["LockstepError"] * 2, "rank 0 is at 'sync_weights' and rank 1 at 'generate'"),
        ("refused on rank 1", ["InputError"] * 2, "rank 1: logprobs=3"),
        pytest.param("colocated", ["InputError"] * 2, "lockstep serve", marks=needs_vllm),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(results: Results, case: str, kinds: list, said: str) -> None:
    assert [found[case]["raised"] for found in results] == kinds
    assert all(said in found[case]["message"] for found in results)
    if len(set(kinds)) == 1:
        assert results[0][case] == results[1][case]


def test_a_rank_that_does_not_come_is_named_within_the_limit(results: Results) -> None:
    assert results[0]["alone"]["raised"] == "LockstepError"
    assert "did not come within 2 s" in results[0]["alone"]["message"]
    assert "a loop over tools must not end earlier on some ranks" in results[0]["alone"]["message"]


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
def test_images_on_one_rank_are_refused_on_both_beside_a_real_server(served: Results) -> None:
    refused = [found["images on rank 1"] for found in served]
    assert refused[0] == refused[1]
    assert refused[0]["raised"] == "InputError"
    assert "rank 1: this model is shown no images" in refused[0]["message"]


def test_a_call_that_goes_on_after_a_completion_is_refused_before_it_waits(results: Results) -> None:
    for found in results:
        assert found["tool loop"]["raised"] == "InputError"
        assert "Use one rank, leave out tools and environment_factory, or use lockstep.GRPOTrainer" in str(
            found["tool loop"]
        )


def test_a_rank_that_calls_a_tool_alone_is_refused_and_the_other_rank_does_not_wait_on(
    tmp_path: Path,
) -> None:
    """Rank 0 is in a collective of TRL, whose own limit is half an hour."""
    pytest.importorskip("trl", reason="TRL is not installed here")
    waited, refused = run_ranks("unused", tmp_path, "tools", limit=300)
    assert refused["raised"] == "InputError"
    assert "as TRL's tool loop does" in refused["message"]
    assert waited["raised"] not in ("InputError", "LockstepError"), waited
    assert "onnection" in waited["message"]


@pytest.mark.release
@pytest.mark.vllm
@needs_vllm
def test_trls_trainer_on_two_ranks_with_one_split_engine(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed here")
    # The fork server would fork the workers, and a fork of a trainer has the trainer's process group.
    monkeypatch.setattr(sys.modules[__name__], "Program", subprocess.Popen)
    check_two_steps(run_ranks(untied_dir, tmp_path, "split", limit=400))


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
def test_trls_trainer_on_two_ranks_with_a_real_server(served: Results) -> None:
    check_two_steps(served)


def check_two_steps(found: Results) -> None:
    for own in found:
        assert [call["version"] for call in own["calls"]] == [1, 2]
        for call in own["calls"]:
            assert call["prompt_ids"] == call["asked"]
            assert len(call["completion_ids"]) == 4
            assert call["worst"] < 1e-4
    # Both ranks took the same steps.
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["calls"][0]["completion_ids"] != found[1]["calls"][0]["completion_ids"]
