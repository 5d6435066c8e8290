"""The table of completions: its rows, the rows that it omits, and text that looks like markup."""

from __future__ import annotations

import io

from rich.console import Console

from lockstep.report.live import Row, chosen_rows, print_completions


def row(prompt: object, completion: str = "an answer", **fields: object) -> Row:
    return Row(**{"prompt": prompt, "completion": completion, "scores": {}, "advantage": 0.0, **fields})  # type: ignore[arg-type]


def printed(rows: list[Row], step: int = 7) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_completions(rows, step, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_row_is_there_with_its_numbers_and_what_rewards_said() -> None:
    shown = printed(
        [
            row("one?", "uno", scores={"exact": 1.0, "style": None}, advantage=0.125, extra={"parsed": "1"}),
            row("two?", "due", scores={"exact": 0.25, "style": 0.5}, advantage=-3.0),
        ]
    )
    lines = shown.splitlines()
    first, second = (next(line for line in lines if word in line) for word in ("uno", "due"))
    assert "Step 7" in shown
    assert all(name in shown for name in ("Prompt", "Completion", "exact", "style", "Advantage", "parsed"))
    assert [cell.strip() for cell in first.strip("│ ").split("│")] == ["one?", "uno", "1.00", "", "0.12", "1"]
    assert [cell.strip() for cell in second.split("│")[2:-2]] == ["two?", "due", "0.25", "0.50", "-3.00", ""]


def test_the_finish_reasons_of_all_turns_are_shown_where_there_are_several() -> None:
    shown = printed(
        [row("one?", "uno", finish_reasons=("stop", "length")), row("two?", "due", finish_reasons=("stop",))]
    )
    cells = [
        [cell.strip() for cell in line.split("│")]
        for line in shown.splitlines()
        if "uno" in line or "due" in line
    ]
    assert [line[-3] for line in cells] == ["stop, length", "stop"]
    assert "Finish reasons" in shown
    assert "Finish reasons" not in printed([row("two?", "due", finish_reasons=("stop",))])


def test_brackets_in_a_completion_are_no_markup() -> None:
    assert "[bold]no[/bold] [/x]" in printed([row("[red]p", "[bold]no[/bold] [/x]")])


def test_messages_are_shown_with_their_roles() -> None:
    shown = printed([row([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])])
    assert all(word in shown for word in ("SYSTEM", "be brief", "USER", "hello"))


def test_few_rows_are_of_many_prompts_and_all_of_them_by_default() -> None:
    rows = [row(f"p{place // 4}", str(place)) for place in range(16)]
    assert chosen_rows(rows, None, unique_prompts=False) == rows
    assert chosen_rows(rows, 99, unique_prompts=False) == rows
    assert [r.prompt for r in chosen_rows(rows, 4, unique_prompts=False)] == ["p0", "p1", "p2", "p3"]


def test_one_row_a_prompt_is_its_first() -> None:
    rows = [row("a", "1"), row("b", "2"), row("a", "3"), row(["a"], "4")]
    assert [r.completion for r in chosen_rows(rows, None, unique_prompts=True)] == ["1", "2", "4"]
    assert [r.completion for r in chosen_rows(rows, 1, unique_prompts=True)] == ["1"]
