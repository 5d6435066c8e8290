#!/usr/bin/env python3
"""Writes `requirements.lock`: every package of this environment, with its version and the SHA-256 of the file that pip installs.

    .venv/bin/python scripts/lock.py

Run it in an environment that has passed `.ci/run`, after a change of pyproject.toml. The hashes are those of this platform's files
(Linux on x86-64, Python 3.11, vLLM's CPU build). `scripts/make_env.py` installs from it where it fits. pip finds the files and
their hashes. The lock names no index, so that it can be used with any.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = """\
# Made by scripts/lock.py on Linux x86-64 with Python 3.11. Install: pip install --require-hashes --no-deps -r requirements.lock
"""


def pip(*arguments: str) -> str:
    """The output of this environment's pip."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def locked(report: dict) -> list[str]:
    """The lines of the lock for pip's report.

    Raises:
        KeyError: pip knows no hash of a file.
    """
    lines = []
    for item in report["install"]:
        hashes = item["download_info"]["archive_info"]["hashes"]
        lines.append(
            f"{item['metadata']['name'].lower()}=={item['metadata']['version']} --hash=sha256:{hashes['sha256']}\n"
        )
    return sorted(lines)


def main() -> int:
    """Write the lock."""
    frozen = pip("freeze", "--exclude-editable", "--all", "--exclude", "pip")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "frozen.txt"
        wanted.write_text(frozen)
        report = pip(
            "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", "-r", str(wanted)
        )
    lines = locked(json.loads(report))
    LOCK.write_text(HEAD + "".join(lines))
    print(f"{LOCK.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
