"""Verify one tiny random model of each family on vLLM, and print whether its proofs pass or why the family is refused.

    make families                              (36 families, half a minute each on two cores)
    make families ARGS="phi gpt_neox olmo2"    (some of them)

Each family gets a separate process, which makes the model (`tests/model_families.py`) and runs `lockstep verify` on
it, in float32 with vLLM in the same process. If the process dies, this is a row of the table too. The program prints
the table of docs/internals/models-and-tokens.md, and exits with 1 if a proof failed or a process died.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

PASSED, REFUSED, FAILED, DIED = "passes", "refused", "FAILS", "DIED"
_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one family.

    Attributes:
        implementation: the model that vLLM runs for this architecture: vLLM's own, or that of transformers through
            vLLM's backend.
        result: one of `PASSED`, `REFUSED`, `FAILED`, `DIED`.
        gap: the largest |g| of all proofs in float32, in nats; NaN if there is none.
        said: the error of the refusal, the proofs that failed, or how the process ended.
    """

    family: str
    implementation: str
    result: str
    gap: float
    said: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="default: all of tests/model_families.py")
    parser.add_argument(
        "--alone", action="store_true", help="verify one family in this process, and print JSON"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/families.json"))
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(asdict(verified(*args.families))))
        return 0
    from model_families import FAMILIES

    outcomes = []
    args.json.parent.mkdir(parents=True, exist_ok=True)
    print("| family | vLLM runs | `lockstep verify` | largest gap, fp32 |\n|---|---|---|---|")
    for name in args.families or FAMILIES:
        outcomes.append(run_in_process(name))
        print(row(outcomes[-1]), flush=True)
        args.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8"
        )
    return int(any(outcome.result in (FAILED, DIED) for outcome in outcomes))


def run_in_process(name: str) -> Outcome:
    """Verify a family in a separate process."""
    command = [sys.executable, "-m", "benchmarks.proofs.vllm_families", "--alone", name]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, "", DIED, float("nan"), f"no result within {_SECONDS} s")
    last = ended.stdout.strip().splitlines()[-1:] or [""]
    if ended.returncode == 0 and last[0].startswith("{"):
        return Outcome(**json.loads(last[0]))
    why = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
    return Outcome(name, "", DIED, float("nan"), f"exit code {ended.returncode}: {why}")


def verified(name: str) -> Outcome:
    """Make the tiny model of a family and run `lockstep verify` on it, in this process."""
    from model_families import save_family
    from tiny import CONTEXT

    from lockstep.cli.main import main as lockstep

    with tempfile.TemporaryDirectory() as folder:
        model, report, written = (
            save_family(name, Path(folder) / "model"),
            Path(folder) / "rows.json",
            StringIO(),
        )
        with redirect_stderr(written):
            # The length limit is given, because Bloom's config has none.
            arguments = ["--engine", "vllm", "--dtype", "float32", "--vllm_max_model_length", str(CONTEXT)]
            code = lockstep(["verify", "--model", model, *arguments, "--json", str(report)])
        rows = json.loads(report.read_text(encoding="utf-8"))["rows"] if report.is_file() else []
        implementation = _implementation(model)
    if code == 2:
        return Outcome(name, implementation, REFUSED, float("nan"), _sentence(written.getvalue()))
    failed = [row for row in rows if not row["passed"]]
    said = "; ".join(f"{row['proof']}: {row['figure']}" for row in failed)
    return Outcome(name, implementation, FAILED if failed else PASSED, _largest_gap(rows), said)


def _implementation(model: str) -> str:
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from lockstep.model_files import load_files

    (architecture,) = load_files(AutoConfig, model).architectures
    registered = getattr(ModelRegistry.models.get(architecture), "class_name", "Transformers")
    return "Transformers backend" if registered.startswith("Transformers") else "vLLM's own"


def _sentence(written: str) -> str:
    """The error of the command, without its prefix."""
    lines = [line for line in written.splitlines() if line.startswith("lockstep")]
    return lines[-1].partition(": ")[2] if lines else written[-300:]


def _largest_gap(rows: list[dict[str, Any]]) -> float:
    """The largest |g| of the rows in which both sides compute in float32."""
    gaps = [
        row["details"]["max"] for row in rows if "max" in row["details"] and "bfloat16" not in row["proof"]
    ]
    return max(map(float, gaps), default=float("nan"))


def row(outcome: Outcome) -> str:
    """An outcome as a row of the table."""
    result = f"{outcome.result}: {outcome.said}" if outcome.said else outcome.result
    gap = "" if outcome.gap != outcome.gap else f"{outcome.gap:.1e}"
    return f"| {outcome.family} | {outcome.implementation} | {result} | {gap} |"


if __name__ == "__main__":
    sys.exit(main())
