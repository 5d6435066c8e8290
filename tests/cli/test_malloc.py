"""A command asks the C library for huge pages and to keep memory: once, in the same process id.

The user's setting has priority.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.process import kernel_setting, with_tunables

HUGE, KEEP = "glibc.malloc.hugetlb=1", "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
ASKED = f"{HUGE}:{KEEP}"
ASKING_KERNEL = "always [madvise] never\n"

CHILD = """
import os, re, sys
from pathlib import Path
from lockstep.cli import process as malloc
malloc._SETTING = Path(sys.argv[1])
malloc.start_anew_with_tunables()
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


@pytest.mark.skipif(
    "[madvise]" not in kernel_setting(), reason="this kernel gives huge pages to all, or to none"
)
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
    assert with_tunables({"A": "1"}, ASKING_KERNEL) == {"A": "1", "GLIBC_TUNABLES": ASKED}
    for own, added in (
        ("glibc.malloc.arena_max=2", ASKED),
        ("glibc.malloc.hugetlb=0", KEEP),
        (HUGE, KEEP),
        ("glibc.malloc.trim_threshold=1", HUGE),
        ("glibc.malloc.mmap_threshold=131072", HUGE),
    ):
        assert with_tunables({"GLIBC_TUNABLES": own}, ASKING_KERNEL) == {"GLIBC_TUNABLES": f"{own}:{added}"}
    assert with_tunables({"GLIBC_TUNABLES": ASKED}, ASKING_KERNEL) is None


def test_huge_pages_are_asked_for_where_the_kernel_gives_them_to_those_who_ask() -> None:
    for setting in ("[always] madvise never\n", "always madvise [never]\n"):
        assert with_tunables({}, setting) == {"GLIBC_TUNABLES": KEEP}
    assert with_tunables({}, "") is None


@pytest.mark.skipif(not kernel_setting(), reason="not Linux")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    code = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (20, 60):
        block = libc.malloc(size << 20)
        ctypes.memset(ctypes.c_void_p(block), 1, size << 20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(step(), step())
"""

    def faults(tunables: str) -> list[int]:
        given = {**os.environ, "GLIBC_TUNABLES": tunables}
        done = subprocess.run(
            [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()]

    pages = (60 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert min(faults("")) > pages // 2
    first, second = faults(KEEP)
    assert first > pages // 2
    assert second < 100


def test_commands_ask_when_they_are_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("lockstep.cli.main.start_anew_with_tunables", lambda: asked.append(True))
    # The real one would fork this test process.
    monkeypatch.setattr("lockstep.cli.main.split_in_two", lambda: None)
    # The real one would end this test process, which has threads of pytest's.
    monkeypatch.setattr("lockstep.cli.main.EndAtOnce.leave_threads", lambda ending: None)
    monkeypatch.setattr("lockstep.cli.serve.run", lambda words: 2)
    for words in ([], ["--help"], ["fly"], ["serve", "model"], ["grpo", "--no_such_field", "1"]):
        monkeypatch.setattr(sys, "argv", ["lockstep", *words])
        assert main() in (0, 2)
    assert asked == [True, True]
    assert main(["grpo", "--no_such_field", "1"]) == 2
    assert asked == [True, True]
