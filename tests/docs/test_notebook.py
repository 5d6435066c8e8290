"""The notebook runs from top to bottom in a real kernel, whose event loop is running, and shows each step."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from conftest import needs_vllm
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


@pytest.mark.vllm
@needs_vllm
@pytest.mark.release
def test_the_notebook_runs_and_shows_a_line_per_step(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_EXAMPLE_MODEL", untied_dir)
    monkeypatch.setenv("LOCKSTEP_EXAMPLE_STEPS", "2")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "save the notebook without outputs"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    # A loop runs in the kernel while the cells run, as in a browser.
    texts = ["".join(_texts(cell)) for cell in notebook.cells]
    (training,) = [
        text for cell, text in zip(notebook.cells, texts, strict=True) if "trainer.train()" in cell.source
    ]
    assert [line.split()[1] for line in training.splitlines() if "reward" in line and "gap" in line] == [
        "1/2",
        "2/2",
    ]
    assert "held-out reward after" in training
    assert "nats" in texts[-1]


def _texts(cell: nbformat.NotebookNode) -> list[str]:
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        found.append(
            output.get("text", "") + "".join(data.get("text/html", "") or data.get("text/plain", ""))
        )
    return found
