"""Which files of pictures are opened, however they come: a closed list of formats, and sizes that a machine can hold.

The content of a file chooses Pillow's decoder. For EPS the decoder is another program, Ghostscript.
"""

from __future__ import annotations

import ast
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets import Image as ImageFeature
from PIL import EpsImagePlugin, Image, ImageFile
from seeing import make_seeing, make_seeing_tokenizer, picture, save_seeing

from lockstep.errors import InputError
from lockstep.images import files
from lockstep.images.content import content_of
from lockstep.images.files import FORMATS, LARGEST, in_rgb
from lockstep.images.prompts import ImagePrompts
from lockstep.images.reading import has_pictures, opened, thumbnails_of_messages, with_own_decoder
from lockstep.images.urls import file_as_data_url, to_data_url
from lockstep.run.data.prompts import read_sets

REPOSITORY = Path(__file__).parents[2]
# A JPEG may have several pictures. These formats are not in the list, although Pillow writes them.
FOREIGN = ("AVIF", "DIB", "EPS", "ICNS", "ICO", "IM", "JPEG2000", "PCX", "QOI", "SGI", "SPIDER", "TGA")


def file_of(image: Image.Image, kind: str, **settings: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **settings)
    return content.getvalue()


EPS = file_of(picture(0), "EPS")


def blank(width: int, height: int) -> bytes:
    """A PNG of this size whose pixels are all 0, in a few kilobytes."""
    kinds = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)),
        (b"IDAT", blank_rows(width, height)),
    )
    parts = [*kinds, (b"IEND", b"")]
    chunks = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def blank_rows(width: int, height: int) -> bytes:
    return zlib.compress(bytes((1 + -(-width // 8)) * height), 9)


BOMB = blank(13_000, 13_000)
# Five of these are too large together, and each may be read.
LARGE = blank(8_000, 8_000)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The formats that were decoded while a test ran. The test fails if Ghostscript was started."""
    seen: list[str] = []
    load = ImageFile.ImageFile.load

    def counted(image: ImageFile.ImageFile) -> Any:
        seen.append(str(image.format))
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: seen.append("Ghostscript"))
    yield seen
    assert "Ghostscript" not in seen


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    folder = save_seeing(tmp_path_factory.mktemp("models") / "seeing")
    return ImagePrompts(make_seeing(), make_seeing_tokenizer(), folder)


def data_url(content: bytes) -> str:
    return to_data_url(picture(0)).partition(",")[0] + "," + __import__("base64").b64encode(content).decode()


def rows_of(contents: list[bytes], reader: ImagePrompts) -> None:
    given = Dataset.from_list(
        [{"prompt": "look", "images": [{"bytes": content, "path": None} for content in contents]}],
        Features({"prompt": Value("string"), "images": List(ImageFeature())}),
    )
    read_sets(given)[0]


def stream_of(contents: list[bytes], reader: ImagePrompts) -> None:
    features = Features({"prompt": Value("string"), "images": List(ImageFeature())})
    rows = [{"prompt": "look", "images": [{"bytes": content, "path": None} for content in contents]}]
    stream = Dataset.from_list(rows, features).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    read_sets({"held": stream})


def stream_with_steps_of(contents: list[bytes], reader: ImagePrompts) -> None:
    """`map`, `filter` and `rename_column` of a stream decode the pictures of the step before."""
    features = Features({"prompt": Value("string"), "pictures": List(ImageFeature())})
    rows = [{"prompt": "look", "pictures": [{"bytes": content, "path": None} for content in contents]}]
    stream = Dataset.from_list(rows, features).to_iterable_dataset()
    steps = stream.filter(lambda row: True).rename_column("pictures", "images").map(lambda row: row)
    read_sets({"held": steps})


def one_image(contents: list[bytes], reader: ImagePrompts) -> None:
    given = Dataset.from_list([{"prompt": "look", "image": {"bytes": contents[0], "path": None}}])
    read_sets(given.cast_column("image", ImageFeature()))[0]["image"]


def parts_of_messages(contents: list[bytes], reader: ImagePrompts) -> None:
    part = {"type": Value("string"), "image": ImageFeature()}
    features = Features({"prompt": List({"role": Value("string"), "content": List(part)})})
    shown = [{"type": "image", "image": {"bytes": content, "path": None}} for content in contents]
    read_sets(Dataset.from_list([{"prompt": [{"role": "user", "content": shown}]}], features))[0]["prompt"]


def raw_row(contents: list[bytes], reader: ImagePrompts) -> None:
    reader.read({"prompt": "look", "images": [{"bytes": content, "path": None} for content in contents]})


def row_of_data_urls(contents: list[bytes], reader: ImagePrompts) -> None:
    reader.read({"prompt": "look", "images": [data_url(content) for content in contents]})


def result_of_a_tool(contents: list[bytes], reader: ImagePrompts) -> None:
    content_of([{"type": "image", "image": content} for content in contents], reader.opened_pictures)


def opened_by_a_tool(contents: list[bytes], reader: ImagePrompts) -> None:
    images = [Image.open(io.BytesIO(content)) for content in contents]
    content_of([{"type": "image", "image": image} for image in images], reader.opened_pictures)


def call_of_an_agent(contents: list[bytes], reader: ImagePrompts) -> None:
    reader.files_and_pictures([data_url(content) for content in contents])


def images_of_a_function(contents: list[bytes], reader: ImagePrompts) -> None:
    reader.pictures(contents)


WAYS: list[Callable[[list[bytes], ImagePrompts], None]] = [
    rows_of, stream_of, stream_with_steps_of, one_image, parts_of_messages, raw_row, row_of_data_urls, result_of_a_tool,
    opened_by_a_tool, call_of_an_agent, images_of_a_function,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_file_whose_decoder_is_another_program_is_refused(
    way: Callable[[list[bytes], ImagePrompts], None], reader: ImagePrompts, decoded: list[str]
) -> None:
    with pytest.raises(
        InputError, match=r"in one of the formats BMP, GIF|format EPS, which is not read here"
    ):
        way([EPS], reader)
    assert decoded == []


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded(
    way: Callable[[list[bytes], ImagePrompts], None], reader: ImagePrompts, decoded: list[str]
) -> None:
    with pytest.raises(InputError, match="13000 × 13000 pixels, and 67108864 are read: make it smaller"):
        way([BOMB], reader)
    assert decoded == []


@pytest.mark.parametrize("way", [way for way in WAYS if way is not one_image])
def test_pictures_that_are_too_large_together_are_refused_before_one_is_decoded(
    way: Callable[[list[bytes], ImagePrompts], None], reader: ImagePrompts, decoded: list[str]
) -> None:
    with pytest.raises(
        InputError, match="read together have 320000000 pixels or more, and 268435456 are read"
    ):
        way([LARGE] * 5, reader)
    assert decoded == []


def test_a_picture_of_a_data_set_that_is_named_by_a_url_is_fetched_by_image_urls_alone() -> None:
    given = Dataset.from_list(
        [{"prompt": "look", "image": {"bytes": None, "path": "https://a.example/1.png"}}]
    )
    row = read_sets(given.cast_column("image", ImageFeature()))[0]
    assert row["image"] == {"bytes": None, "path": "https://a.example/1.png"}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_of_the_list_is_read_as_pillow_reads_it(kind: str, tmp_path: Path) -> None:
    content = file_of(picture(3), kind)
    (tmp_path / "named.eps").write_bytes(content)
    with Image.open(io.BytesIO(content)) as file:
        due = file.convert("RGB").tobytes()
    for given in (content, str(tmp_path / "named.eps"), data_url(content), Image.open(io.BytesIO(content))):
        assert opened(given).tobytes() == due


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_formats_are_refused_whatever_the_name_says(
    kind: str, tmp_path: Path, decoded: list[str]
) -> None:
    content = file_of(picture(3, 48, 48), kind)
    (tmp_path / "named.png").write_bytes(content)
    for given in (content, tmp_path / "named.png", data_url(content)):
        with pytest.raises(InputError, match="a picture cannot be read"):
            opened(given)
    with pytest.raises(InputError, match="a picture cannot be read"):
        file_as_data_url(content)
    with pytest.raises(InputError, match="a picture cannot be read"):
        thumbnails_of_messages([{"content": [{"type": "image", "image": data_url(content)}]}])
    assert decoded == []


def test_a_data_set_gives_the_same_images_with_the_decoder_of_ours() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    contents = [
        file_of(picture(0), "PNG"),
        file_of(picture(1), "JPEG", exif=turned),
        file_of(picture(2).convert("P"), "GIF"),
        file_of(picture(3).convert("RGBA"), "PNG"),
        file_of(picture(4), "MPO", save_all=True, append_images=[picture(5)]),
    ]
    rows = [
        {"prompt": str(i), "image": {"bytes": content, "path": None}} for i, content in enumerate(contents)
    ]
    for feature in (ImageFeature(), ImageFeature(mode="L")):
        given = Dataset.from_list(rows, Features({"prompt": Value("string"), "image": feature}))
        own = with_own_decoder(given)
        assert own is not given
        assert own.features.arrow_schema == given.features.arrow_schema
        mapped = given.to_iterable_dataset().map(lambda row: row)
        for known in (
            own,
            own.select(range(5)),
            with_own_decoder(own),
            own.to_iterable_dataset(),
            with_own_decoder(mapped),
        ):
            for row, due in zip(known, given, strict=True):
                found, image = row["image"], due["image"]
                assert (found.mode, found.size, found.format) == (image.mode, image.size, image.format)
                assert found.tobytes() == image.tobytes()
    plain = Dataset.from_list([{"prompt": "what"}])
    assert not has_pictures(plain)
    assert has_pictures(given)


def test_a_tile_that_is_larger_than_its_picture_is_refused(decoded: list[str]) -> None:
    """A TIFF of one pixel in one tile of 60,000 × 60,000 pixels."""
    whole = 60_000
    entries = [
        (256, 1),
        (257, 1),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, whole),
        (323, whole),
        (324, 8),
        (325, 8),
    ]
    table = struct.pack("<H", len(entries)) + b"".join(
        struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries
    )
    content = (
        b"II*\x00"
        + struct.pack("<I", 16)
        + zlib.compress(b"")[:8].ljust(8, b"\0")
        + table
        + struct.pack("<I", 0)
    )
    with pytest.raises(InputError, match="60000 × 60000 pixels"):
        in_rgb(content)
    assert decoded == []


@pytest.mark.parametrize("text", ["iVBORw0KGgo" * 100, "/etc/hostname/" + "a" * 300, "a\0b"])
def test_a_text_that_is_no_path_is_refused_in_a_short_sentence(text: str) -> None:
    with pytest.raises(InputError, match="a picture cannot be read") as refused:
        in_rgb(text)
    assert len(str(refused.value)) < 400


def test_a_picture_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 24 * 16)
    assert in_rgb(picture(0)).size == (24, 16)
    assert in_rgb(file_of(picture(0), "PNG")).size == (24, 16)
    with pytest.raises(InputError, match="25 × 16 pixels"):
        in_rgb(picture(0, 25))
    assert LARGEST >= 9248 * 6936, "a telephone takes pictures of this size"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="is not a file"):
        opened(tmp_path / "pipe.png")


def opens_of(tree: ast.AST) -> list[str]:
    """The places in a source that let a library choose the decoder of a picture, as text."""
    owners = {
        (alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "PIL"
        for alias in node.names
        if alias.name == "Image"
    } | {"PIL.Image"}
    called = ("load_image", "load_images", "imread", "imdecode", "decode_image", "read_image")
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "open" and ast.unparse(node.value) in owners)
        or (isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).rpartition(".")[2] in called)
    ]


def test_pictures_are_opened_at_one_place() -> None:
    found = {
        str(path.relative_to(REPOSITORY)): places
        for path in (REPOSITORY / "src").rglob("*.py")
        # Parsing takes most of the time.
        if ("PIL" in (text := path.read_text()) or "image" in text) and (places := opens_of(ast.parse(text)))
    }
    assert list(found) == ["src/lockstep/images/files.py"]
    assert len(found["src/lockstep/images/files.py"]) == 1
    for text in (
        "from PIL import Image as P\nP.open(file)",
        "import PIL.Image\nPIL.Image.open(file)",
        "load_image(url)",
    ):
        assert opens_of(ast.parse(text)), text
