"""The reference pages say what the code has: fields, metrics, proofs, and the ids of known faults."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from lockstep.errors import PROOFS_PAGE, ProofError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import reference_pages as reference  # noqa: E402

SOURCE = ROOT / "src" / "lockstep"
AGAIN = "run .venv/bin/python scripts/reference_pages.py"
# Families of figures in `metrics.jsonl`; `{name}` stands for a name that is made at run time.
METRIC = re.compile(
    r'"((?:parity|sampling|staleness|completions|rewards|checked|tools|environments|agent|engine|prompts|pairs|clip_ratio'
    r'|objective|logps|val|value|loss|vespo)/[a-z_0-9/]+)"'
)
FAULT = re.compile(r"\b([TLWDPASRGBMUEFCHQ])(\d{1,2})[a-z]?\b")


def test_the_pages_are_what_the_script_writes() -> None:
    for path, text in reference.pages().items():
        assert text == path.read_text(), f"{path.name}: {AGAIN}"


ENDS = """\"\"\"Checks ends.

Proof `ends`.
Shows: every answer ended where
its request says (docs/internals/proof.md#limits).
When: every request.
\"\"\"
raise ProofError("ends", found, cause, fix)
"""


def test_a_proof_and_its_block_come_together(tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text(ENDS)
    shows = "Every answer ended where its request says ([more](../internals/proof.md#limits))."
    assert (
        f"## Every request\n\n### `ends`\n\n{shows}\n\n- When: every request. (`ends.py`)\n"
        in reference.proofs_page(tmp_path)
    )
    wrong = {
        "ends.py raises `ends`, and no docstring has the block: Proof `ends`.": ("Proof `ends`", "Of `ends`"),
        "ends.py describes `beginnings`, and nothing raises it": ("`ends`", "`ends`, `beginnings`"),
        "ends.py: a block has the lines Proof, Shows": ("When:", "Then:"),
        "ends.py: proof `ends` is made at no moment of a run: every Monday.": (
            "every request",
            "every Monday",
        ),
    }
    for message, (found, other) in wrong.items():
        file.write_text(ENDS.replace(found, other))
        with pytest.raises(SystemExit, match=re.escape(message)):
            reference.proofs_page(tmp_path)


def test_the_table_of_the_watch_names_the_proofs_that_its_events_make() -> None:
    """An event that uses a function `check_…`, or such a method of an attribute, has its module's proof in its row."""
    run = ast.parse((SOURCE / "watch/run.py").read_text())
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", ast.get_docstring(run) or "", re.M)
    listed = {
        event: set(re.findall(r"`(\w+)`", row))
        for events, row in rows
        for event in re.findall(r"`(\w+)`", events)
    }
    proofs: dict[str, set[str]] = {}
    for node in run.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lockstep."):
            tree = ast.parse(
                SOURCE.parent.joinpath(*str(node.module).split(".")).with_suffix(".py").read_text()
            )
            blocks = reference.blocks_of(ast.get_docstring(tree) or "", "")
            own = reference.raised_in(tree).union(*(block.names for block in blocks))
            proofs |= {alias.name: own for alias in node.names}
    (watch,) = (node for node in run.body if isinstance(node, ast.ClassDef))
    methods = {node.name: node for node in watch.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(methods["__init__"]):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            (target,) = node.targets if isinstance(node, ast.Assign) else [node.target]
            classes = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id[0].isupper()]
            proofs |= {ast.unparse(target): proofs[name] for name in classes if name in proofs}
    page = (reference.REFERENCE / "proofs.md").read_text()
    wrong = [f"{event}: {name}" for event, row in listed.items() for name in row if f"`{name}`" not in page]
    seen = set()
    for event, method in methods.items():
        for node in ast.walk(method):
            name = ast.unparse(node.value) if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in proofs and getattr(node, "attr", name).startswith("check"):
                seen.add(name)
                if not proofs[name] & listed.get(event, set()):
                    wrong.append(f"{event} uses {name}, which proves {sorted(proofs[name])}")
    assert {"check_rows", "self.hooks", "self.asked_again"} <= seen
    assert wrong == []


def test_every_metric_of_the_code_has_a_meaning() -> None:
    page = (reference.REFERENCE / "metrics.md").read_text()
    logged = {name for path in SOURCE.rglob("*.py") for name in METRIC.findall(path.read_text())}
    assert len(logged) > 40
    assert sorted(name for name in logged if f"`{name}`" not in page) == []


def test_every_fault_that_code_or_docs_name_is_published() -> None:
    page = (reference.REFERENCE / "faults.md").read_text()
    published = {
        f"{letter}{number}"
        for row in re.findall(r"^\| ([^|]+) \|", page, re.M)
        for letter, number in ids(row)
    }
    sources = [*(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py")]
    cited = {
        f"{letter}{number}"
        for path in sources
        if path.name != "faults.md"
        for letter, number in ids(path.read_text())
    }
    assert {"T4", "W5", "H8", "A1"} <= cited
    assert sorted(cited - published) == []


def ids(text: str) -> list[tuple[str, str]]:
    """Letter and number of each id, and of all numbers in a range such as "R1 to R5"."""
    found = FAULT.findall(text)
    for letter, first, last in re.findall(r"\b([A-Z])(\d{1,2}) to \1(\d{1,2})\b", text):
        found += [(letter, str(number)) for number in range(int(first), int(last))]
    return found


def test_every_check_that_can_fail_has_a_row_on_the_page_that_its_error_names() -> None:
    page = (ROOT / PROOFS_PAGE).read_text(encoding="utf-8")
    rows = {name for row in re.findall(r"^\| ([^|]+) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)}
    raised = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r'\bProofError\(\s*"(\w+)"', path.read_text())
    }
    assert len(raised) > 45
    assert sorted(raised - rows) == []


def test_the_message_of_a_proof_ends_with_the_page_that_explains_it() -> None:
    *_, fix, page = str(ProofError("gap", "0.3 nats", "rounding", "run in fp32")).splitlines()
    assert fix == "  what to do: run in fp32"
    assert page == "  explained in: docs/troubleshooting/proofs.md, row gap"


def test_messages_that_the_help_quotes_stand_in_the_source() -> None:
    # Long messages are written as several literals, one below the other.
    joined = [re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in SOURCE.rglob("*.py")]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting/messages.md").read_text(), re.M)
    quoted = [
        part.strip() for row in rows for quote in re.findall(r"`([^`]+)`", row) for part in quote.split("…")
    ]
    assert len(quoted) > 30
    assert [part for part in quoted if not any(part in text for text in joined)] == []
