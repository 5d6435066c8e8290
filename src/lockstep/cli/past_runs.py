"""Commands on runs that have ended: compare, page through rollouts, make a report again, say what to do next.

`compare` reads `run.json`, `summary.json` and `metrics.jsonl` of each run. A run that goes on, or was interrupted, has
no summary. `rollouts` reads `RUN/rollouts/` (`report/kept_rollouts.py`), or the rollouts of the evaluations before and
after training (`before.json`, `after.json`) if a run has no such folder.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cli.help import WordParser, fields_of
from lockstep.errors import InputError
from lockstep.files import check_writable, replace_text
from lockstep.report.page import run_record
from lockstep.report.page.kinds import Reader, mapping
from lockstep.report.page.report import render_comparison, render_report
from lockstep.safe_text import complain, is_secret_name, masked, say, without_secrets
from lockstep.terminal import sparkline

# What `--help` says of each command.
_COMPARE = "Prints the settings in which runs differ, what they reached, and their curves, side by side."
_REPORT = "Makes the report of a run again from its files, or one page that compares several runs."
_ROLLOUTS = (
    "Pages through the rollouts that a run kept, or prints them if standard output is not a terminal. For a run "
    "without kept rollouts: those of its evaluations before and after training."
)
# The curves, by metric, with their names.
CURVES = {
    "reward": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "parity/mean_abs_gap": "mean gap",
    "grad_norm": "grad norm",
    "kl": "KL",
}
_WIDTH = 24


@dataclass(frozen=True, slots=True)
class PastRun:
    """The files of a run.

    Attributes:
        name: its directory, as the user named it.
        settings: the settings that decide what the run learns.
        summary: empty if the run has not ended.
        steps: the lines of its steps in `metrics.jsonl`.
        left_out: what of its files is damaged.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    left_out: Sequence[str] = ()


def _say_left_out(parts: Iterable[str]) -> None:
    for part in parts:
        complain(f"lockstep: left out, because it is damaged: {part}")


def compare_runs(words: list[str]) -> int:
    """Print the comparison.

    Raises:
        InputError: a directory holds no run, or its files cannot be read.
    """
    parser = WordParser(prog="lockstep compare", description=_COMPARE)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output directory of a run")
    named = parser.parse_args(words).runs
    with run_record.files_of_a_run(*map(Path, named)):
        runs = [read_past_run(Path(name)) for name in named]
        tables = sections(runs)
    _say_left_out(part for one in runs for part in one.left_out)
    from rich.table import Table

    from lockstep.terminal import Terminal

    console = Terminal()
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for one in runs:
            table.add_column(one.name, overflow="fold")
        for label, cells in rows:
            table.add_row(label, *cells)
        if rows:
            console.print(table, markup=False)
        else:
            console.print(f"{title}: none", markup=False)
    return 0


def read_past_run(folder: Path) -> PastRun:
    """The files of a run; its settings are those of `run.json`, or of `about.json` after a run in Python.

    Raises:
        InputError: the directory holds no run, or its settings cannot be read.
    """
    record, path, files = run_record.read_run(folder), folder / run_record.SETTINGS, Reader()
    settings = files.read(path, mapping(), without_secrets)
    if settings is None:
        if files.left_out:
            raise InputError(f"the settings of a run cannot be read: {files.left_out[0]}")
        if not record.about:
            raise InputError(f"{folder} has no {run_record.SETTINGS}: is it the output directory of a run?")
        settings = record.about.get("settings", {})
    return PastRun(str(folder), settings, record.summary, record.steps, record.left_out)


def sections(runs: Sequence[PastRun]) -> dict[str, list[tuple[str, list[str]]]]:
    """The tables, by title: rows of a label and one cell per run."""
    return {
        "settings that differ": differing(runs),
        "results": [(label, [value(one) for one in runs]) for label, value in _RESULTS.items()],
        "curves (one scale per row; first → last)": curves(runs),
    }


def differing(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs; `–` stands where a run has no such setting."""
    names = list(dict.fromkeys(name for one in runs for name in one.settings))
    rows = [(name, [_said(one.settings, name) for one in runs]) for name in names]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def curves(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """The curves that at least one run has."""
    rows = []
    for metric, label in CURVES.items():
        found = [[step[metric] for step in one.steps if _is_number(step.get(metric))] for one in runs]
        every = [value for values in found for value in values]
        if every:
            low, high = min(every), max(every)
            rows.append((label, [_curve(values, low, high) for values in found]))
    return rows


def _curve(values: Sequence[float], low: float, high: float) -> str:
    if not values:
        return "–"
    count = min(len(values), _WIDTH)
    # The mean of each part, so that a long curve fits.
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    return f"{sparkline(means, _WIDTH, low, high)} {values[0]:.3g} → {values[-1]:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


def _said(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "–"
    value = settings[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _interval(when: str) -> Callable[[PastRun], str]:
    def cell(one: PastRun) -> str:
        key = f"eval_reward_{when}"
        if key not in one.summary:
            return "–"
        interval = one.summary.get(f"{key}_ci95", math.nan)
        return f"{one.summary[key]:.3f} ± {interval:.3f}"

    return cell


def _summed(form: Callable[[Mapping[str, Any]], str]) -> Callable[[PastRun], str]:
    return lambda one: form(one.summary) if one.summary else "–"


_RESULTS: dict[str, Callable[[PastRun], str]] = {
    "state": lambda one: "finished" if one.summary else "not finished",
    "steps": lambda one: str(one.steps[-1]["step"]) if one.steps else "0",
    "held-out reward before": _interval("before"),
    "held-out reward after": _interval("after"),
    "mean reward, last tenth": lambda one: _last_rewards(one.steps),
    "tokens checked, failed": _summed(lambda s: f"{s['parity']['checked_tokens']}, {s['parity']['failed']}"),
    "gap, mean": _summed(lambda s: f"{s['parity']['mean_abs_gap']:.1e}"),
    "gap, largest": _summed(lambda s: f"{s['parity']['max_abs_gap']:.1e}"),
    "gap, closest to its limit": _summed(lambda s: s["parity"].get("closest_to_limit", {}).get("text", "–")),
    "seconds in all": _summed(lambda s: f"{s['wall_s']:.0f}"),
    "tokens per second": _summed(lambda s: f"{s['tokens_per_s']:.0f}"),
}


def _last_rewards(steps: Sequence[Mapping[str, Any]]) -> str:
    rewards = [step["reward"] for step in steps if _is_number(step.get("reward"))]
    last = rewards[-max(len(rewards) // 10, 1) :]
    return f"{sum(last) / len(last):.3f}" if last else "–"


_COMPARISON = "comparison.html"


def report_again(words: list[str]) -> int:
    """Run the command.

    Raises:
        InputError: a directory is not the output directory of a run.
    """
    parser = WordParser(prog="lockstep report", description=_REPORT)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where to write the page; default: {run_record.REPORT} in the run's directory, or {_COMPARISON} here for "
        f"several runs",
    )
    asked = parser.parse_args(words)
    for folder in asked.runs:
        if not any((folder / name).is_file() for name in (run_record.METRICS, run_record.RECEIPT)):
            missing = f"neither {run_record.METRICS} nor {run_record.RECEIPT}"
            raise InputError(f"{folder} is not the output directory of a run: it has {missing}")
    is_single = len(asked.runs) == 1
    path = asked.output or (asked.runs[0] / run_record.REPORT if is_single else Path(_COMPARISON))
    check_writable(path)
    with run_record.files_of_a_run(*asked.runs):
        records = [run_record.read_run(folder) for folder in asked.runs]
        page = render_report(records[0]) if is_single else render_comparison(records)
    _say_left_out(part for record in records for part in record.left_out)
    replace_text(path, page)
    say(str(path))
    return 0


# Rollouts that are printed where nobody can turn pages, unless --all is given.
_PRINTED = 20
_KEYS = "Enter: next   b: back   g NUMBER: go to   q: quit"


def page_rollouts(words: list[str]) -> int:
    """Show the rollouts.

    Raises:
        InputError: the directory holds no rollouts, not those that were asked for, or a file cannot be read.
    """
    parser = WordParser(prog="lockstep rollouts", description=_ROLLOUTS)
    parser.add_argument("run", metavar="RUN", help="output directory of a run")
    parser.add_argument("--step", type=int, help="only the rollouts that this optimizer step learned from")
    parser.add_argument("--best", action="store_true", help="largest reward first")
    parser.add_argument("--worst", action="store_true", help="smallest reward first")
    parser.add_argument("--text", help="only rollouts whose prompt or completion contains this text")
    parser.add_argument(
        "--all", action="store_true", help=f"print all of them where no pages can be turned, not {_PRINTED}"
    )
    asked = parser.parse_args(words)
    if asked.best and asked.worst:
        raise InputError("give --best or --worst, not both")
    left_out: list[str] = []
    with run_record.files_of_a_run(Path(asked.run)):
        pages = list(read_pages(Path(asked.run), asked.step, left_out))
        if asked.text is not None:
            pages = [
                page for page in pages if asked.text in page["prompt"] or asked.text in page["completion"]
            ]
        if asked.best or asked.worst:
            scored = [page for page in pages if page["reward"] is not None]
            pages = sorted(scored, key=lambda page: page["reward"], reverse=asked.best)
    _say_left_out(left_out)
    if not pages:
        raise InputError(f"{asked.run} has no such rollouts")
    if sys.stdin.isatty() and sys.stdout.isatty():
        _turn(pages)
        return 0
    shown = pages if asked.all else pages[:_PRINTED]
    for number, page in enumerate(shown, 1):
        say(page_text(page, number, len(pages)), end="\n\n")
    if len(shown) < len(pages):
        say(f"{len(pages) - len(shown)} more: --all prints them, --step, --text, --best and --worst choose")
    return 0


def read_pages(folder: Path, step: int | None, left_out: list[str]) -> Iterator[dict[str, Any]]:
    """One page per rollout:

    `title`, `prompt`, `completion`, `reward` (None: there is none), and `facts`, lines of text.

    Args:
        left_out: gets what of the files is damaged.

    Raises:
        InputError: the directory holds no rollouts.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give the output directory of a run")
    # pyarrow takes a third of a second; --help does not need it.
    from lockstep.report.kept_rollouts import check_steps, read_file, rollout_files

    if files := rollout_files(folder):
        for _, path in files if step is None else check_steps(folder, files, [step]):
            try:
                yield from [_page_of(kept) for kept in read_file(path)]
            except InputError as error:
                left_out.append(str(error))
        return
    if step is not None:
        raise InputError(
            f"{folder} kept no rollouts of training; leave --step out to see those of its evaluations"
        )
    found = [path for path in (folder / run_record.BEFORE, folder / run_record.AFTER) if path.is_file()]
    if not found:
        raise InputError(f"{folder} holds no rollouts: neither rollouts/ nor an evaluation")
    reader = Reader()
    for path in found:
        yield from _pages_of_evaluation(path, reader)
    left_out += reader.left_out


def _page_of(kept: Any) -> dict[str, Any]:
    facts = [
        f"score {name}: {'none' if score is None else f'{score:.4g}'}" for name, score in kept.scores.items()
    ]
    facts += [f"{name}: {value}" for name, value in kept.extra.items()]
    if kept.advantage is not None:
        facts.append(f"advantage: {kept.advantage:+.3f}")
    gaps = kept.gaps
    if gaps is not None and len(gaps):
        facts.append(f"parity gap: {abs(gaps).mean():.1e} mean, {abs(gaps).max():.1e} max, in nats")
    if kept.failed:
        facts.append(f"failed: {kept.failed}")
    branch = f", branch {kept.branch}" if kept.branch else ""
    return {
        "title": f"step {kept.step}, {kept.name}{branch}",
        "prompt": _conversation(kept.prompt),
        "completion": _conversation(kept.messages) if kept.messages else kept.completion,
        "reward": kept.reward,
        "facts": [f"{int(kept.sampled.sum())} sampled tokens, ended by {kept.finish_reason}", *facts],
    }


def _pages_of_evaluation(path: Path, files: Reader) -> Iterator[dict[str, Any]]:
    for group in (run_record.read_evaluation(files, path) or {"rollouts": ()})["rollouts"]:
        for number, (text, reward) in enumerate(zip(group["completions"], group["rewards"], strict=True)):
            yield {
                "title": f"evaluation {path.stem} training, sample {number}",
                "prompt": _conversation(group["prompt"]),
                "completion": text,
                "reward": reward,
                "facts": [],
            }


def _conversation(said: Any) -> str:
    """Text as it is; messages with their roles, and the calls of tools."""
    if isinstance(said, str):
        return said
    lines = []
    for message in said:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text") or f"<{part.get('type', 'part')}>" for part in content)
        lines.append(f"[{message.get('role', '?')}] {content}".rstrip())
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            lines.append(f"  → {function.get('name')}({function.get('arguments')})")
    return "\n".join(lines)


def page_text(page: dict[str, Any], number: int, count: int) -> str:
    """One page as text."""
    reward = "no reward" if page["reward"] is None else f"reward {page['reward']:.4g}"
    head = f"── {number}/{count}   {page['title']}   {reward} ──"
    return "\n".join(
        [
            head,
            "",
            page["prompt"],
            "",
            "→ " + page["completion"],
            *(["", *page["facts"]] if page["facts"] else []),
        ]
    )


def _turn(pages: list[dict[str, Any]]) -> None:
    """Show one page at a time until the user quits."""
    from lockstep.terminal import Terminal

    console, number = Terminal(), 0
    while True:
        console.clear()
        console.print(page_text(pages[number], number + 1, len(pages)), markup=False, highlight=False)
        console.print(f"\n{_KEYS}", style="dim")
        try:
            word = input().strip().lower()
        except (EOFError, KeyboardInterrupt):
            return
        if word == "q":
            return
        target = word.removeprefix("g").strip()
        if word == "b":
            number = max(number - 1, 0)
        elif target.isdigit():
            number = min(max(int(target), 1), len(pages)) - 1
        elif number + 1 < len(pages):
            number += 1


def next_lines(folder: Path, *, adapter: bool, typed: Sequence[str] | None = None) -> list[str]:
    """Where the trained model is, and the commands that go on from it.

    Args:
        adapter: whether the run trained an adapter, which other programs want merged into its model.
        typed: the words of a run that `lockstep evaluate` can take; None: it cannot evaluate this run.
    """
    from lockstep.run.files.checkpoints import last_checkpoint

    checkpoint = last_checkpoint(folder)
    rollouts = f"next             lockstep rollouts {_word(folder)}   reads what the model wrote"
    if checkpoint is None:
        return ["model            not saved: there is no checkpoint (save_strategy is no)", rollouts]
    lines, model = [f"{'adapter' if adapter else 'model':<17}{checkpoint}", rollouts], checkpoint
    if adapter:
        model = folder / "merged"
        lines.append(
            f"                 lockstep merge {_word(checkpoint)} {_word(model)}   makes a whole model of it"
        )
    if typed is not None:
        kept = map(_without_secret, _without(typed, _not_in_evaluation()))
        words = [*kept, "--model_name_or_path", str(model)]
        # The config file of the run may say it.
        words += ["--use_peft", "False"] if adapter else []
        lines.append(f"                 lockstep evaluate {shlex.join(words)}")
    return [
        *lines,
        f"                 lockstep verify --model {_word(model)}   proves that an engine runs it as the trainer does",
        f"                 lockstep serve {_word(model)}   serves it with vLLM, behind a key",
    ]


def _not_in_evaluation() -> set[str]:
    """Fields of a run that the command of its evaluation says otherwise, or that have no effect there."""
    from lockstep.cli.fields import decides_learning

    unused = {
        n for n, f in fields_of("evaluate").items() if decides_learning(n, f) or f.get("group") == "adapter"
    }
    return {f"--{name}" for name in unused | {"model_name_or_path"}}


def _without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """The words without these fields, those of secrets, and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            dropping = name in names or is_secret_name(name)
        if not dropping:
            kept.append(word)
    return kept


def _without_secret(word: str) -> str:
    """A word of a command line without the secrets in its value, which may be JSON."""
    name, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    try:
        found = json.loads(value)
    except ValueError:
        return masked(word)
    kept = without_secrets(found)
    return word if kept is found else f"{name}{sign}{json.dumps(kept)}"


def _word(path: Path) -> str:
    return shlex.quote(str(path))
