"""Questions that only a picture answers: how many dots of one color are in it? For models that see images.

The pictures are drawn here. They show up to nine dots of each of four colors, which do not overlap. `recipes/images.yaml` uses the
task.
"""

from __future__ import annotations

import itertools
import random

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw

_COLORS = {"red": (214, 39, 40), "blue": (31, 119, 180), "green": (44, 160, 44), "orange": (255, 127, 14)}
# Side of a picture and of the cell of one dot, in pixels. 224 is a multiple of the patches of the usual models.
_SIDE, _CELL = 224, 28
_MOST = 9


def dots(train_size: int, eval_size: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and evaluation problems with columns `prompt` (messages), `image` and `answer` (text).

    Each picture is drawn for one problem. All answers from 0 to 9 are equally frequent.
    """
    draw = random.Random(seed)
    held_out, train = (_picture_rows(count, draw) for count in (eval_size, train_size))
    return train, held_out


def _picture_rows(count: int, draw: random.Random) -> Dataset:
    rows = []
    answers = [i % (_MOST + 1) for i in range(count)]
    draw.shuffle(answers)
    for answer in answers:
        color = draw.choice(list(_COLORS))
        counts = {name: draw.randint(0, _MOST) for name in _COLORS} | {color: answer}
        parts = [{"type": "image", "text": None}, {"type": "text", "text": _color_question(color)}]
        prompt = [{"role": "user", "content": parts}]
        rows.append({"prompt": prompt, "image": _picture(counts, draw), "answer": str(answer)})
    parts_of_message = List({"type": Value("string"), "text": Value("string")})
    messages = List({"role": Value("string"), "content": parts_of_message})
    # Without rows there would be nothing to see the columns by.
    return Dataset.from_list(rows, Features({"prompt": messages, "image": Image(), "answer": Value("string")}))


def _color_question(color: str) -> str:
    return f"How many {color} dots are in the picture? Answer with the number only."


def _picture(counts: dict[str, int], draw: random.Random) -> Pictures.Image:
    found = Pictures.new("RGB", (_SIDE, _SIDE), "white")
    brush = ImageDraw.Draw(found)
    cells = list(itertools.product(range(0, _SIDE, _CELL), repeat=2))
    places = iter(draw.sample(cells, sum(counts.values())))
    for name, count in counts.items():
        for x, y in itertools.islice(places, count):
            radius = draw.randint(6, 10)
            center = [draw.randint(radius + 1, _CELL - radius - 1) + corner for corner in (x, y)]
            brush.ellipse([c - radius for c in center] + [c + radius for c in center], fill=_COLORS[name])
    return found
