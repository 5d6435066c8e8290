"""Pictures by URL: from a real server on this machine, only from where `image_urls` allows, and each file once."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from looking import gaps, look
from seeing import picture, save_seeing

from lockstep import GRPOConfig
from lockstep.errors import InputError
from lockstep.images import urls
from lockstep.images.reading import opened
from lockstep.images.urls import ImageUrls


class Place(ThreadingHTTPServer):
    """A server of pictures. Each picture is other noise each time that it is asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[str] = []
        # By path: where it leads to.
        self.moved: dict[str, str] = {}

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Answers(BaseHTTPRequestHandler):
    server: Place

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path in self.server.moved:
            self.send_response(302)
            self.send_header("location", self.server.moved[self.path])
            self.end_headers()
        elif "/none" in self.path:
            self.send_error(404)
        else:
            file = io.BytesIO(b"no picture")
            if "/text" not in self.path:
                picture(len(self.server.asked), 16, 16).save(file, "PNG")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file.getvalue())

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Place() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


ALLOWED = ["https://a.example/pictures", "http://b.example:8080"]


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example/pictures/1.png",
        "HTTPS://A.example:443/pictures/1.png?size=2",
        "https://a.example/pictures",
        "http://b.example:8080/any/where.png",
    ],
)
def test_urls_that_begin_as_allowed_are_allowed(url: str) -> None:
    ImageUrls(ALLOWED).check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example.evil.com/pictures/1.png",
        "https://a.example@evil.com/pictures/1.png",
        "https://me:secret@a.example/pictures/1.png",
        "https://evil.com#https://a.example/pictures/1.png",
        "https://evil.com\\@a.example/pictures/1.png",
        "http://a.example/pictures/1.png",
        "https://a.example:444/pictures/1.png",
        "https://a.example/pictures-of-others/1.png",
        "https://a.example/pictures/../private/1.png",
        "https://a.example/pictures/%2e%2e/private/1.png",
        "https://a.example/pictures/%252e%252e/private/1.png",
        "https://a.example/pictures/..%2fprivate/1.png",
        "https://a.example/pictures/..%5cprivate/1.png",
        "https://a.example/pictures/ 1.png",
        "https://a.example/pictures/1.png\r\nHost: evil.com",
        "http://b.example:8080.evil.com/1.png",
        "ftp://a.example/pictures/1.png",
        "file:///pictures/1.png",
        "https:///pictures/1.png",
    ],
)
def test_all_other_urls_are_refused_and_nothing_secret_is_shown(url: str) -> None:
    with pytest.raises(InputError, match="add the beginning of the URL to image_urls") as found:
        ImageUrls(ALLOWED).check(url)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    "entry",
    [
        "a.example",
        "ftp://a.example",
        "https://me:pw@a.example",
        "https://a.example/?a=1",
        "https://a.example/..",
        "https://",
    ],
)
def test_an_entry_that_is_no_beginning_of_a_url_is_refused(entry: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"image_urls contains .*; each entry must be the beginning of a URL"
    ):
        GRPOConfig(output_dir=str(tmp_path), image_urls=["https://b.example", entry])


def test_a_text_instead_of_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"image_urls='https://a.example'; it must be a list"):
        GRPOConfig(output_dir=str(tmp_path), image_urls="https://a.example")


def test_a_file_is_fetched_once_also_by_many_threads(place: Place) -> None:
    known = ImageUrls([place.url("/")])
    with ThreadPoolExecutor(8) as pool:
        files = set(pool.map(known.fetch, [place.url("/1.png?key=secret")] * 16))
    assert (len(files), place.asked) == (1, ["/1.png?key=secret"])
    assert opened(files.pop()).tobytes() == picture(1, 16, 16).tobytes()


def test_files_that_are_not_kept_any_more_are_fetched_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ImageUrls([place.url("/")])
    monkeypatch.setattr(urls, "KEPT_BYTES", len(known.fetch(place.url("/1.png"))) * 2)
    for name in ("/1.png", "/2.png", "/1.png", "/3.png", "/1.png", "/2.png"):
        known.fetch(place.url(name))
    assert place.asked == ["/1.png", "/2.png", "/3.png", "/2.png"]


def test_a_redirect_must_be_allowed_too(place: Place) -> None:
    place.moved = {
        "/open/1": "/open/2",
        "/open/out": "/private/1.png?key=secret",
        "/open/far": "https://evil.com/1.png",
        "/open/round": "/open/round",
    }
    known = ImageUrls([place.url("/open")])
    known.fetch(place.url("/open/1"))
    for path in ("/open/out", "/open/far"):
        with pytest.raises(InputError, match="is not fetched: image_urls allows no URL") as found:
            known.fetch(place.url(path))
        assert "secret" not in str(found.value)
    with pytest.raises(InputError, match="more than 5 redirects"):
        known.fetch(place.url("/open/round"))
    assert not [path for path in place.asked if "private" in path]


@pytest.mark.parametrize(
    ("path", "limits", "message"),
    [
        ("/none.png", {}, "cannot be fetched: the server answers with status 404"),
        ("/text.png", {}, "a picture cannot be read"),
        ("/1.png", {"LARGEST": 9}, "cannot be fetched: the server sent more than 9 bytes"),
        ("/1.png", {"_TIME": -1.0}, "cannot be fetched: it takes longer than -1 s"),
    ],
)
def test_a_file_that_cannot_be_had_is_one_error(
    path: str, limits: dict[str, Any], message: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(urls, name, value)
    known = ImageUrls([place.url("/")])
    with pytest.raises(InputError, match=message) as found:
        known.fetch(place.url(path + "?key=secret"))
    assert "secret" not in str(found.value)
    monkeypatch.undo()
    assert known.fetch(place.url("/1.png?key=secret"))


def test_a_server_that_is_gone_is_an_error_without_the_query() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(InputError, match=r"/1\.png cannot be fetched: ConnectError") as found:
        ImageUrls([url]).fetch(f"{url}/1.png?key=secret")
    assert "secret" not in str(found.value)


def test_a_run_learns_from_the_bytes_that_it_fetched_once(place: Place, tmp_path: Path) -> None:
    """In a column, and in both forms of parts.

    The server shows another picture each time: the bytes stay those of the first.
    """
    folder, text = save_seeing(tmp_path / "model"), {"type": "text", "text": "what is it"}
    first, other = place.url("/1.png"), place.url("/2.png")
    parts = [{"type": "image", "image": first}, {"type": "image_url", "image_url": {"url": other}}]
    rows = [
        {"prompt": [{"role": "user", "content": [part, text]}], "images": None} for part in [*parts, parts[0]]
    ]
    rows += [{"prompt": [{"role": "user", "content": [text]}], "images": [other, first]}]
    seen: list[Any] = []

    def reward(prompts: Any, images: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend([*prompts, *images])
        return [float(len(str(text)) % 3) for text in completions]

    fields = {"use_vllm": False, "max_steps": 1, "rehearse_rewards": False, "reward_funcs": reward}
    # As on the command line.
    trainer = look(folder, tmp_path, rows, image_urls=[place.url("/")], **fields)
    trainer.train()
    assert sorted(place.asked) == ["/1.png", "/2.png"]
    assert max(gaps(trainer)) < 1e-3
    digests = [p.pictures.digests for p in trainer.loop.prompts if p.pictures]
    assert digests[3] == (*digests[1], *digests[0])
    assert digests[2] == digests[0] != digests[1]
    assert "127.0.0.1" not in json.dumps(seen)
    with pytest.raises(
        InputError,
        match=r"prompt train/0: http://127.0.0.1:\d+/1.png is not fetched: image_urls allows no URLs",
    ):
        look(folder, tmp_path, rows, **fields)
