"""Read the facts of `tests/vllm_facts.py` from a vLLM that cannot be installed here, into a small file.

Run it with `make vllm-facts VERSION=0.33.0`. A release that has no build for CPUs yet has one for CUDA. pip downloads
its wheel (some 300 MiB), and only the Python files are read: nothing of it is installed, run or kept. The file holds
signatures, constants and names, no source.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from vllm_facts import Sources, facts, read  # noqa: E402

_PLATFORM = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:"]


def main() -> int:
    (version,) = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="lockstep-vllm-facts-") as folder:
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            *_PLATFORM,
            "--dest",
            folder,
            f"vllm=={version}",
        ]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if name.endswith(".py")])
        sources = Sources(Path(folder))
        found = {str(fact): read(sources, fact) for fact in facts()}
    target = ROOT / "tests" / f"vllm_facts_{version}.json"
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(
        f"{target.relative_to(ROOT)}: {len(found)} facts of vLLM {version}, "
        f"{sum(v is None for v in found.values())} not there"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
