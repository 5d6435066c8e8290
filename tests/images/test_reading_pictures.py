"""Where pictures of a row come from, how prompts are expanded, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from seeing import make_seeing, make_seeing_tokenizer, mixed_rows, picture, save_seeing

from lockstep.errors import InputError
from lockstep.images.prompts import ImagePrompts
from lockstep.images.reading import images_of_row, opened, with_fetched, with_image_urls
from lockstep.images.urls import to_data_url

TEXT = {"type": "text", "text": "what"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    folder = save_seeing(tmp_path_factory.mktemp("models") / "seeing")
    return ImagePrompts(make_seeing(), make_seeing_tokenizer(), folder)


def test_two_pictures_side_by_side_are_refused_because_the_model_would_take_them_for_one(
    reader: ImagePrompts,
) -> None:
    images = [picture(0), picture(1)]
    for text in ("<|image_pad|> <|image_pad|>", "see <|image_pad|>\n<|image_pad|>"):
        assert reader.read({"prompt": text, "images": images})[1] is not None
    for text in ("<|image_pad|><|image_pad|>", "see <|image_pad|><|image_pad|> now"):
        with pytest.raises(InputError, match="two pictures stand side by side"):
            reader.read({"prompt": text, "images": images})


def as_bytes(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_picture_may_be_an_image_a_path_bytes_or_what_datasets_gives(tmp_path: Path) -> None:
    image = picture(0)
    path = tmp_path / "a.png"
    image.save(path)
    content = as_bytes(image)
    for given in (
        image,
        str(path),
        path,
        content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": str(path)},
    ):
        assert opened(given).tobytes() == image.tobytes()
    assert opened(image.convert("L")).mode == "RGB"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("https://example.org/a.png", "image_urls allows no URLs"),
        ({"path": "http://example.org/a.png"}, "image_urls allows no URLs"),
        (b"no picture", "cannot be read"),
        ("nowhere.png", "cannot be read"),
        (7, "is a int"),
        ({"bytes": None, "path": None}, "is a NoneType"),
    ],
)
def test_what_is_no_picture_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened(given)


def test_columns_and_parts_give_the_pictures_in_the_order_of_the_prompt() -> None:
    a, b, c = (picture(i) for i in range(3))
    user = {"role": "user", "content": "hello"}
    image = {"type": "image"}
    cases: list[tuple[dict[str, Any], list[Image.Image], list[str]]] = [
        ({"prompt": [user], "image": a}, [a], ["image", "text"]),
        ({"prompt": [user], "images": [a, b]}, [a, b], ["image", "image", "text"]),
        ({"prompt": [user], "images": []}, [], []),
        ({"prompt": [user], "image": None}, [], []),
        ({"prompt": [{"role": "user", "content": [TEXT, image]}], "image": a}, [a], ["text", "image"]),
        (
            {"prompt": [{"role": "user", "content": [{**image, "image": c}, TEXT, image]}], "images": [a]},
            [c, a],
            ["image", "text", "image"],
        ),
        # `datasets` gives each part the keys of all parts.
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x", "image": None}]}]},
            [],
            ["text"],
        ),
    ]
    for row, due, kinds in cases:
        messages, found = images_of_row(row)
        assert [i.tobytes() for i in found] == [i.tobytes() for i in due]
        content = messages[0]["content"]
        assert [
            part["type"] for part in content if not isinstance(content, str)
        ] == kinds or content == "hello"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": []},
            "1 image parts .* 0 pictures",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [picture(0)] * 2},
            "1 image parts",
        ),
        ({"prompt": [{"role": "system", "content": "x"}], "image": picture(0)}, "no message of the user"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "a part .*audio"),
        ({"prompt": "x", "image": picture(0), "images": [picture(0)]}, "both columns"),
        ({"prompt": "x", "images": picture(0)}, "must be a list"),
    ],
)
def test_rows_whose_pictures_do_not_fit_their_prompt_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        images_of_row(row)


def test_placeholders_stand_once_per_token_of_each_picture(reader: ImagePrompts) -> None:
    row = mixed_rows()[2]
    ids, shown = reader.read(row)
    assert shown
    image = shown.placeholder
    assert [p.tokens for p in shown.pictures] == [4, 8]
    assert np.flatnonzero(ids == image).tolist() == [
        i
        for start, p in zip(shown.starts, shown.pictures, strict=True)
        for i in range(start, start + p.tokens)
    ]
    assert (np.delete(ids, np.flatnonzero(ids == image)) == [i for i in ids if i != image]).all()
    # The tokenizer read the text once: without pictures the ids are those of the template.
    text = make_seeing_tokenizer().apply_chat_template(
        images_of_row(row)[0], add_generation_prompt=True, tokenize=False
    )
    plain = make_seeing_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert [i for i in plain if i != image] == [i for i in ids.tolist() if i != image]


def test_positions_after_the_prompt_are_those_of_the_models_own_function(reader: ImagePrompts) -> None:
    model = make_seeing()
    for row in mixed_rows()[1:]:
        ids, shown = reader.read(row)
        assert shown
        whole = torch.tensor([*ids.tolist(), 5, 6, 7, 8, 9])[None]
        grids = torch.stack([p.grid for p in shown.pictures])
        marks = (whole == shown.placeholder).int()
        due, _ = model.model.get_rope_index(whole, mm_token_type_ids=marks, image_grid_thw=grids)
        assert (shown.positions_of(whole.shape[1]) == due[:, 0].numpy()).all()
        assert (shown.positions_of(3) == due[:, 0, :3].numpy()).all()
        # In one dimension they would be others.
        assert (due[:, 0] != torch.arange(whole.shape[1])).any()


def test_equal_pixels_have_equal_digests_and_other_pixels_or_grids_others(reader: ImagePrompts) -> None:
    def digest(image: Image.Image) -> str:
        _, shown = reader.read({"prompt": [{"role": "user", "content": "x"}], "image": image})
        assert shown
        return shown.digests[0]

    assert digest(picture(0)) == digest(picture(0).copy())
    changed = picture(0)
    changed.putpixel((3, 3), (0, 0, 0))
    digests = {digest(image) for image in (picture(0), changed, picture(1), picture(0, 16, 24))}
    assert len(digests) == 4


def test_a_placeholder_that_a_user_has_typed_stays_text(reader: ImagePrompts) -> None:
    ids, shown = reader.read(
        {"prompt": [{"role": "user", "content": "<|image_pad|> is it"}], "image": picture(0)}
    )
    assert shown
    assert (ids == shown.placeholder).sum() == shown.pictures[0].tokens


def test_plain_text_has_its_own_placeholders(reader: ImagePrompts) -> None:
    ids, shown = reader.read(
        {"prompt": "a <|vision_start|><|image_pad|><|vision_end|> b", "image": picture(0)}
    )
    assert shown
    assert (ids == shown.placeholder).sum() == shown.pictures[0].tokens
    with pytest.raises(InputError, match="0 placeholders for 1 pictures"):
        reader.read({"prompt": "a", "image": picture(0)})


def test_rows_come_through_datasets_unchanged(reader: ImagePrompts) -> None:
    for row, read in zip(mixed_rows(), Dataset.from_list(mixed_rows()), strict=True):
        (ids, shown), (own, due) = reader.read(read), reader.read(row)
        assert (ids == own).all()
        assert (shown.digests if shown else ()) == (due.digests if due else ())


@pytest.mark.parametrize(
    "row", [{"image": "https://a.example/1"}, {"images": ["https://a.example/1"], "image": None}]
)
def test_every_column_with_pictures_gets_its_files_and_an_agent_gets_urls(row: dict[str, Any]) -> None:
    file = to_data_url(picture(0))
    fetched = with_fetched({"prompt": "look", **row}, {"https://a.example/1": file}.__getitem__)
    (column,) = [name for name, value in row.items() if value is not None]
    assert fetched == {"prompt": "look", **row, column: [file] if column == "images" else file}
    opened_row = {**row, column: [picture(0)] if column == "images" else picture(0)}
    shown = with_image_urls({"prompt": "look", **opened_row})
    assert shown == fetched
