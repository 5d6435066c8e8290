"""A command asks the C library for huge pages: once, in the same process id, and the user's own setting has priority."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.process.huge_pages import kernel_setting, with_huge_pages

ASKED = "glibc.malloc.hugetlb=1"
ASKING_KERNEL = "always [madvise] never\n"

CHILD = """
import os, re, sys
from pathlib import Path
from lockstep.cli.process import huge_pages
huge_pages._SETTING = Path(sys.argv[1])
huge_pages.start_anew_with_huge_pages()
block = bytearray(64 << 20)
for place in range(0, len(block), 4096):
    block[place] = 1
huge = re.search(r"AnonHugePages: *(\\d+)", Path("/proc/self/smaps_rollup").read_text())
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[2:], int(huge[1]) >> 10)
"""


def started(setting: Path, *words: str, **environment: str) -> tuple[int, list[str]]:
    """Run a process that restarts itself; return its first id and its final output."""
    given = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | environment
    command = [sys.executable, "-c", CHILD, str(setting), *words]
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=300)
    return process.pid, said.split()


def test_a_process_that_is_started_anew_keeps_its_id_and_its_arguments(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(ASKING_KERNEL)
    pid, said = started(setting, "one", "two")
    assert said[:4] == [str(pid), ASKED, "['one',", "'two']"]


@pytest.mark.skipif("[madvise]" not in kernel_setting(), reason="this kernel gives huge pages to all, or to none")
def test_large_memory_then_lies_in_huge_pages(tmp_path: Path) -> None:
    never = tmp_path / "enabled"
    never.write_text("always madvise [never]\n")
    asking = tmp_path / "asking"
    asking.write_text(ASKING_KERNEL)
    left_alone = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    for setting, given in ((never, {}), (tmp_path / "absent", {}), (asking, left_alone)):
        assert int(started(setting, **given)[1][-1]) < 8
    assert int(started(asking)[1][-1]) > 32


def test_a_process_that_was_started_by_other_words_is_left_alone(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(ASKING_KERNEL)
    code = "import sys; sys.argv = ['lockstep', 'grpo']\n" + CHILD.replace("sys.argv[1]", repr(str(setting)))
    given = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split()[1] == "None"


def test_what_the_user_has_said_stays() -> None:
    assert with_huge_pages({"A": "1"}, ASKING_KERNEL) == {"A": "1", "GLIBC_TUNABLES": ASKED}
    other = with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, ASKING_KERNEL)
    assert other == {"GLIBC_TUNABLES": f"glibc.malloc.arena_max=2:{ASKED}"}
    for tunables in ("glibc.malloc.hugetlb=0", ASKED):
        assert with_huge_pages({"GLIBC_TUNABLES": tunables}, ASKING_KERNEL) is None


@pytest.mark.parametrize("setting", ["[always] madvise never\n", "always madvise [never]\n", ""])
def test_nothing_is_started_anew_where_it_would_change_nothing(setting: str) -> None:
    assert with_huge_pages({}, setting) is None


def test_commands_ask_when_they_are_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("lockstep.cli.main.start_anew_with_huge_pages", lambda: asked.append(True))
    # The real one would fork this test process.
    monkeypatch.setattr("lockstep.cli.main.split_in_two", lambda: None)
    monkeypatch.setattr("lockstep.cli.serve.run", lambda words: 2)
    for words in ([], ["--help"], ["fly"], ["serve", "model"], ["grpo", "--no_such_field", "1"]):
        monkeypatch.setattr(sys, "argv", ["lockstep", *words])
        assert main() in (0, 2)
    assert asked == [True, True]
    assert main(["grpo", "--no_such_field", "1"]) == 2
    assert asked == [True, True]
