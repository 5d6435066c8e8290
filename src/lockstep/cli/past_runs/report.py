"""`lockstep report RUN [RUN ...]`: makes the report of a run again from its files, or one page that compares several runs."""

from __future__ import annotations

from pathlib import Path

from lockstep.cli.words import WordParser
from lockstep.errors import InputError
from lockstep.files import replace_text
from lockstep.report.page.comparison import render_comparison
from lockstep.report.page.report import render_report
from lockstep.report.page.run_record import METRICS, RECEIPT, REPORT, files_of_a_run, read_run
from lockstep.report.say import say

_COMPARISON = "comparison.html"


def report_again(words: list[str]) -> int:
    """Run the command.

    Raises:
        InputError: a directory is not the output directory of a run.
    """
    parser = WordParser(prog="lockstep report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where to write the page; default: {REPORT} in the run's directory, or {_COMPARISON} here for several runs",
    )
    asked = parser.parse_args(words)
    for folder in asked.runs:
        if not any((folder / name).is_file() for name in (METRICS, RECEIPT)):
            raise InputError(f"{folder} is not the output directory of a run: it has neither {METRICS} nor {RECEIPT}")
    with files_of_a_run(*asked.runs):
        records = [read_run(folder) for folder in asked.runs]
        if len(records) == 1:
            path, page = asked.output or asked.runs[0] / REPORT, render_report(records[0])
        else:
            path, page = asked.output or Path(_COMPARISON), render_comparison(records)
    replace_text(path, page)
    say(str(path))
    return 0
