"""`report_to` with a real tracker: it stores exactly the figures that the run logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from methods import GROUPS, PAIRS, PROMPTS, make

from lockstep.contract.protocol import Engine

tensorboard = pytest.importorskip("tensorboard", reason="TensorBoard is not installed here")

Curves = dict[str, list[tuple[int, float]]]
RUNS: dict[str, dict[str, Any]] = {"GRPO": {**GROUPS, "beta": 0.04}, "OnlineDPO": PAIRS}
SEEN = {
    "train/loss", "train/grad_norm", "train/reward", "train/rewards/by_length/mean", "train/kl", "train/entropy",
    "train/parity/max_abs_gap", "train/parity/k3", "train/sampling/effective_sample_size",
    "train/completions/mean_length",
    "eval/reward", "eval/completions/mean_length",
}  # fmt: skip


def kept(folder: Path) -> Curves:
    """Every scalar of the event files in a folder, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def logged(run: Any) -> Curves:
    """The same curves from the trainer's own log, under the names that `transformers` gives a tracker."""
    found: Curves = {}
    for log in run.state.log_history:
        for name, value in log.items():
            if name != "step":
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                found.setdefault(tag, []).append((log["step"], value))
    return found


@pytest.mark.parametrize("method", sorted(RUNS))
def test_tensorboard_keeps_every_figure_of_every_log_at_its_step(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    fields = {
        **RUNS[method],
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "tensorboard",
    }
    run = make(method, untied_dir, tmp_path, hf_engine, fields, eval_dataset=PROMPTS.select(range(3)))
    run.train()
    expected, found = logged(run), kept(tmp_path / "events")
    assert found.keys() == expected.keys()
    for tag, curve in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in curve], tag
        # Event files store single precision.
        assert [value for _, value in found[tag]] == pytest.approx(
            [v for _, v in curve], rel=1e-6, nan_ok=True
        ), tag
    assert SEEN - {"train/kl" if method == "OnlineDPO" else ""} <= found.keys()
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["eval/reward"]] == [2, 4]
    # The curves are not flat and not empty: a tracker that stored zeros would fail.
    assert len({value for _, value in found["train/reward"]}) > 1
    assert all(value > 0 for _, value in found["train/parity/max_abs_gap"])
