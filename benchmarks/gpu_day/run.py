"""Run all GPU measurements on a borrowed machine that has no network and no vLLM, and print a table per measurement.

    make gpu-day-wheels                               (before, on a machine with a package registry)
    make gpu-day ARGS="broken --seconds 280"          (on the GPU machine: what is broken)
    make gpu-day ARGS="slow --seconds 300"            (what is slow)
    make gpu-day ARGS="exact --seconds 150"           (what is exact)
    make gpu-day ARGS="slow --only sdpa digests"      (two parts of a call)
    make gpu-day ARGS="broken --rehearse"             (tiny sizes on a CPU, to see that the code runs)

Each part is a function of `broken.py`, `slow.py`, `exact.py` or `parts.py`. It runs in a separate process with a time
limit: a part that fails or hangs loses only its own remaining rows. The parts of `broken` and of `exact` run beside
each other, because they measure no time. In the folder `runs/gpu_day`, `PART.jsonl` gets each row as soon as it is
measured, `gpu_day.json` and `gpu_day.md` are written again after each part, and `PART.log` has its output. Parts that
are not in this call keep their rows of an earlier call. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT, finding_this

WHEELS = ROOT / "build" / "gpu-day-wheels"
# The packages that the GPU machine lacks. It must have Python 3.12 on Linux x86-64, PyTorch with CUDA and Triton, and
# the packages that transformers and datasets need (numpy, pandas, pyarrow, tokenizers, huggingface_hub, accelerate,
# rich). Lockstep itself is imported from src/.
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
        size: index in `Sizes.tokens` for the part `learning`; the share of the part `runs`; the row of `faults` and
            `gaps`.
        file: the module with the function.
    """

    title: str
    function: str
    seconds: int
    columns: tuple[str, ...]
    size: int | None = None
    file: str = "parts"


_COST = ("seconds", "MiB")
_LEARNING = ("work", "dtype", "way", *_COST, "step seconds", "÷ lockstep")
_TOLD = ("what", "is", "passed")
_PROOFS = ("model", "dtype", "proof", "figure", "limit", "passed")
_FAULTS = ("dtype", "injected", "caught", "exit code", "what", "is", "passed")
BROKEN = {
    "machine": Part("The machine", "machine", 60, ("what", "is")),
    "interfaces": Part("What must be there", "interfaces", 120, _TOLD, file="broken"),
    "suite": Part(
        "The project's tests on this device", "suite", 270, ("what", "is", "frames"), file="broken"
    ),
    **{
        f"runs-{number}": Part(
            "Runs of three steps", "runs", 240, ("run", "gap", "loss", "device"), number, "broken"
        )
        for number in range(3)
    },
    "proofs": Part("lockstep verify", "proofs", 240, _PROOFS, file="broken"),
    **{
        f"faults-{dtype}": Part("lockstep verify --self-test", "faults", 260, _FAULTS, number, "broken")
        for number, dtype in enumerate(("fp32", "bf16"))
    },
    "waits": Part("Waits of the host in one step", "waits", 200, ("phase", "place", "waits"), file="broken"),
    "groups": Part("NCCL and FSDP2 with one rank", "groups", 200, _TOLD, file="broken"),
    "order": Part("Digests and streams", "order", 60, _TOLD, file="broken"),
}
_STEP = ("way", "work", "seconds", "step seconds", "GPU seconds", "launches", "MiB", "each", "phases")
SLOW = {
    "sdpa": Part(
        "Attention of one layer, forward and backward",
        "sdpa",
        90,
        ("pack", "way", "first pack", "ms of a new pack", "ms again", "ms of the plan", "launches"),
        file="slow",
    ),
    "digests": Part(
        "Digests of weights on the device", "digests", 40, ("way", "MB", "seconds", "GB/s"), file="slow"
    ),
    "timeline": Part("The learning half of a step of 0.5B", "timeline", 100, _STEP, file="slow"),
    "variants": Part(
        "FlexAttention's compiled variants",
        "variants",
        90,
        ("heads", "dtype", "seconds", "graphs", "fell back", "memory of a pack, MiB"),
        file="slow",
    ),
    "passes": Part(
        "Forward and backward of a group of completions in bf16 autocast; gradients against the reference",
        "passes",
        60,
        ("work", "way", "gradients", *_COST),
    ),
}
_GAPS = (
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
)
EXACT = {
    "memory": Part(
        "The memory that is said before a model is loaded, and what the device allocates",
        "memory",
        40,
        ("what", "dtype", "recomputed", "said, MiB", "allocated, MiB", "said ÷ allocated", "is"),
        file="exact",
    ),
    "repeats": Part("The same run twice", "repeats", 140, ("run", "is"), file="exact"),
    **{
        f"gaps-{dtype}": Part("Gaps of clean steps, and one fault", "gaps", 140, _GAPS, number, "exact")
        for number, dtype in enumerate(("bf16", "fp32", "tf32"))
    },
}
# What takes longer than a borrowed quarter of an hour.
MORE = {
    "attention": Part(
        "Attention of one layer, forward and backward, against SDPA in float32",
        "attention",
        240,
        ("pack", "tokens", "dtype", "way", "values", "gradients", *_COST),
    ),
    "chain": Part(
        "The same for one text without branches", "chain", 200, ("work", "way", "gradients", *_COST)
    ),
    "learning-1024": Part("The learning half of a step beside TRL's", "learning", 120, _LEARNING, 0),
    "learning-8192": Part("The same with longer completions", "learning", 200, _LEARNING, 1),
    "learning-32768": Part("The same with the longest completions", "learning", 400, _LEARNING, 2),
    "push": Part(
        "A push of weights on one GPU over CUDA IPC, from GPU to GPU over NCCL, and through main memory",
        "push",
        200,
        ("way", "what", "devices", "MB", "seconds", "GB/s", "digests"),
    ),
    "host": Part(
        "Host cost, microseconds of processor time per sampled token", "host", 150, ("work", "µs per token")
    ),
}
CALLS = {"broken": BROKEN, "slow": SLOW, "exact": EXACT, "more": MORE}
PARTS = {name: part for parts in CALLS.values() for name, part in parts.items()}
_WRITING = threading.Lock()
# Parts that run at a time.
_BESIDE = {"broken": 6, "exact": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=CALLS, nargs="?", default="broken")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=280, help="time limit of all parts together")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_day"))
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="folder of wheels that this machine needs"
    )
    parser.add_argument(
        "--collect-wheels", action="store_true", help="download them into that folder, and stop"
    )
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
                print(
                    f"the wheels of {args.wheels} do not fit this Python, so its own packages are used: {error}"
                )
        names = args.only or list(CALLS[args.call])
        if args.call in _BESIDE:
            # Parts that run beside each other share the processor.
            os.environ["OMP_NUM_THREADS"] = "2"
        with ThreadPoolExecutor(1 if args.rehearse else _BESIDE.get(args.call, 1)) as beside:
            ended = list(
                beside.map(
                    lambda name: run_apart(name, args.folder, site, end, rehearse=args.rehearse), names
                )
            )
    print(f"\nwritten to {args.folder}/gpu_day.md, gpu_day.json, and per part PART.jsonl and PART.log")
    return 0 if all(ended) else 1


def run_part(name: str, folder: Path, *, rehearse: bool) -> None:
    """Run a part in this process, and write each of its rows as soon as it is measured."""
    from benchmarks.gpu_day.measuring import FULL, REHEARSAL

    # A part may work in another directory.
    folder = folder.resolve()
    part, sizes = PARTS[name], REHEARSAL if rehearse else FULL
    module = importlib.import_module(f"benchmarks.gpu_day.{part.file}")
    function: Callable[..., Iterator[Row]] = getattr(module, part.function)
    for row in function(sizes) if part.size is None else function(sizes, _given(part, sizes)):
        write(folder, name, row)


def _given(part: Part, sizes: Any) -> int:
    assert part.size is not None
    return sizes.tokens[part.size] if part.function == "learning" else part.size


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
        status = _outcome(command, folder / f"{name}.log", _environment(site), limit)
        write(folder, name, {"status": status, "part seconds": time.monotonic() - start})
    with _WRITING:
        found = read(folder)
        (folder / "gpu_day.json").write_text(
            json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (folder / "gpu_day.md").write_text(
            "\n".join(table(own, found[own]) for own in PARTS if own in found), encoding="utf-8"
        )
        print(table(name, found[name]), flush=True)
    return found[name]["status"] == "done" and not any(is_failure(row) for row in found[name]["rows"])


def _outcome(command: Sequence[str], log: Path, environment: Mapping[str, str], limit: float) -> str:
    """Run a process until it ends or reaches its time limit. Returns how it ended."""
    with log.open("wb") as output:
        part = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = part.wait(limit)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
        finally:
            # The part may have started processes of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)
            part.wait()
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "done" if code == 0 else f"exit code {code}: {said[-1][:600] if said else 'no output'}"


def _environment(site: str) -> dict[str, str]:
    paths = [site, str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    # HF_HUB_OFFLINE: otherwise libraries would wait for a hub that cannot be reached.
    given = {
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    path = os.pathsep.join(path for path in paths if path)
    return finding_this({**os.environ, **given, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": path})


# ---- wheels ------------------------------------------------------------------------------------------------------


def collect(folder: Path) -> list[Path]:
    """Download the wheels of `CARRIED` that are not in the folder yet, and remove wheels of other versions."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for name in CARRIED:
        version = importlib.metadata.version(name)
        if not list(folder.glob(f"{name}-{version}-*.whl")):
            where = [word for platform in _PLATFORMS for word in ("--platform", platform)]
            what = [
                "--no-deps",
                "--only-binary",
                ":all:",
                "--implementation",
                "cp",
                "--python-version",
                _PYTHON,
            ]
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


# ---- rows --------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, row: Row) -> None:
    """Append a row of a part."""
    with _rows(folder, name).open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row, ensure_ascii=False) + "\n")


def forget(folder: Path, name: str) -> None:
    """Remove the rows of a part that an earlier call wrote."""
    _rows(folder, name).unlink(missing_ok=True)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Status, seconds and rows of each part."""
    found: dict[str, dict[str, Any]] = {}
    for name in PARTS:
        if not _rows(folder, name).exists():
            continue
        own = found[name] = {"status": "did not end", "part seconds": 0.0, "rows": []}
        for line in _rows(folder, name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "status" in row:
                own |= row
            else:
                own["rows"].append(row)
    return found


def _rows(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


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
    names = ("work", "pack", "way", "what", "run", "model", "dtype", "heads")
    lines += [f"\n{', '.join(str(row[n]) for n in names if n in row)}: {row['failed']}" for row in failed]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value).removeprefix("torch.").replace("\n", " ").replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
