"""`make train-images`: the script runs, and its pictures and its model are what it says.

The whole run, which must learn, takes most of a minute and is run before a release. CI proves the steps of such runs
on vLLM in `test_pictures_on_vllm.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import needs_vllm
from example_scripts import example


def test_the_script_trains_on_the_transformers_engine(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("red_half").main(["--steps", "1", "--held-out", "8", "--without-vllm"])
    printed = capsys.readouterr().out
    assert f"held-out reward before: {before:.3f}" in printed
    assert f"held-out reward after 1 steps: {after:.3f}" in printed
    assert "WARNING" not in printed


@pytest.mark.release
@pytest.mark.vllm
@needs_vllm
def test_a_policy_on_vllm_learns_what_only_the_picture_shows() -> None:
    before, after = example("red_half").main([])
    assert before < 0.2
    # A policy that does not look is right in a quarter of the cases.
    assert after > 0.6


@pytest.mark.parametrize("half", ["left", "right", "top", "bottom"])
def test_only_the_named_half_is_red(half: str) -> None:
    script = example("red_half")
    pixels = np.asarray(script.picture(half, np.random.default_rng(0)), dtype=float)
    # How much of a pixel's colour is red beyond what the other colours have.
    red = pixels[..., 0] - pixels[..., 1:].max(-1)
    shown = red[script.HALVES[half]].mean()
    others = (red.sum() - red[script.HALVES[half]].sum()) / (red.size / 2)
    assert shown > 120
    assert others < shown / 2
