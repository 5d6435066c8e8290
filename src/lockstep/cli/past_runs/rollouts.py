"""`lockstep rollouts RUN`: pages through the rollouts that a run kept, or prints them if standard output is not a terminal.

Comes from: `RUN/rollouts/` (`report/kept_rollouts.py`). For a run without that folder, `before.json` and `after.json`, the rollouts
of the evaluations before and after training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.cli.words import WordParser
from lockstep.errors import InputError
from lockstep.report.say import say

# Rollouts that are printed where nobody can turn pages, unless --all is given.
_PRINTED = 20
_KEYS = "Enter: next   b: back   g NUMBER: go to   q: quit"


def page_rollouts(words: list[str]) -> int:
    """Show the rollouts.

    Raises:
        InputError: the directory holds no rollouts, not those that were asked for, or a file cannot be read.
    """
    parser = WordParser(prog="lockstep rollouts", description=__doc__)
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
    from lockstep.report.page.run_record import files_of_a_run

    with files_of_a_run(Path(asked.run)):
        pages = list(read_pages(Path(asked.run), asked.step))
        if asked.text is not None:
            pages = [page for page in pages if asked.text in page["prompt"] or asked.text in page["completion"]]
        if asked.best or asked.worst:
            scored = [page for page in pages if page["reward"] is not None]
            pages = sorted(scored, key=lambda page: page["reward"], reverse=asked.best)
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


def read_pages(folder: Path, step: int | None) -> Iterator[dict[str, Any]]:
    """One page per rollout: `title`, `prompt`, `completion`, `reward` (None: there is none), and `facts`, lines of text.

    Raises:
        InputError: the directory holds no rollouts, or a file cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give the output directory of a run")
    # pyarrow takes a third of a second; --help does not need it.
    from lockstep.report.kept_rollouts import read_rollouts, rollout_files

    if rollout_files(folder):
        for kept in read_rollouts(folder, None if step is None else [step]):
            yield _page_of(kept)
        return
    if step is not None:
        raise InputError(f"{folder} kept no rollouts of training; leave --step out to see those of its evaluations")
    found = [path for path in (folder / "before.json", folder / "after.json") if path.is_file()]
    if not found:
        raise InputError(f"{folder} holds no rollouts: neither rollouts/ nor an evaluation")
    for path in found:
        yield from _pages_of_evaluation(path)


def _page_of(kept: Any) -> dict[str, Any]:
    facts = [f"score {name}: {'none' if score is None else f'{score:.4g}'}" for name, score in kept.scores.items()]
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


def _pages_of_evaluation(path: Path) -> Iterator[dict[str, Any]]:
    try:
        groups = json.loads(path.read_text(encoding="utf-8"))["rollouts"]
        for group in groups:
            for number, text in enumerate(group["completions"]):
                yield {
                    "title": f"evaluation {path.stem} training, sample {number}",
                    "prompt": _conversation(group["prompt"]),
                    "completion": text,
                    "reward": group["rewards"][number],
                    "facts": [],
                }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error


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
        [head, "", page["prompt"], "", "→ " + page["completion"], *(["", *page["facts"]] if page["facts"] else [])]
    )


def _turn(pages: list[dict[str, Any]]) -> None:
    """Show one page at a time until the user quits."""
    from lockstep.report.terminal import Terminal

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
