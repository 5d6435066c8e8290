"""Runs TRL's public tests against TRL's trainers and against ours, and prints both columns.

    make trl-tests ARGS="PATH_TO_TRL_CHECKOUT"                                     (GRPO, RLOO, Online DPO)
    make trl-tests ARGS="PATH_TO_TRL_CHECKOUT -k 'tools or environment or rollout'"

The tests are the checkout's, and the package `trl` is the installed one in both columns: the program copies the tests
to a folder of its own and prints which `trl` they import. Tests on images need torchvision
(docs/reference/migrating-from-trl.md).

The program runs the checkout's code. Give it a release or a commit of TRL's own repository, not a stranger's pull
request. The checkout is the user's; nothing of it is kept here. Its tests name models and data sets on a hub. Nothing
is downloaded: the checkout's own programs make the models, with Qwen's vocabulary from the package `dashscope`, and
the data sets, in a folder that plays the hub's cache (`trl_stand_ins/hub.py`). A pytest plugin
(`trl_stand_ins/plugin.py`) puts our trainers in TRL's places for the second column. Each column runs in a process of
its own. The exit code is 1 if a test of the denominator fails with ours.

The denominator of a trainer is what TRL passes, less three kinds of tests, each printed by name:

- tests that patch `generate`, or that patch, call or read what is private in TRL's trainers.
  `trl_stand_ins/private.py` finds them in their source. Where a test patches `generate`, the second column replays
  its ids, and leaves out the proofs `samples` and `draws`, which would find that nobody drew them: so its outcome
  says little.
- tests of what Lockstep refuses by a decision (`DECIDED`).
- tests of picture families that Lockstep does not have (`FAMILIES`).

Differences from a run on TRL's own machines, for both columns: models of all families have Qwen's vocabulary, runs
are in fp32 without a GPU, and they end after `--steps` optimizer steps if the test does not say how long they are
(with `--steps 0` they do not; a test that counts the calls of a run has the whole run).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TRAINERS = {
    "GRPO": "tests/test_grpo_trainer.py",
    "RLOO": "tests/test_rloo_trainer.py",
    "Online DPO": "tests/experimental/test_online_dpo_trainer.py",
}
# What a test asks for that Lockstep refuses by a decision, by a part of the test's name.
DECIDED = {
    "test_trust_remote_code": "it runs code that comes with a model",
    "with_generation_kwargs": "it samples with beams; no log-prob belongs to the tokens that beams keep",
    "GptOss": "its attention has sinks, which exist only in transformers' eager attention; packs need SDPA",
}
# Families of models for images that Lockstep does not have.
FAMILIES = ("Gemma3", "Gemma4", "Idefics2", "Llava", "Qwen3_5")
REPLAYED = "where they patch generate, ours replays its ids, without the proofs samples and draws"
# Variables of this process that the tests get too.
KEPT = ("PATH", "LANG", "TMPDIR", "LD_PRELOAD", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """What became of a test: pytest's word, its error's first line, what of TRL's insides it uses, and its models."""

    outcome: str
    reason: str = ""
    private: str = ""
    models: str = ""


Results = dict[str, Outcome]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("checkout", type=Path, help="a folder with TRL's tests/ and scripts/")
    words.add_argument(
        "--files",
        nargs="*",
        help="test files, relative to the checkout, or tests in them (FILE::CLASS::TEST)",
    )
    words.add_argument("-k", dest="chosen", default="", help="pytest's expression: run only these tests")
    words.add_argument(
        "--steps", type=int, default=3, help="optimizer steps of a run that names no number (3)"
    )
    words.add_argument("--write", type=Path, help="write both columns to this file, as JSON")
    words.add_argument("--trl-column", type=Path, help="take TRL's column from this file, which --write made")
    words.add_argument(
        "--folder", type=Path, help="keep models and pytest's logs in this folder, and use its models"
    )
    asked = words.parse_args()
    files = asked.files or [name for name in TRAINERS.values() if (asked.checkout / name).exists()]
    missing = [name for name in files if not (asked.checkout / name.split("::")[0]).exists()]
    if missing or not files:
        words.error(f"{asked.checkout} has no {', '.join(missing or TRAINERS.values())}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).absolute()
        prepare(folder, asked.checkout, files)
        columns = {
            who: run(who, asked, files, folder)
            for who in ("trl", "lockstep")
            if who == "lockstep" or not asked.trl_column
        }
    if asked.trl_column:
        known = json.loads(asked.trl_column.read_text(encoding="utf-8"))["trl"]
        columns["trl"] = {
            name: Outcome(*given) for name, given in known.items() if name in columns["lockstep"]
        }
    if asked.write:
        plain = {
            who: {
                name: (given.outcome, given.reason, given.private, given.models)
                for name, given in column.items()
            }
            for who, column in columns.items()
        }
        asked.write.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    failures = [
        show(trainer, file, columns["trl"], columns["lockstep"]) for trainer, file in TRAINERS.items()
    ]
    sys.exit(int(any(failures)))


def prepare(folder: Path, checkout: Path, files: list[str]) -> None:
    """Make the models, copy the tests, and say what is measured."""
    from trl_stand_ins.hub import build_data, build_hub

    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    print(f"tests: {checkout} at commit {commit.stdout.strip() or 'unknown (no git repository)'}")
    copy_tests(checkout, folder / "checkout")
    if (folder / "hub-home").exists():
        print(f"models: those in {folder}")
        return
    made, missing = build_hub(folder, checkout, files)
    build_data(folder, checkout)
    print(
        f"models: {len(made)} made by the checkout's programs, all with Qwen's vocabulary; data: by its programs too"
    )
    for name, why in missing.items():
        print(f"  not made: {name}: {why}")


def copy_tests(checkout: Path, to: Path) -> None:
    """Copy the tests to where no `trl` is beside them. pytest puts their folder first on the path."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(checkout / "tests", to / "tests")
    shutil.copy(checkout / "pyproject.toml", to)


def run(who: str, asked: argparse.Namespace, files: list[str], folder: Path) -> Results:
    """Outcome of every test, by its name.

    Raises:
        SystemExit: pytest ran no test.
    """
    results = folder / f"{who}.json"
    results.unlink(missing_ok=True)
    here = Path(__file__).resolve().parent
    environment = {
        # A checkout is code of others: it gets no tokens and keys of the caller's environment.
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(folder),
        "HF_HOME": str(folder / "hub-home"),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TQDM_DISABLE": "1",
        # Tests with vLLM in the process: by default its cache takes a share of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_TESTS": json.dumps(
            {"who": who, "steps": asked.steps, "folder": str(folder), "results": str(results)}
        ),
        # The second folder has a module that every Python process imports: workers of a data loader need torchvision
        # too.
        "PYTHONPATH": os.pathsep.join(
            filter(
                None, [str(here), str(here / "trl_stand_ins" / "every_process"), os.environ.get("PYTHONPATH")]
            )
        ),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "trl_stand_ins.plugin",
        "-q",
        "--tb=short",
        "--no-header",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        *(["-k", asked.chosen] if asked.chosen else []),
        *files,
    ]
    log = folder / f"{who}.log"
    with log.open("w", encoding="utf-8") as out:
        subprocess.run(
            command,
            cwd=folder / "checkout",
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("measured: "):
            print(f"{who}: {line.removeprefix('measured: ')}")
    written = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    if not written:
        sys.exit(f"pytest ran no test for {who}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return {name: Outcome(*given) for name, given in written.items()}


def show(trainer: str, file: str, trl: Results, ours: Results) -> bool:
    """Print what became of a trainer's tests. Returns whether a test of the denominator fails with ours."""
    here = {name: given for name, given in trl.items() if name.startswith(file)}
    if not here:
        return False
    passed = {name for name, given in here.items() if given.outcome == "passed"}
    print(f"\n## {trainer}: TRL passes {len(passed)} of {len(here)}")
    private = {name: here[name].private for name in passed if here[name].private}
    decided = {
        name: why
        for name in passed - private.keys()
        for part, why in DECIDED.items()
        if part in name or part in here[name].models
    }
    families = {
        name: f"its family is {family}"
        for name in passed - private.keys() - decided.keys()
        for family in FAMILIES
        if f"tiny-{family}" in here[name].models
    }
    for title, apart in (
        (f"(a) not comparable: they patch or use TRL's insides ({REPLAYED})", private),
        ("(b) refused by a decision", decided),
        ("(c) picture families that are not here", families),
    ):
        print(f"\n{title}: {len(apart)}")
        for name, why in sorted(apart.items()):
            own = ours.get(name, Outcome("not run")).outcome
            print(f"  {name.removeprefix(file + '::')}: {why} (ours: {own})")
    counted = passed - private.keys() - decided.keys() - families.keys()
    same = {name for name in counted if ours.get(name, Outcome("not run")).outcome == "passed"}
    print(f"\nOf the other {len(counted)}, ours pass {len(same)} ({len(same) / max(1, len(counted)):.1%}):")
    for name in sorted(counted):
        given = ours.get(name, Outcome("not run"))
        mark = "  passed" if name in same else f"  {given.outcome.upper()}"
        print(f"{mark} {name.removeprefix(file + '::')}{'' if name in same else ': ' + given.reason}")
    print("\nTests that TRL itself does not pass here:")
    for name, given in sorted(here.items()):
        if given.outcome != "passed":
            own = ours.get(name, Outcome("not run")).outcome
            print(f"  {given.outcome} {name.removeprefix(file + '::')}: {given.reason} (ours: {own})")
    return same != counted


if __name__ == "__main__":
    main()
