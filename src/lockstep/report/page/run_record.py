"""Reads the files of a run for its report, and what its receipt says about the gap.

Missing files are left out: a run that was killed has a report too. Damaged ones, and damaged lines of logs, are left
out too, and `RunRecord.left_out` names them.

In half precision the means of few tokens are judged together with those of later steps. A single step may then be
above a limit without a fault. So the figures that were judged are shown, with the steps that they are of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import InputError, LockstepError, reason
from lockstep.files import check_regular
from lockstep.report.alarms import LINE
from lockstep.report.kept_rollouts import rollout_files
from lockstep.report.page.kinds import (
    Kind,
    Reader,
    a_count,
    a_figure,
    a_number,
    a_prompt,
    a_text,
    a_truth,
    anything,
    list_of,
    mapping,
    or_none,
)
from lockstep.safe_text import without_secrets

Line = dict[str, Any]
ABOUT, END, METRICS, RECEIPT, SETTINGS, SHOWN, SUMMARY = (
    "about.json", "end.json", "metrics.jsonl", "receipt.jsonl", "run.json", "shown_rollouts.jsonl", "summary.json",
)  # fmt: skip
BEFORE, AFTER, REPORT = "before.json", "after.json", "report.html"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a run's files.

    Attributes:
        folder: the run's output directory.
        about: method, model, settings, versions (`about.json`).
        end: how the run has ended (`end.json`); empty while it trains, and after a kill.
        metrics, receipt, shown: lines of `metrics.jsonl`, `receipt.jsonl` and `shown_rollouts.jsonl`.
        summary: `summary.json`; empty before the end.
        before, after: the evaluations before and after training; None if there was none.
        rewards: rewards of the training rollouts that are kept, by step.
        left_out: files, and lines of files, that are damaged, each with the reason.
    """

    folder: Path
    about: Line = field(default_factory=dict)
    end: Line = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)
    receipt: list[Line] = field(default_factory=list)
    shown: list[Line] = field(default_factory=list)
    summary: Line = field(default_factory=dict)
    before: Line | None = None
    after: Line | None = None
    rewards: dict[int, list[float]] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @property
    def steps(self) -> list[Line]:
        """The logs of training steps."""
        return [line for line in self.metrics if "loss" in line]

    @property
    def evaluations(self) -> list[Line]:
        """The logs of evaluations during training."""
        return [line for line in self.metrics if "loss" not in line]

    @property
    def start(self) -> Line:
        """The last `start` line of the receipt; empty if there is none."""
        return next((line for line in reversed(self.receipt) if line.get("kind") == "start"), {})

    @property
    def proven(self) -> list[Line]:
        """The receipt's lines of steps whose proofs have passed."""
        return [line for line in self.receipt if line.get("kind") == "step"]

    @property
    def unproven(self) -> list[Line]:
        """The receipt's lines of checks that were due and could not be made."""
        return [line for line in self.receipt if line.get("kind") == "unproven"]

    @property
    def taken(self) -> list[str]:
        """The user's hooks and functions in the model's forward and backward."""
        return [name for line in self.receipt if line.get("kind") == "hooks" for name in line["taken"]]

    @property
    def alarms(self) -> list[Line]:
        """The receipt's lines of alarms."""
        return [line for line in self.receipt if line.get("kind") == LINE]

    @property
    def last_step(self) -> int:
        """The last optimizer step that the files name."""
        return max((int(line.get("step", 0)) for line in (*self.metrics, *self.proven, self.end)), default=0)


@contextmanager
def files_of_a_run(*folders: Path) -> Iterator[None]:
    """Within the block, an error that values of another kind cause is an InputError: others changed the files."""
    try:
        yield
    except LockstepError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        named = " or ".join(map(str, folders))
        why = f"{type(error).__name__}: {error}"
        raise InputError(
            f"a file in {named} holds a value of another kind than Lockstep writes ({why}); it was changed by "
            "something else, or written by another version"
        ) from error


# ---- the kinds of the values in the files ---------------------------------------------------------------------------

# Metrics that a page or a table reads. A user's own ones may be of any kind.
_FIGURES = re.compile(
    r"loss|loss/value|reward|kl|objective/kl|entropy|grad_norm|learning_rate|frac_reward_zero_std"
    r"|clip_ratio.*|eval_reward.*|(time|rewards|parity|completions|sampling)/.*"
)
_LOG = mapping({"step": a_count}, others=lambda name: a_figure if _FIGURES.fullmatch(name) else anything)
_MODULE = mapping({"name": a_text, "error": a_number})
_FIGURES_OF_A_GAP = mapping(others=lambda name: a_number)
_JUDGED = mapping(
    dict.fromkeys(("tokens", "mean_abs_gap", "mean_allowed", "k3", "k3_allowed"), a_number),
    others=lambda name: a_number,
)
_TEXTS = ("signal", "error", "message", "check", "found", "cause", "fix")


def _of_a_gap(value: Any) -> str | None:
    is_gap = isinstance(value, dict) and "max_abs_gap" in value and "tokens" in value
    return _FIGURES_OF_A_GAP(value) if is_gap else None


_STEP = mapping(
    {"step": a_count, "checked_tokens": a_count}
    | dict.fromkeys(("sum_abs_gap", "max_abs_gap", "sum_k3"), a_number),
    {
        **dict.fromkeys(("sampled_tokens", "stale_tokens", "aside_tokens"), a_count),
        "max_allowed": a_number,
        "worst_module": _MODULE,
        "worst_request": a_text,
        "judged": _JUDGED,
        "waiting": mapping({"tokens": a_count}),
    },
    others=lambda name: _of_a_gap,
)
_AT_START = {
    "step": a_count,
    "limits": mapping(others=lambda name: a_number),
    "canary": mapping({"max_abs_gap": a_number}),
    "worst_module": _MODULE,
    "modules": mapping(given={"probed": a_count}),
}
# By the kind of the receipt's line.
_ENTRIES: dict[str, Kind] = {
    "start": mapping(given=_AT_START),
    "step": _STEP,
    "unproven": mapping({"proof": a_text, "why": a_text}),
    "hooks": mapping({"taken": list_of(a_text)}),
    LINE: mapping({"step": a_count, "text": a_text}),
}


def _entry(value: Any) -> str | None:
    wrong = mapping({"kind": a_text})(value)
    return _ENTRIES.get(value["kind"], anything)(value) if wrong is None else wrong


def _span(value: Any) -> str | None:
    per_token = or_none(list_of(a_figure))
    sampled = {"tokens": list_of(a_text), "finish_reason": or_none(a_text)}
    if isinstance(value, dict) and "text" in value:
        return mapping({"text": a_text})(value)
    wrong = mapping(sampled, {"gaps": per_token, "advantages": per_token})(value)
    if wrong is not None:
        return wrong
    count = len(value["tokens"])
    return next((n for n in ("gaps", "advantages") if len(value.get(n) or value["tokens"]) != count), None)


_BRANCH = mapping(
    {"prompt": a_text, "finish_reason": or_none(a_text), "spans": list_of(_span)}, {"left_out": a_count}
)
_ROLLOUT = mapping(
    {
        "name": a_text,
        "reward": a_figure,
        "failed": or_none(a_text),
        "finish_reasons": list_of(or_none(a_text)),
        "calls": list_of(a_text),
        "branches": list_of(_BRANCH),
    },
    {"images": list_of(anything)},
)
_SHOWN = mapping(
    {"step": a_count, "rewards": list_of(a_figure), "rollouts": list_of(_ROLLOUT)}, {"failed": a_truth}
)


def _group(value: Any) -> str | None:
    needed = {"prompt": a_prompt, "completions": list_of(a_text), "rewards": list_of(a_figure)}
    wrong = mapping(needed, {"images": or_none(list_of(anything))})(value)
    is_whole = wrong is not None or len(value["rewards"]) == len(value["completions"])
    return wrong if is_whole else "rewards"


_EVALUATION = mapping(
    {"metrics": mapping(others=lambda name: a_figure), "rollouts": list_of(_group)},
    {"turns": list_of(_ROLLOUT)},
)
_SUMMARY = mapping(
    {
        "parity": mapping(
            dict.fromkeys(("checked_tokens", "failed", "mean_abs_gap", "max_abs_gap"), a_number),
            {"closest_to_limit": mapping({"text": a_text})},
        ),
        "wall_s": a_number,
        "tokens_per_s": a_number,
    },
    others=lambda name: a_figure if name.startswith("eval_") else anything,
)
_ABOUT = mapping(
    given={
        **dict.fromkeys(("method", "model", "started"), a_text),
        "name": or_none(a_text),
        "max_steps": a_number,
        "chosen": list_of(a_text),
        **dict.fromkeys(("settings", "rows", "data", "versions", "machine", "engine"), mapping()),
    }
)


def _end(value: Any) -> str | None:
    needed = {"ended": a_text, "step": a_count}
    if isinstance(value, dict) and "check" in value:
        needed |= dict.fromkeys(("found", "cause", "fix"), a_text)
    given = {**dict.fromkeys(_TEXTS, a_text), "max_steps": a_number, "seconds": a_number}
    return mapping(needed, given)(value)


def read_run(folder: Path) -> RunRecord:
    """The record of a run."""
    files = Reader()
    return RunRecord(
        folder,
        # An earlier version wrote them as they were.
        files.read(folder / ABOUT, _ABOUT, without_secrets) or {},
        files.read(folder / END, _end, partial(without_secrets, by_name=False)) or {},
        files.read_lines(folder / METRICS, _LOG, with_nan),
        files.read_lines(folder / RECEIPT, _entry),
        files.read_lines(folder / SHOWN, _SHOWN),
        files.read(folder / SUMMARY, _SUMMARY, with_nan) or {},
        read_evaluation(files, folder / BEFORE),
        read_evaluation(files, folder / AFTER),
        _rewards(files, folder),
        tuple(files.left_out),
    )


def read_evaluation(files: Reader, path: Path) -> Line | None:
    """An evaluation before or after training; None if there is no file, or if it is left out."""
    found: Line | None = files.read(path, _EVALUATION)
    return {**found, "metrics": with_nan(found["metrics"])} if found else None


def read_lines(path: Path) -> list[Line]:
    """Entries of a `.jsonl` file; an empty list if there is no file. Lines that are no mappings are left out."""
    return Reader().read_lines(path, mapping())


def with_nan(figures: Line) -> Line:
    """Figures of a file with NaN where the file has null: JSON has no NaN."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def _rewards(files: Reader, folder: Path) -> dict[int, list[float]]:
    """Rewards of the first, a middle and the last step that is kept."""
    kept = rollout_files(folder)
    found = {}
    for step, path in dict(kept[i] for i in {0, len(kept) // 2, len(kept) - 1} if kept).items():
        try:
            check_regular(path)
            table = pq.read_table(path, columns=["branch", "reward"])
            if not pa.types.is_floating(table.schema.field("reward").type):
                raise TypeError("rewards are not numbers")
        except (OSError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
            files.left_out.append(f"{path} ({reason(error)[:80]})")
            continue
        rewards = zip(table["branch"].to_pylist(), table["reward"].to_pylist(), strict=True)
        found[step] = [reward for branch, reward in rewards if branch == 0 and reward is not None]
    return dict(sorted(found.items()))


# The figures of a gap, with the names of their limits and of a single step's sum, which has no name for the largest
# gap.
MEANS = {"mean_abs_gap": ("mean_allowed", "sum_abs_gap"), "k3": ("k3_allowed", "sum_k3")}
_NAMES = {"mean_abs_gap": "mean", "k3": "k3", "max_abs_gap": "largest"}


class Judged(NamedTuple):
    """A figure that was compared with its limit. It is of so many tokens, of the steps of these receipt's lines."""

    name: str
    figure: float
    limit: float
    lines: Sequence[Line]
    tokens: int

    @property
    def share(self) -> float:
        """The figure's share of its limit."""
        return self.figure / self.limit if self.limit else 0.0

    @property
    def where(self) -> str:
        """The steps and the number of tokens, in words."""
        first, last = self.lines[0]["step"], self.lines[-1]["step"]
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        return f"{steps}, {self.tokens} tokens"

    @property
    def text(self) -> str:
        """The figure, its limit and where it was found."""
        return f"{_NAMES[self.name]} {self.figure:.2g} of {self.limit:.2g} ({self.where})"


def judged_means(steps: Sequence[Line], name: str) -> list[Judged]:
    """Every value of a mean, a key of `MEANS`, that was compared with its limit, as far as the receipt has them."""
    found, lines = list[Judged](), list[Line]()
    for line in steps:
        lines += [line] if line.get("checked_tokens") else []
        if (judged := line.get("judged")) and lines:
            found.append(Judged(name, judged[name], judged[MEANS[name][0]], lines, judged["tokens"]))
        if "waiting" not in line:
            lines = []
    return found


def largest_gaps(steps: Sequence[Line], otherwise: float) -> list[Judged]:
    """The largest gap of every step, which was compared with its limit at once; `otherwise` if the line has none."""
    compared = [(line, line["checked_tokens"]) for line in steps if line.get("checked_tokens")]
    name = "max_abs_gap"
    return [Judged(name, s[name], s.get("max_allowed", otherwise), [s], tokens) for s, tokens in compared]


def closest(judged: Sequence[Judged]) -> Judged | None:
    """The figure with the largest share of its limit."""
    return max(judged, key=lambda one: one.share, default=None)


def closest_of_run(steps: Sequence[Line]) -> Judged | None:
    """The figure of the gap that came closest to its limit; None if the receipt does not have what was judged."""
    largest = largest_gaps([line for line in steps if "max_allowed" in line], 0.0)
    means = [one for name in MEANS for one in judged_means(steps, name)]
    return closest([*means, *largest]) if means else None


def mean_of(lines: Sequence[Line], name: str) -> float:
    """A mean over the tokens of several lines, or of one."""
    tokens = sum(line["checked_tokens"] for line in lines)
    return sum(line[MEANS[name][1]] for line in lines) / tokens if tokens else 0.0


def alone_above(judged: Sequence[Judged]) -> list[Line]:
    """The lines of single steps whose own mean is above the limit of the judgement that they were a part of."""
    return [line for one in judged for line in one.lines if mean_of([line], one.name) > one.limit]


def steps_alone(lines: Sequence[Line], name: str) -> str:
    """Single steps with their means, in words; empty without lines."""
    means = [(line, mean_of([line], name)) for line in lines[:3]]
    shown = [f"{line['step']} ({mean:.2g} over {line['checked_tokens']})" for line, mean in means]
    more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    word = "step" if len(lines) == 1 else "steps"
    return f"alone above the limit, not judged alone: {word} {', '.join(shown)}{more}" if lines else ""


def waiting_tokens(steps: Sequence[Line]) -> int:
    """The number of tokens at the end whose means were not judged."""
    return int(steps[-1].get("waiting", {}).get("tokens", 0)) if steps else 0
