"""Messages of the library go through `logging`: to standard output, about settings to standard error, or elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = """
logging.getLogger("lockstep.run.loop").info("a note")
logging.getLogger("lockstep.run.loop").warning("a warning")
logging.getLogger("lockstep.config.checks").warning("a setting")
"""


def run(before: str, after: str = "") -> tuple[str, str]:
    code = f"import logging, sys\n{before}\nimport lockstep\n{after}\n{SAY}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout, done.stderr


def test_messages_are_lines_on_standard_output_and_those_about_settings_on_standard_error() -> None:
    assert run("") == ("lockstep: a note\nlockstep: a warning\n", "lockstep: a setting\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("logging.getLogger('lockstep').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('lockstep').setLevel(logging.CRITICAL)", ""),
        (
            "",
            "logging.getLogger('lockstep').handlers.clear(); logging.getLogger('lockstep').setLevel(logging.CRITICAL)",
        ),
    ],
    ids=["a handler before", "a level before", "after the import"],
)
def test_a_program_that_handles_logs_itself_gets_no_lines_from_us(before: str, after: str) -> None:
    assert run(before, after) == ("", "")


def test_a_program_can_pass_the_messages_on_to_its_own_handlers() -> None:
    own = "logging.getLogger('lockstep').handlers.clear(); logging.getLogger('lockstep').propagate = True"
    out, err = run("logging.basicConfig(stream=sys.stdout, format='%(levelname)s %(message)s')", own)
    assert (out, err) == ("INFO a note\nWARNING a warning\nWARNING a setting\n", "")


def test_a_closed_terminal_does_not_end_the_program() -> None:
    out, _ = run("", "sys.stdout.close(); logging.raiseExceptions = False")
    assert out == ""
