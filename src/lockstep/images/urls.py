"""Images by URL, fetched only from the places that the field `image_urls` allows; and images as text: `data:` URLs.

Each URL of a dataset, of a tool's result and of an agent's message is fetched with `ImageUrls.fetch`. A fetched file is
a `data:` URL from then on: the rest of the run uses these bytes and no network. Messages that a program keeps of a
rollout contain images in this form, which JSON can hold and a browser shows.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import unquote

import httpx
from PIL import Image

from lockstep import bounded_http
from lockstep.errors import InputError
from lockstep.images.files import open_header
from lockstep.progress import waiting

_START, _ENCODED = "data:image/", ";base64"


def is_data_url(given: Any) -> bool:
    """Whether a value is an image as a `data:` URL."""
    return isinstance(given, str) and given.startswith(_START)


def to_data_url(image: Image.Image) -> str:
    """An image as a `data:` URL of a PNG file. No pixel changes."""
    file = io.BytesIO()
    # The lowest level of compression takes a fifth of the time of the default.
    image.save(file, "PNG", compress_level=1)
    return f"{_START}png{_ENCODED},{base64.b64encode(file.getvalue()).decode()}"


def file_as_data_url(content: bytes) -> str:
    """The bytes of an image file as a `data:` URL; an `InputError` if they are no image that can be read."""
    with open_header(content) as file:
        kind = Image.MIME.get(file.format or "", "")
    kind = kind.removeprefix("image/") or "unknown"
    return f"{_START}{kind}{_ENCODED},{base64.b64encode(content).decode()}"


def bytes_of_data_url(url: str) -> bytes:
    """The bytes of the file in a `data:` URL; an `InputError` if it is not the base64 text of an image."""
    kind, comma, content = url.partition(",")
    try:
        if not comma or not kind.startswith(_START) or not kind.endswith(_ENCODED):
            raise ValueError("it does not begin with data:image/…;base64,")
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InputError(f"a data: URL of an image cannot be read: {error}") from error


_PORTS = {"http": 80, "https": 443}
# Seconds of a whole fetch, bytes of a file, and redirects of a fetch.
_TIME, LARGEST, _REDIRECTS = 30.0, 32 << 20, 5
# Bytes of fetched files that are kept for rows that name the same URL.
KEPT_BYTES = 256 << 20
# Python and servers read these in different ways.
_AMBIGUOUS = re.compile(r"[\s\\\x00-\x20\x7f]")


def is_url(image: Any) -> bool:
    """Whether an image is given as the URL of a file elsewhere. A `data:` URL contains its file."""
    return isinstance(image, str) and "://" in image and not is_data_url(image)


class ImageUrls:
    """Fetches images. Any thread may call it.

    Args:
        allowed: beginnings of URLs, for example `https://example.org/pictures/`. Scheme, host and port must be equal
            to those of a URL, and the path must be a beginning of its path, in whole parts.

    Raises:
        InputError: a beginning is not of this form.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = [_prefix(text) for text in allowed]
        self._lock = threading.Lock()
        self._files: OrderedDict[str, Future[str]] = OrderedDict()
        self._size = 0

    def fetch(self, url: str) -> str:
        """The file of a URL as a `data:` URL. Rows that name the same URL share one fetch, as long as its file is kept.

        Raises:
            InputError: the URL or a redirect is not allowed, the file is too large or no image, or it comes too late.
        """
        checked = self.check(url)
        with self._lock:
            found = self._files.get(url)
            if known := found is not None:
                self._files.move_to_end(url)
            else:
                found = self._files[url] = Future()
        if known:
            return found.result()
        try:
            file = file_as_data_url(self._fetched(checked))
        except BaseException as error:
            with self._lock:
                del self._files[url]
            found.set_exception(error)
            raise
        found.set_result(file)
        with self._lock:
            self._size += len(file)
            for name, other in list(self._files.items()):
                if self._size > KEPT_BYTES and other.done():
                    self._size -= len(self._files.pop(name).result())
        return file

    def check(self, text: str) -> httpx.URL:
        """The URL; an `InputError` if it is not allowed."""
        url = _parsed(text)
        if url is None or not any(_covers(prefix, url) for prefix in self._allowed):
            shown = _shown(url) if url is not None else "a picture's URL"
            why = "URL that begins like it" if self._allowed else "URLs"
            raise InputError(
                f"{shown} is not fetched: image_urls allows no {why}. Give a file or its bytes, or add the "
                "beginning of the URL to image_urls"
            )
        return url

    def _fetched(self, url: httpx.URL) -> bytes:
        first = _shown(url)
        try:
            with waiting(f"the picture at {first}", _TIME):
                return bounded_http.run(self._read(url))
        except TimeoutError:
            raise InputError(f"{first} cannot be fetched: it takes longer than {_TIME:g} s") from None
        except bounded_http.UnboundedAnswer as error:
            raise InputError(f"{first} cannot be fetched: the server {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # The error's own text may contain the whole URL.
            raise InputError(f"{first} cannot be fetched: {type(error).__name__}") from None

    async def _read(self, url: httpx.URL) -> bytes:
        first, deadline = _shown(url), time.monotonic() + _TIME
        async with httpx.AsyncClient() as client:
            for _ in range(_REDIRECTS + 1):
                left, most = deadline - time.monotonic(), lambda _: LARGEST
                answer, body = await bounded_http.call(client, "GET", str(url), seconds=left, most=most)
                if answer.has_redirect_location:
                    url = self.check(str(url.join(answer.headers["location"])))
                elif answer.status_code == 200:
                    return body
                else:
                    why = f"the server answers with status {answer.status_code}"
                    raise InputError(f"{first} cannot be fetched: {why}")
        raise InputError(f"{first} cannot be fetched: it has more than {_REDIRECTS} redirects")


def _prefix(text: str) -> httpx.URL:
    url = _parsed(text)
    if url is None or url.query or url.fragment:
        raise InputError(
            f"image_urls contains {text!r:.100}; each entry must be the beginning of a URL, such as "
            "https://example.org/pictures/, with http or https, without a user's name, a query and dots as "
            "parts of its path"
        )
    return url


def _parsed(text: str) -> httpx.URL | None:
    """A URL that can only be read in one way; None: it is something else."""
    if _AMBIGUOUS.search(text):
        return None
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return None
    path = text.partition("://")[2].partition("?")[0].partition("#")[0]
    # A server may decode a path several times.
    while (decoded := unquote(path)) != path:
        if decoded.count("/") != path.count("/") or "\\" in decoded:
            return None
        path = decoded
    if url.scheme not in _PORTS or not url.host or url.userinfo or {".", ".."} & set(path.split("/")[1:]):
        return None
    return url


def _covers(prefix: httpx.URL, url: httpx.URL) -> bool:
    ends = [(u.scheme, u.raw_host, u.port or _PORTS[u.scheme]) for u in (prefix, url)]
    begin, path = prefix.path.rstrip("/"), url.path
    return ends[0] == ends[1] and (path == begin or path.startswith(begin + "/"))


def _shown(url: httpx.URL) -> str:
    """A URL in an error: without what may be secret in it."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))[:200]


NO_URLS = ImageUrls()
