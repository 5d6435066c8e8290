"""Run all GPU measurements on a borrowed machine that has no network and no vLLM, and print a table per measurement.

    make gpu-day-wheels                                        (before, on a machine with a package registry)
    make gpu-day                                               (on the GPU machine: all parts)
    make gpu-day ARGS="--only attention verify --seconds 560"  (two parts, in at most 560 seconds)
    make gpu-day ARGS=--rehearse                               (tiny sizes on a CPU, to see that the code runs)

Each part is a function of `parts.py`. It runs in a separate process with a time limit: a part that fails or hangs loses
only its own remaining rows. In the folder `runs/gpu_day`, `rows.jsonl` gets each row as soon as it is measured, `gpu_day.json`
and `gpu_day.md` are written again after each part, and `log.txt` has the output of the parts. Parts that are not in this call
keep their rows of an earlier call. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT, finding_this

WHEELS = ROOT / "build" / "gpu-day-wheels"
# The packages that the GPU machine lacks. It must have Python 3.12 on Linux x86-64, PyTorch with CUDA and Triton, and the packages
# that transformers and datasets need (numpy, pandas, pyarrow, tokenizers, huggingface_hub, accelerate, rich). Lockstep itself is
# imported from src/.
CARRIED = ("transformers", "datasets", "dill", "multiprocess", "xxhash", "httpx", "msgspec", "peft", "trl")
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of the command.

    Attributes:
        function: name of the part's function in `parts.py`.
        seconds: time limit of the part.
        columns: columns of the table. The JSON file has all figures.
        size: index in `Sizes.tokens`, for the part `learning`.
    """

    title: str
    function: str
    seconds: int
    columns: tuple[str, ...]
    size: int | None = None


_COST = ("seconds", "MiB")
_LEARNING = ("work", "dtype", "way", *_COST, "step seconds", "÷ lockstep")
PARTS = {
    "machine": Part("The machine", "machine", 60, ("what", "is")),
    "attention": Part(
        "Attention of one layer, forward and backward, against SDPA in float32",
        "attention",
        240,
        ("pack", "tokens", "dtype", "way", "values", "gradients", *_COST),
    ),
    "passes": Part(
        "Forward and backward of a group of completions in bf16 autocast; gradients against the reference",
        "passes",
        300,
        ("work", "way", "gradients", *_COST),
    ),
    "chain": Part("The same for one text without branches", "chain", 200, ("work", "way", "gradients", *_COST)),
    "learning-1024": Part("The learning half of a step beside TRL's", "learning", 120, _LEARNING, 0),
    "learning-8192": Part("The same with longer completions", "learning", 200, _LEARNING, 1),
    "learning-32768": Part("The same with the longest completions", "learning", 400, _LEARNING, 2),
    "push": Part(
        "A push of weights from GPU to GPU over NCCL, and over gloo through main memory",
        "push",
        200,
        ("way", "what", "devices", "MB", "seconds", "GB/s", "digests"),
    ),
    "host": Part("Host cost, microseconds of processor time per sampled token", "host", 150, ("work", "µs per token")),
    "limits": Part(
        "Training with the transformers engine and all proofs: largest gaps, beside the limits of parity/tolerances.py",
        "limits",
        300,
        (
            "model",
            "dtype",
            "count",
            "tokens",
            "alarms",
            "mean_abs_gap",
            "k3",
            "max_abs_gap",
            "nearest",
            "tail",
            "stopped",
        ),
    ),
    "verify": Part("lockstep verify", "verify", 300, ("dtype", "proof", "figure", "limit", "passed")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=1700, help="time limit of all parts together")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_day"))
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels that this machine needs")
    parser.add_argument("--collect-wheels", action="store_true", help="download them into that folder, and stop")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.collect_wheels:
        for wheel in collect(args.wheels):
            print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.part:
        run_part(args.part, args.folder, rehearse=args.rehearse)
        return 0
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as site:
        if list(args.wheels.glob("*.whl")) and not args.rehearse:
            try:
                unpack(args.wheels, Path(site))
            except subprocess.SubprocessError as error:
                print(f"the wheels of {args.wheels} do not fit this Python, so its own packages are used: {error}")
        ended = [run_apart(name, args.folder, site, end, rehearse=args.rehearse) for name in args.only]
    print(f"\nwritten to {args.folder}/gpu_day.md, gpu_day.json, rows.jsonl, log.txt")
    return 0 if all(ended) else 1


def run_part(name: str, folder: Path, *, rehearse: bool) -> None:
    """Run a part in this process, and write each of its rows as soon as it is measured."""
    from benchmarks.gpu_day import parts
    from benchmarks.gpu_day.measuring import FULL, REHEARSAL

    # A part may work in another directory.
    folder = folder.resolve()
    part, sizes = PARTS[name], REHEARSAL if rehearse else FULL
    function: Callable[..., Iterator[Row]] = getattr(parts, part.function)
    for row in function(sizes) if part.size is None else function(sizes, sizes.tokens[part.size]):
        write(folder, name, row)


def run_apart(name: str, folder: Path, site: str, end: float, *, rehearse: bool) -> bool:
    """Run a part in a separate process, and print its table. Returns whether it succeeded.

    Args:
        site: a folder with packages that are used instead of this machine's packages.
        end: the time (of `time.monotonic`) at which all parts must have ended.
    """
    forget(folder, name)
    start = time.monotonic()
    limit = min(PARTS[name].seconds, end - start)
    command = [sys.executable, "-m", "benchmarks.gpu_day.run", "--part", name, "--folder", str(folder)]
    command += ["--rehearse"] if rehearse else []
    print(f"\n{name}: at most {max(limit, 0):.0f} s", flush=True)
    if limit < 10:
        write(folder, name, {"status": "not begun: no time was left"})
    else:
        status = _outcome(command, folder / "log.txt", _environment(site), limit)
        write(folder, name, {"status": status, "part seconds": time.monotonic() - start})
    found = read(folder)
    (folder / "gpu_day.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (folder / "gpu_day.md").write_text("\n".join(table(own, found[own]) for own in PARTS if own in found))
    print(table(name, found[name]), flush=True)
    return found[name]["status"] == "done" and not any(is_failure(row) for row in found[name]["rows"])


def _outcome(command: Sequence[str], log: Path, environment: Mapping[str, str], limit: float) -> str:
    """Run a process until it ends or reaches its time limit. Returns how it ended."""
    with log.open("ab") as output:
        began = output.tell()
        try:
            code = subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
    said = log.read_bytes()[began:].decode(errors="replace").strip().splitlines()
    return "done" if code == 0 else f"exit code {code}: {said[-1][:600] if said else 'no output'}"


def _environment(site: str) -> dict[str, str]:
    paths = [site, str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    # HF_HUB_OFFLINE: otherwise libraries would wait for a hub that cannot be reached.
    given = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    path = os.pathsep.join(path for path in paths if path)
    return finding_this({**os.environ, **given, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": path})


# ---- wheels ----------------------------------------------------------------------------------------------------------


def collect(folder: Path) -> list[Path]:
    """Download the wheels of `CARRIED` that are not in the folder yet, and remove wheels of other versions."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for name in CARRIED:
        version = importlib.metadata.version(name)
        if not list(folder.glob(f"{name}-{version}-*.whl")):
            where = [word for platform in _PLATFORMS for word in ("--platform", platform)]
            what = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", _PYTHON]
            _pip("download", "--dest", str(folder), *what, *where, f"{name}=={version}")
        kept += folder.glob(f"{name}-{version}-*.whl")
    for other in set(folder.glob("*.whl")) - set(kept):
        other.unlink()
    return kept


def unpack(folder: Path, site: Path) -> None:
    """Install the wheels of a folder into `site`, without network."""
    wheels = sorted(str(wheel) for wheel in folder.glob("*.whl"))
    _pip("install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site), *wheels)


def _pip(command: str, *arguments: str) -> None:
    line = [
        sys.executable,
        "-m",
        "pip",
        command,
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
        *arguments,
    ]
    subprocess.run(line, check=True, timeout=300)


# ---- rows -------------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, row: Row) -> None:
    """Append a row of a part."""
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps({"part": name, **row}, ensure_ascii=False) + "\n")


def forget(folder: Path, name: str) -> None:
    """Remove the rows of a part that an earlier call wrote."""
    rows = folder / "rows.jsonl"
    lines = rows.read_text().splitlines() if rows.exists() else []
    rows.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["part"] != name))


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Status, seconds and rows of each part."""
    found: dict[str, dict[str, Any]] = {}
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        own = found.setdefault(row.pop("part"), {"status": "did not end", "part seconds": 0.0, "rows": []})
        if "status" in row:
            own |= row
        else:
            own["rows"].append(row)
    return found


def is_failure(row: Row) -> bool:
    """Whether a row reports a failed measurement, a failed proof or an alarm."""
    return "failed" in row or row.get("passed") is False or bool(row.get("alarms"))


def table(name: str, found: dict[str, Any]) -> str:
    """A part as Markdown."""
    part = PARTS[name]
    lines = [f"\n### {name}: {part.title}\n", f"{found['status']}, {found['part seconds']:.0f} s\n"]
    columns = [column for column in part.columns if any(column in row for row in found["rows"])]
    if columns:
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(_shown(row.get(column)) for column in columns)} |" for row in found["rows"]]
    failed = [row for row in found["rows"] if "failed" in row]
    lines += [f"\n{row.get('work', row.get('pack', ''))}, {row['way']}: {row['failed']}" for row in failed]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value).removeprefix("torch.").replace("\n", " ").replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
