"""Texts of models, files and strangers are shown by terminals and pages, and steer neither."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.progress import StatusLine
from lockstep.report.live import About, LiveView, Row, print_completions
from lockstep.safe_text import complain, say, visible
from lockstep.start_up import TerminalHandler
from lockstep.terminal import Terminal

# Title, clipboard, screen, a link, the 8-bit forms, direction, no width, a surrogate, a hidden text.
ORDERS = "a\x1b]0;title\x07b\x1b]52;c;aGk=\x07c\x1b[2Jd\x9b31m\x9d\x90e\u202ef\u200bg\ud800h\U000e0041i\x00j\x7fk\rl\x08m\u2028n"  # noqa: E501
OBEYED = {sign for sign in ORDERS if not sign.isascii() or not sign.isprintable()}


def is_plain(text: str) -> bool:
    return not OBEYED & set(text)


@pytest.mark.parametrize(
    "text",
    [
        "👨\u200d👩\u200d👧\u200d👦 👩🏽\u200d💻 ❤\ufe0f\u200d🔥 🏳\ufe0f\u200d🌈 🧔\u200d♂\ufe0f 1\ufe0f\u20e3",
        "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f", "می\u200cخواهم",
        "क्\u200dष क्\u200cष", "العربية", "עברית", "র\u200d্য", "ශ\u0dca\u200dරී", "ភាសា\u200bខ្មែរ", "ภาษา\u200bไทย",
        "葛\U000e0100", "日本語 한국어 naïve", "a\nb\tc",
    ],
)  # fmt: skip
def test_every_script_and_emoji_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_what_would_be_obeyed_or_hidden_is_an_escape_and_nothing_is_lost() -> None:
    assert is_plain(visible(ORDERS))
    assert visible(ORDERS).encode("raw_unicode_escape").decode("unicode_escape") == ORDERS
    # Joiners, selectors and tags where they join and choose nothing.
    for hidden in (
        "a\u200db",
        "a\u200cb",
        "a\ufe0f",
        "😀\ufe00\ufe01",
        "😀\U000e0041",
        "\u200d",
        "x\u200by",
        "🏴\U000e0067 ",
    ):
        assert not set(hidden) & set("\u200b\u200c\u200d\ufe01\U000e0041\U000e0067") & set(visible(hidden)), (
            ascii(hidden)
        )
    assert visible("a\ufe0f") == "a\\ufe0f"


def view_of(text: str) -> LiveView:
    about = About(text, text, text)
    return LiveView(about, lambda: text, dict, lambda: (1.0, [(text, text)]), dict, alarms=lambda: [text])


def stream() -> io.TextIOWrapper:
    # As the command line sets its streams.
    return io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)


def written(file: io.TextIOWrapper) -> str:
    return file.buffer.getvalue().decode()  # type: ignore[attr-defined]


def test_nothing_that_is_printed_steers_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    rows = [
        Row(ORDERS, ORDERS, {ORDERS: 1.0}, 0.5, {ORDERS: ORDERS}, (ORDERS, "stop")),
        Row([{"role": ORDERS, "content": ORDERS}], "", {}, 0.0),
    ]
    print_completions(rows, 1, Terminal(file=out, width=200))
    Terminal(file=out, width=200).print(view_of(ORDERS).panel())
    StatusLine(Terminal(file=out)).note(ORDERS)
    Terminal(file=out).print(ORDERS, markup=False)
    say(ORDERS)
    complain(ORDERS)
    TerminalHandler().emit(logging.LogRecord("lockstep.x", logging.WARNING, "", 0, "%s", (ORDERS,), None))
    found = written(out)
    assert len(found) > 3000
    assert is_plain(found)
    assert found.count("\\x1b]52") >= 11


def test_a_live_panel_still_moves_the_cursor() -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=80)
    console.print("[red]red[/red]")
    console.clear()
    assert "\x1b[31mred" in out.getvalue()
    assert "\x1b[2J" in out.getvalue()


def write_run(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"system_prompt": text, text: 1}))
    (folder / "before.json").write_text(
        json.dumps(
            {
                "metrics": {},
                "rollouts": [
                    {"prompt": [{"role": text, "content": text}], "completions": [text], "rewards": [1.0]}
                ],
            }
        )
    )
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.1, "reward": 1.0}) + "\n")
    return folder


@pytest.mark.parametrize(
    "words",
    [["rollouts", "RUN"], ["compare", "RUN", "OTHER"], ["report", "RUN"], ["compare", "MISSING"], [ORDERS]],
)
def test_commands_about_somebody_elses_run_steer_no_terminal(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ORDERS.replace("\x00", "").replace("\ud800", "")
    places = {
        "RUN": str(write_run(tmp_path / named, ORDERS)), "OTHER": str(write_run(tmp_path / "other", "plain")),
        "MISSING": str(tmp_path / f"{named}-missing"),
    }  # fmt: skip
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "400")
    main([places.get(word, word) for word in words])
    assert "\\x1b]52" in written(out)
    assert is_plain(written(out))


def constants_of(tree: ast.AST) -> set[str]:
    """The names in a source to which nothing but constants is assigned."""
    given: dict[str, list[bool]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                given.setdefault(ast.unparse(target), []).append(is_constant(node.value, set()))
        elif isinstance(node, ast.arg):
            given.setdefault(node.arg, []).append(False)
    return {name for name, kinds in given.items() if all(kinds)}


def is_constant(node: ast.expr, constants: set[str]) -> bool:
    if isinstance(node, ast.IfExp):
        return is_constant(node.body, constants) and is_constant(node.orelse, constants)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in constants)


def test_the_library_prints_and_escapes_in_one_place_only() -> None:
    """Markup is made by `html`, whose form is a constant: no f-string, sum or `%` of the page has a tag in it."""
    folder = Path(lockstep.__file__).parent / "report/page"
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        # The style sheet is a constant of another file.
        constants = constants_of(tree) | {"STYLE"}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                assert not any("<" in str(text) or "&" in str(text) for text in texts), (
                    f"{path.name}:{node.lineno}"
                )
            # The functions of markup.py get their forms from others.
            if path.name != "markup.py" and isinstance(node, ast.Call) and node.args:
                made = getattr(node.func, "id", "") in ("Html", "html")
                assert not made or is_constant(node.args[0], constants), f"{path.name}:{node.lineno}"
