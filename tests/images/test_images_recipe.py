"""The recipe `recipes/images.yaml`: its task, and a run of it on a tiny model of its architecture, with report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from seeing import save_seeing

from lockstep.cli.main import main
from lockstep.images.reading import opened, thumbnails_of_messages, thumbnails_of_row
from lockstep.images.urls import is_data_url
from lockstep.report.page.rollouts import evaluations_section, render_pictures
from lockstep.tasks.builtin import dots

RECIPE = Path(__file__).parents[2] / "recipes" / "images.yaml"
COLORS = {"red": (214, 39, 40), "blue": (31, 119, 180), "green": (44, 160, 44), "orange": (255, 127, 14)}


def counted(image: Image.Image, color: str) -> int:
    """Number of connected regions of a color."""
    left = (np.asarray(image) == COLORS[color]).all(-1)
    found = 0
    while left.any():
        found, open_places = found + 1, [tuple(np.argwhere(left)[0])]
        while open_places:
            y, x = open_places.pop()
            if 0 <= y < left.shape[0] and 0 <= x < left.shape[1] and left[y, x]:
                left[y, x] = False
                open_places += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return found


def test_the_answer_is_the_number_of_dots_of_the_named_color() -> None:
    train, held_out = dots(20, 10, seed=1)
    assert (len(train), len(held_out)) == (20, 10)
    assert sorted(row["answer"] for row in held_out) == [str(i) for i in range(10)]
    for row in train:
        color = re.search(r"How many (\w+) dots", row["prompt"][0]["content"][1]["text"])
        assert color is not None
        assert counted(row["image"], color[1]) == int(row["answer"])
    again, _ = dots(20, 10, seed=1)
    assert [row["image"].tobytes() for row in again] == [row["image"].tobytes() for row in train]
    assert not {row["image"].tobytes() for row in train} & {row["image"].tobytes() for row in held_out}


def test_the_recipe_runs_on_a_tiny_model_and_its_report_shows_the_pictures(tmp_path: Path) -> None:
    model = save_seeing(tmp_path / "model")
    small: dict[str, Any] = {
        "max_steps": 1,
        "train_size": 4,
        "eval_size": 3,
        "num_generations": 2,
        "num_generations_eval": 1,
    }
    small |= {
        "per_device_train_batch_size": 8,
        "max_completion_length": 4,
        "bf16": "false",
        "use_vllm": "false",
    }
    small |= {"gradient_checkpointing": "false", "model_name_or_path": model, "output_dir": tmp_path / "run"}
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    assert main(["grpo", "--config", str(RECIPE), *words]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    # One small picture per held-out prompt in the table, although all texts may be equal.
    assert len(re.findall(r"<img src='data:image/jpeg;base64,[^']+'", page)) == 3
    none = ["--log_multimodal", "false", "--output_dir", str(tmp_path / "without")]
    assert main(["grpo", "--config", str(RECIPE), *words, *none]) == 0
    assert "<img" not in (tmp_path / "without" / "report.html").read_text()


def test_small_pictures_are_bounded_and_show_the_picture() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8))
    tiny = Image.new("RGB", (4, 2), "red")
    rows = thumbnails_of_row("<image><image>", {"images": [noise, tiny]})
    assert all(is_data_url(url) and len(url) < 12_000 for url in rows)
    large, small = (opened(url) for url in rows)
    assert large.size == (96, 72)
    assert small.size == (96, 48)
    assert np.abs(np.asarray(small, dtype=int) - (254, 0, 0)).max() < 10
    assert len(thumbnails_of_row("<image>", {"images": [tiny] * 50})) == 8
    messages = [
        {"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "image", "image": rows[0]}]}
    ]
    assert len(thumbnails_of_messages([*messages, {"role": "user", "content": "none"}])) == 1
    assert thumbnails_of_row("text", {"answer": "4"}) == []


@pytest.mark.parametrize(
    "url",
    [
        "https://a.b/c.png",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png;base64,AA' onerror='x",
        "javascript:1",
        3,
    ],
)
def test_nothing_but_an_inline_picture_gets_into_the_page(url: Any) -> None:
    assert render_pictures({"images": [url]}) == ""


def test_equal_questions_on_different_pictures_are_different_rows() -> None:
    rows = [
        {"prompt": "which?", "images": [url], "completions": [text], "rewards": [1.0]}
        for url, text in (("data:image/png;base64,AAAA", "wombat"), ("data:image/png;base64,BBBB", "quokka"))
    ]
    page = evaluations_section({"rollouts": rows}, {"rollouts": rows})
    assert page.count("wombat") == page.count("quokka") == 2
    assert page.index("AAAA") < page.index("wombat") < page.index("BBBB") < page.index("quokka")
