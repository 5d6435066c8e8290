"""The report of a run: its verdict, proofs, curves and rollouts; small, self-contained, and safe for any text."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.report.page.drawing import Limit, Series, gap_limits, histogram, line_chart, stacked_bars
from lockstep.report.page.proofs import measured_proofs
from lockstep.report.page.report import LARGEST, render_comparison, render_report, verdict_of
from lockstep.report.page.rollouts import gap_color, rank_class, turns_section
from lockstep.report.page.run_record import RunRecord, read_run

SOURCE = Path(lockstep.__file__).parent
HOSTILE = (
    "</pre></td></script><script>alert(1)</script><img src=x onerror='alert(2)'>\"' & {x} "
    "http://evil.example/a.js"
)
VOID = {"meta", "input", "br", "img", "line", "circle", "polyline", "rect"}


class Checker(HTMLParser):
    """Fails at a tag that is not closed where it should be, at a script, and at everything that would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            # A picture may stand in the page itself.
            assert name != "src" or str(value).startswith("data:image/"), (name, value)
            assert name not in {"href", "srcset", "action", "data", "poster"}, (name, value)
            if name == "id":
                self.ids.append(str(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Checker:
    """The page after these checks: well-formed, nothing to load, no script, below a megabyte."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert len(page.encode()) < LARGEST
    return checker


def log(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step, "loss": 0.1, "reward": -1.0 + 0.1 * step, "kl": 1e-3, "entropy": 2.0, "grad_norm": 1.5,
        "learning_rate": 1e-4,
        "completions/mean_length": 3.0, "completions/max_length": 5.0, "completions/min_length": 2.0,
        "completions/clipped_ratio": 0.25, "frac_reward_zero_std": 0.5, "parity/mean_abs_gap": 1e-6,
        "parity/max_abs_gap": 1e-5,
        "parity/draws_log10_evidence": -0.3, "sampling/tokens": 40.0, "time/generate": 2.0, "time/sync": 1.0,
        "time/step": 4.0,
    }  # fmt: skip
    return {**base, **changes}


def proven(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "kind": "step", "step": step, "version": step - 1, "sampled_tokens": 50, "checked_tokens": 40,
        "aside_tokens": 10,
        "sum_abs_gap": 4e-5, "max_abs_gap": 1e-5 * step, "max_allowed": 1e-3, "sum_k3": 1e-9,
        "worst_request": "train/3#1",
        "worst_module": {"name": "layers.3.mlp", "error": 4e-6},
    }  # fmt: skip
    return {**base, **changes}


START = {
    "kind": "start", "step": 0, "limits": {"mean": 1e-4, "tail": 3e-5, "k3": 1e-6, "max": 8e-4, "module_probe": 1e-4},
    "worst_module": {"name": "layers.1.attn", "error": 2e-6}, "modules": {"probed": 14},
    "canary": {"tokens": 60, "mean_abs_gap": 1e-6, "max_abs_gap": 4e-4, "k3": 1e-12},
}  # fmt: skip


def shown(step: int, text: str = "tok", count: int = 2) -> dict[str, Any]:
    span = {
        "tokens": [text] * count,
        "gaps": [1e-6, -3e-4] * (count // 2),
        "advantages": [0.5] * count,
        "finish_reason": "stop",
    }
    branch = {"prompt": text, "finish_reason": "stop", "spans": [span, {"text": text}], "left_out": 3}
    rollout = {
        "name": f"train/{step}#0", "reward": -2.0, "failed": text, "finish_reasons": ["stop"], "calls": [text],
        "branches": [branch],
    }  # fmt: skip
    return {"step": step, "rewards": [-2.0, -1.0, None], "rollouts": [rollout]}


PARITY = {"checked_tokens": 120, "failed": 0, "mean_abs_gap": 1e-6, "max_abs_gap": 3e-5}


def record(text: str = "plain", **changes: Any) -> RunRecord:
    evaluation = {
        "metrics": {"eval_reward": 0.4, "eval_reward_ci95": 0.05},
        "rollouts": [{"prompt": text, "completions": [text, "b"], "rewards": [-1.0, -2.0]}],
        "turns": [shown(1, text)["rollouts"][0]],
    }
    fields: dict[str, Any] = {
        "folder": Path("runs") / "some run",
        "about": {
            "name": text, "method": "GRPO", "model": f"/models/{text}", "max_steps": 3,
            "started": "2026-11-24T06:00:00+00:00",
            "settings": {"learning_rate": 0.5, "chat_template": text}, "chosen": ["learning_rate"],
            "rows": {"train": 8},
            "data": {"train data": "ab12"}, "versions": {"torch": "2.13"}, "machine": {"device": text},
            "engine": {"dtype": text},
        },
        "end": {"ended": "finished", "step": 3, "max_steps": 3, "seconds": 70},
        "metrics": [log(1), log(2), {"step": 2, "eval_reward": 0.5, "eval_reward_ci95": 0.1}, log(3)],
        "receipt": [START, proven(1), proven(2), proven(3)],
        "shown": [shown(1, text), shown(3, text)],
        "summary": {"wall_s": 70.0, "tokens_per_s": 12.5, "parity": PARITY},
        "before": evaluation,
        "after": evaluation,
        "rewards": {1: [-2.0, -1.0], 3: [-1.0, -1.0]},
    }  # fmt: skip
    return RunRecord(**{**fields, **changes})


FAILED = {
    "ended": "failed", "step": 2, "max_steps": 3, "error": "ProofError", "message": "m", "check": "gap",
    "found": "mean 0.3 > 0.0001", "cause": "the weights <b>differ</b>", "fix": "look at layers.3",
}  # fmt: skip


def test_the_page_shows_verdict_proofs_curves_rollouts_and_settings() -> None:
    page = checked(render_report(record()))
    for words in (
        "plain: GRPO on plain", "All proofs passed; finished after 3 steps", "120 of 150 sampled tokens were compared",
        "30 have no gradient and were not drawn", "0.400 ± 0.050 → 0.400 ± 0.050", "-0.900 → -0.700",
        "3e-5 of 0.001 nats",
        "· started 2026-11-24 06:00 UTC ·",
        "KL divergence", "Entropy", "Gradient norm", "Learning rate", "Length of completions", "Completions "
                                                                                               "cut at the limit",
        "Parity gap between engine and trainer", "limit of the largest 0.001", "Rewards, rollout by rollout",
        "Where the time goes",
        "Evidence against the draws", "Held-out rollouts", "Rollouts through training", "Turns of held-out rollouts",
        "turn 1, sampled: 2 tokens, largest gap 3.0e-04, finish reason stop", "ends with: stop; 3 more ids "
                                                                              "are not shown",
        "learning_rate", "ab12", "2.13",
    ):  # fmt: skip
        assert words in page.text, words


def test_each_proof_stands_with_its_limit_and_the_step_closest_to_it() -> None:
    found = {(proof.name, proof.where.split(",")[0]): proof for proof in measured_proofs(record())}
    gap = found["gap, largest", "step 3"]
    assert (gap.figure, gap.limit, gap.where) == (pytest.approx(3e-5), 1e-3, "step 3, request train/3#1")
    assert found["gap, mean", "step 1"].share == pytest.approx(0.01)
    assert found["canary", "start"].share == pytest.approx(0.5)
    assert found["module_probe", "start"].where == "start, layers.1.attn"
    assert found["module_probe", "step 1"].figure == 4e-6
    assert found["draws", "step 1"].limit == 6
    assert [limit.value for limit in gap_limits(record())] == [1e-4, 1e-3]


def test_the_page_has_a_row_for_every_proof() -> None:
    names = [
        name
        for path in sorted(SOURCE.rglob("*.py"))
        for line in re.findall(r"^Proof (`.+`)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line)
    ]
    assert len(names) > 40
    cells = re.findall(r"<tr><td><code>([^<]+)</code></td>", render_report(record()))
    assert not set(names) - {name.strip() for cell in cells for name in cell.split(",")}


JUDGED = {
    "tokens": 300, "mean_abs_gap": 0.03, "mean_allowed": 0.151, "max_abs_gap": 0.5, "max_allowed": 4.5, "k3": 0.014,
    "k3_allowed": 0.0201,
}  # fmt: skip
HALF = {**START, "limits": {**START["limits"], "mean": 0.15, "k3": 0.02, "max": 4.1}}


def half_precision() -> list[dict[str, Any]]:
    """Three steps in bf16: two are judged together, though k3 of the first is above its limit; the third waits."""
    few = {"sum_abs_gap": 40 * 0.2, "sum_k3": 40 * 0.0252, "max_abs_gap": 0.45, "max_allowed": 4.2}
    many = {
        "checked_tokens": 260,
        "sampled_tokens": 270,
        "sum_abs_gap": 260 * 0.01,
        "sum_k3": 260 * 0.012,
        "max_abs_gap": 0.5,
    }
    return [
        HALF,
        proven(1, **few, waiting={"tokens": 40}),
        proven(2, **many, judged=JUDGED, max_allowed=4.5),
        proven(3, **few, waiting={"tokens": 40}),
    ]


def test_means_are_shown_as_they_were_judged_and_a_single_step_above_a_limit_is_named() -> None:
    run = record(receipt=half_precision())
    found = {proof.name: proof for proof in measured_proofs(run)}
    assert (found["gap, k3"].figure, found["gap, k3"].limit) == (0.014, 0.0201)
    assert found["gap, k3"].where == (
        "steps 1 to 2, 300 tokens; alone above the limit, not judged alone: step 1 (0.025 over 40)"
    )
    assert (found["gap, mean"].figure, found["gap, mean"].limit) == (0.03, 0.151)
    assert found["gap, largest"].share == pytest.approx(0.5 / 4.5)
    page = checked(text := render_report(run))
    assert "class='bad'" not in text
    assert "The means of the last 40 tokens are not judged yet" in page.text
    # The curve's limit is that of the judged means, and they are drawn.
    assert [limit.name for limit in gap_limits(run)] == ["limit of the judged mean", "limit of the largest"]
    assert "judged mean |g|" in page.text


@pytest.mark.parametrize("k3", [0.012, 0.03])
def test_a_run_of_an_earlier_version_has_no_red_row(k3: float) -> None:
    old = [
        {key: value for key, value in line.items() if key not in ("judged", "waiting")}
        for line in half_precision()
    ]
    old[2]["sum_k3"] = 260 * k3
    old[3]["asked_again"] = {"tokens": 300, "mean_abs_gap": 0.01, "max_abs_gap": 4.3, "k3": 0.01}
    run = record(receipt=old)
    found = {proof.name: proof for proof in measured_proofs(run)}
    assert "mean of the whole run" in found["gap, k3"].where
    assert "steps 1 (0.025 over 40), " in found["gap, k3"].where
    assert all(proof.share <= 1 for proof in found.values())
    assert "class='bad'" not in render_report(run)


def test_a_figure_that_waits_for_more_tokens_is_not_shown_beside_a_limit() -> None:
    run = record(receipt=half_precision()[:2])
    found = {proof.name: proof for proof in measured_proofs(run)}
    assert found["gap, mean"].limit is None
    assert found["gap, mean"].where == "not judged: 40 tokens are too few for a mean"
    checked(render_report(run))


def test_each_largest_gap_stands_beside_the_limit_of_its_own_step() -> None:
    # The limit falls during a run: a gap of the first step may be above the limit of the last.
    steps = [proven(1, max_abs_gap=3.0, max_allowed=4.0), proven(2, max_abs_gap=1.0, max_allowed=2.0)]
    again = {"tokens": 300, "mean_abs_gap": 0.01, "max_abs_gap": 4.3, "k3": 0.01, "max_allowed": 4.4}
    run = record(receipt=[HALF, steps[0], {**steps[1], "asked_again": again}])
    assert "3 of 4 nats" in checked(render_report(run)).text
    found = {proof.name: proof for proof in measured_proofs(run)}
    assert found["asked again"].limit == 4.4
    (limit,) = [limit for limit in gap_limits(run) if "largest" in limit.name]
    assert limit.points == [(1, 4.0), (2, 2.0)]


def test_a_failed_proof_has_what_where_which_tokens_and_what_to_do() -> None:
    shown_lines = [shown(1, "other"), {**shown(3, "plain"), "failed": True}]
    run = record(end=FAILED, receipt=[START, proven(1), proven(2)], summary={}, after=None, shown=shown_lines)
    page = checked(render_report(run))
    assert verdict_of(run).kind == "bad"
    for words in (
        "Stopped by proof “gap” before optimizer step 3 of 3", "Proof gap has failed", "mean 0.3 > 0.0001",
        "the weights <b>differ</b>", "look at layers.3", "The tokens with the largest gaps", "train/3#0", "-3.00e-04",
        "'plain'",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.text.count("docs/troubleshooting/proofs.md, row gap") == 1
    assert "step 3, where a proof failed" in page.text
    assert "'other'" not in page.text
    assert "The tokens with the largest gaps" not in checked(render_report(record())).text


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (
            {"ended": "interrupted", "signal": "SIGTERM", "step": 2, "max_steps": 3},
            "near",
            "Interrupted (SIGTERM) after step 2 of 3",
        ),
        (
            {"ended": "failed", "error": "OSError", "message": "no room", "step": 2, "max_steps": 3},
            "bad",
            "OSError",
        ),
        ({}, "near", "Not at its end: step 3 of 3"),
    ],
)
def test_every_other_end_has_its_verdict(end: dict[str, Any], kind: str, words: str) -> None:
    verdict = verdict_of(record(end=end))
    assert verdict.kind == kind
    assert words in verdict.line
    assert words in checked(render_report(record(end=end))).text


def test_a_finished_run_with_unproven_steps_is_not_called_good() -> None:
    assert verdict_of(record(summary={"parity": {"failed": 1}})).kind == "bad"
    assert verdict_of(record(receipt=[START])).kind == "bad"


def test_a_page_says_which_checks_were_not_made_and_what_of_the_users_was_taken() -> None:
    lines = [
        {"kind": "unproven", "step": 1, "proof": "model_gradient", "why": "a kernel refuses <float64>"},
        {"kind": "hooks", "step": 0, "taken": ["gradient hook of lm_head.weight: __main__.mine"]},
    ]
    text = checked(render_report(record(receipt=[START, *lines, proven(1)]))).text
    assert "was due and not made 1 times: a kernel refuses <float64>" in text
    assert "gradient hook of lm_head.weight: __main__.mine" in text


def test_hostile_text_stays_text_everywhere() -> None:
    run = record(
        HOSTILE, end={**FAILED, "found": HOSTILE, "cause": HOSTILE, "fix": HOSTILE, "check": HOSTILE}
    )
    run.metrics[0][f"rewards/{HOSTILE}/mean"] = run.metrics[0]["rewards/other/mean"] = 1.0
    for page in (render_report(run), render_comparison([run, record(folder=Path(HOSTILE))])):
        found = checked(page)
        assert HOSTILE in found.text
        assert "<script" not in page
        assert "<img" not in page


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values that are no mapping and no list, and of one key of each mapping."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 2)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


def written_run(folder: Path, path: tuple[Any, ...], text: str) -> Path:
    """A run's directory in which the value at a path, whose first part is the name of a file, is a text."""
    good = record(end=FAILED)
    alarm = {"kind": "alarm", "step": 1, "text": "t"}
    unproven = {"kind": "unproven", "step": 1, "proof": "p", "why": "w"}
    files: dict[str, Any] = {
        "about.json": good.about, "end.json": good.end, "summary.json": good.summary, "before.json": good.before,
        "after.json": good.after, "metrics.jsonl": good.metrics, "receipt.jsonl": [*good.receipt, alarm, unproven],
        "shown_rollouts.jsonl": [{**good.shown[0], "failed": True}],
    }  # fmt: skip
    place: Any = (files := copy.deepcopy(files))
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = text
    for name, content in files.items():
        lines = content if name.endswith("l") else [content]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "report.html").unlink(missing_ok=True)
    return folder


def places_of_a_run(folder: Path) -> list[tuple[Any, ...]]:
    """The paths of all values of a run's files."""
    written_run(folder, ("about.json", "name"), "some name")
    found = []
    for path in sorted(folder.glob("*.json*")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found += leaves(lines if path.suffix == ".jsonl" else lines[0], (path.name,))
    return found


@pytest.mark.parametrize(
    "is_chosen",
    [
        pytest.param(
            lambda path: path[-1] == "step" or path[0] == "shown_rollouts.jsonl", id="steps and rollouts"
        ),
        pytest.param(lambda path: True, id="all", marks=pytest.mark.release),
    ],
)
def test_no_value_of_a_strangers_run_is_obeyed(
    is_chosen: Callable[[tuple[Any, ...]], bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of its files become a text with tags, one at a time: the page shows it, or leaves file or line out."""
    shown = left_out = 0
    for path in filter(is_chosen, places_of_a_run(tmp_path)):
        code = main(["report", str(written_run(tmp_path, path, HOSTILE))])
        said = capsys.readouterr().err
        assert code == 0, (path, said)
        assert all(len(line) <= 500 for line in said.splitlines())
        page = (tmp_path / "report.html").read_text()
        text = checked(page).text
        assert "<script" not in page, path
        assert "<img" not in page, path
        shown += HOSTILE in text
        left_out += "lockstep: left out, because it is damaged: " in said
    assert shown >= 5
    assert left_out >= 5


def test_the_step_of_a_strangers_run_is_no_markup() -> None:
    refresh = "<meta http-equiv=refresh content='0;url=http://evil.example'>"
    page = render_report(record(shown=[{**shown(1), "step": refresh}, shown(3)]))
    assert refresh not in page
    assert "&lt;meta http-equiv=refresh" in page


def test_a_page_shows_controls_and_marks_directions() -> None:
    page = render_report(record("a\x1b[2J\u202eb\u200bc\ud800 👩\u200d💻 می\u200cخواهم"))
    page.encode()
    assert not {"\x1b", "\u202e", "\u200b", "\ud800"} & set(page)
    assert "a\\x1b[2J\\u202eb\\u200bc\\ud800 👩\u200d💻 می\u200cخواهم" in page


def test_a_page_of_a_long_run_with_long_rollouts_is_below_a_megabyte() -> None:
    long = "<&>" * 3000
    many = [log(step, **{f"rewards/f{n}/mean": 0.1 * n for n in range(6)}) for step in range(1, 801)]
    evaluation = {
        "metrics": {"eval_reward": 0.4},
        "rollouts": [
            {"prompt": f"{n}{long}", "completions": [long] * 64, "rewards": [0.5] * 64} for n in range(12)
        ],
        "turns": [shown(1, long, 400)["rollouts"][0]] * 4,
    }
    groups = [
        {**shown(step, "<&>", 4000), "rollouts": shown(step, "<&>", 4000)["rollouts"] * 4}
        for step in range(10)
    ]
    run = record(
        metrics=many,
        receipt=[START, *map(proven, range(1, 801))],
        before=evaluation,
        after=evaluation,
        shown=groups,
    )
    page = checked(render_report(run))
    assert "Curves" in page.text
    assert "Proofs" in page.text
    assert len(render_comparison([run, record(folder=Path("b"))]).encode()) < LARGEST


def test_a_run_that_has_just_begun_and_an_empty_directory_have_a_page(tmp_path: Path) -> None:
    assert "Not at its end" in checked(render_report(read_run(tmp_path))).text
    begun = RunRecord(
        tmp_path, metrics=[log(1, reward=float("nan"), grad_norm=float("inf"))], receipt=[START]
    )
    assert "No step has been proven" in checked(render_report(begun)).text


def test_scores_are_colored_by_rank_within_their_group() -> None:
    assert [rank_class(r, [-3.0, -2.0, -1.0]) for r in (-3.0, -2.0, -1.0)] == ["r0", "r2", "r4"]
    assert rank_class(0.0, [0.0, 0.0]) == "re"
    assert rank_class(None, [None, 1.0, 2.0]) == "rn"
    assert rank_class(5.0, [5.0, 5.0, 1.0, 1.0]) == "r4"
    assert rank_class(1.0, [5.0, 5.0, 1.0, 1.0]) == "r0"


def test_tokens_have_the_color_of_their_gap_and_advantage() -> None:
    assert [gap_color(gap) for gap in (0.0, 1e-9, -3e-4, 2.0, float("nan"))] == [0, 0, 3, 7, 7]
    page = turns_section([shown(1)["rollouts"][0]])
    assert "<i class='g1 a6' title='gap 1.00e-06, advantage 0.5'>tok</i>" in page
    assert "<i class='g3 a6' title='gap -3.00e-04, advantage 0.5'>tok</i>" in page
    assert "<pre class='inserted'>tok</pre>" in page


def test_curves_keep_their_peaks_and_draw_limits() -> None:
    points = [(float(step), 100.0 if step == 617 else 1.0) for step in range(1000)]
    drawing = line_chart([Series("a", points)], [Limit("limit", 50.0)])
    heights = [float(pair.split(",")[1]) for pair in drawing.split("points='")[1].split("'")[0].split()]
    assert len(heights) <= 220
    assert min(heights) < 25
    assert "class='limit'" in drawing
    assert line_chart([Series("a", [(1, None), (2, float("nan"))])]) == ""
    assert "<circle" in line_chart([Series("a", [(1, 0.0)])], log=True)
    assert stacked_bars(["a"], []) == histogram({}) == ""
    assert histogram({"a": [0.0, 0.0, 1.0, 1.0]}).count("50.0 %") == 2


def test_runs_side_by_side_show_what_differs(tmp_path: Path) -> None:
    other = record(folder=Path("runs/other"), end=FAILED)
    other.about["settings"]["learning_rate"] = 0.25
    page = checked(render_comparison([record(), other]))
    for words in (
        "some run",
        "other",
        "All proofs passed; finished",
        "Stopped by proof “gap”",
        "learning_rate",
        "0.25",
        "Held-out reward",
    ):
        assert words in page.text, words
    assert "ab12" not in page.text


def test_the_command_makes_pages_again_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        run.mkdir()
        # A kill has cut the last line short.
        (run / "metrics.jsonl").write_text(json.dumps(log(1)) + '\n{"step": 2, "lo')
        (run / "receipt.jsonl").write_text("\n".join(map(json.dumps, [START, proven(1)])) + "\n")
    assert main(["report", str(runs[0])]) == 0
    assert "step 1" in checked((runs[0] / "report.html").read_text()).text
    both = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "--output", str(both)]) == 0
    assert "reward" in checked(both.read_text()).text
    assert capsys.readouterr().out.splitlines() == [str(runs[0] / "report.html"), str(both)]
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the output directory of a run" in capsys.readouterr().err
