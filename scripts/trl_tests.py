"""Runs TRL's public tests against TRL's trainers and against ours, and prints both columns.

    make trl-tests ARGS="PATH_TO_TRL_CHECKOUT"                                     (GRPO, RLOO, Online DPO)
    make trl-tests ARGS="PATH_TO_TRL_CHECKOUT -k 'tools or environment or rollout'"

Tests on images need torchvision (docs/reference/migrating-from-trl.md).

The program runs the checkout's code. Give it a release or a commit of TRL's own repository, not a stranger's pull request. The
checkout is the user's; nothing of it is kept here. Its tests name models and data sets on a hub. Nothing is downloaded: the
program writes models of the same architectures, with a tokenizer of its own, into a folder that plays the hub's cache
(`trl_stand_ins/hub.py`). A pytest plugin (`trl_stand_ins/plugin.py`) gives the data sets, and puts our trainers in TRL's places for
the second column. Each column runs in a process of its own. The exit code is 1 if a test passes with TRL and fails with ours.

Differences from a run on TRL's own machines, for both columns: weights, data and most of the vocabulary are made up, and runs end
after `--steps` optimizer steps if the test does not say how long they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ("tests/test_grpo_trainer.py", "tests/test_rloo_trainer.py", "tests/experimental/test_online_dpo_trainer.py")
# Tests that read what is private in TRL's trainers, by a part of their names. Ours have other insides.
PRIVATE = {
    "test_generate_single_turn": "calls the private method _generate_single_turn",
    "test_tool_completion_idx_injection": "reads the private attribute _tools_accept_completion_idx",
    "test_tools_accessible_per_sample": "reads the private attribute _sync_tool_dicts",
    "test_signature_columns_include_tools": "reads the private attribute _signature_columns",
    "test_get_off_policy_mask": "calls a part of TRL's loss, get_off_policy_mask",
    "reward_func_with_log_extra": "reads the private attribute _logs",
    "test_compute_entropy": "calls get_high_entropy_mask on an object that is not a trainer",
}
# Variables of this process that the tests get too.
KEPT = ("PATH", "LANG", "TMPDIR", "LD_PRELOAD", "OMP_NUM_THREADS")
Results = dict[str, tuple[str, str]]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("checkout", type=Path, help="a folder with TRL's tests/")
    words.add_argument("--files", nargs="*", help=f"test files, relative to the checkout; default: {', '.join(FILES)}")
    words.add_argument("-k", dest="chosen", default="", help="pytest's expression: run only these tests")
    words.add_argument("--steps", type=int, default=3, help="optimizer steps of a run that names no number (3)")
    words.add_argument("--write", type=Path, help="write both columns to this file, as JSON")
    asked = words.parse_args()
    files = asked.files or [name for name in FILES if (asked.checkout / name).exists()]
    missing = [name for name in files if not (asked.checkout / name).exists()]
    if missing or not files:
        words.error(f"{asked.checkout} has no {', '.join(missing or FILES)}")
    with tempfile.TemporaryDirectory() as folder:
        from trl_stand_ins.hub import build_hub

        named = build_hub(Path(folder), [asked.checkout / name for name in files])
        print(f"{len(named)} models made")
        columns = {who: run(who, asked, files, Path(folder)) for who in ("trl", "lockstep")}
    if asked.write:
        asked.write.write_text(json.dumps(columns, indent=1) + "\n")
    sys.exit(show(columns["trl"], columns["lockstep"]))


def run(who: str, asked: argparse.Namespace, files: list[str], folder: Path) -> Results:
    """Outcome and reason of every test, by its name.

    Raises:
        SystemExit: pytest wrote no results.
    """
    results = folder / f"{who}.json"
    here = Path(__file__).parent
    environment = {
        # A checkout is code of others: it gets no tokens and keys of the caller's environment.
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(folder),
        "HF_HOME": str(folder / "hub-home"),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_TESTS": json.dumps({"who": who, "steps": asked.steps, "results": str(results)}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "pytest", "-p", "trl_stand_ins.plugin", "-q", "--tb=short", "--no-header"]
    command += ["-p", "no:cacheprovider", "--rootdir", ".", *(["-k", asked.chosen] if asked.chosen else []), *files]
    log = folder / f"{who}.log"
    with log.open("w") as out:
        subprocess.run(command, cwd=asked.checkout, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if not results.exists():
        sys.exit(f"pytest did not run for {who}:\n{log.read_text()[-3000:]}")
    return {name: (outcome, reason) for name, (outcome, reason) in json.loads(results.read_text()).items()}


def show(trl: Results, ours: Results) -> int:
    """Print both columns, and every test that passes in one of them only. Returns the number of TRL's that fail here, at most 1."""
    print(f"\n{'test':<88} {'TRL':>8} {'ours':>8}")
    for name in sorted(trl | ours):
        (theirs, _), (own, _) = trl.get(name, ("-", "")), ours.get(name, ("-", ""))
        print(f"{name:<88} {theirs:>8} {own:>8}")
    counted = {name for name, (outcome, _) in trl.items() if outcome == "passed"}
    private = {name: why for name in counted for part, why in PRIVATE.items() if part in name}
    counted -= private.keys()
    passed = {name for name in counted if ours.get(name, ("-", ""))[0] == "passed"}
    print(
        f"\nTRL passes {len(counted) + len(private)} of {len(trl)}. {len(private)} of these read what is private in TRL:"
    )
    for name, why in sorted(private.items()):
        print(f"  {name}: {why}")
    print(f"Of the other {len(counted)}, ours pass {len(passed)}. The differences:")
    for name in sorted(counted - passed):
        print(f"  {name}: {ours.get(name, ('-', 'not run'))[1]}")
    print("Of the tests that TRL itself does not pass here:")
    for name, (outcome, reason) in sorted(trl.items()):
        if outcome == "failed":
            print(f"  {name}: {reason}")
    for name in sorted(
        name for name, (outcome, _) in ours.items() if outcome == "passed" and trl.get(name, ("-", ""))[0] == "failed"
    ):
        print(f"  {name}: passes with ours only")
    return int(passed != counted)


if __name__ == "__main__":
    main()
