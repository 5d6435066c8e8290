"""One HTTP call of which the caller says how many bytes and seconds the answer may take.

Another program may listen where a server is expected. Its answer is read without decompression, so that the bytes in
memory are the bytes that were sent, and a limit of time covers the whole call: an answer that drips ends too.
Everything that a trainer reads from a server goes through here.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class UnboundedAnswer(Exception):
    """An answer is larger than allowed, or compressed. The message says which, without the beginning of a sentence."""


async def call(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    seconds: float,
    most: Callable[[httpx.Response], int],
    headers: dict[str, str] | None = None,
    **rest: Any,
) -> tuple[httpx.Response, bytes]:
    """Make one call. Returns the answer, of which only status and headers may be read, and its body.

    Args:
        seconds: the time limit of the whole call.
        most: number of bytes that the body of an answer may have. It sees the answer's status and headers.
        rest: as `httpx.AsyncClient.stream` takes it.

    Raises:
        TimeoutError: the call took longer.
        httpx.HTTPError: the call failed.
        UnboundedAnswer: the answer is larger, or compressed.
    """
    asked = {"accept-encoding": "identity", **(headers or {})}
    streamed = client.stream(method, url, headers=asked, timeout=None, **rest)
    async with asyncio.timeout(seconds), streamed as answer:
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnboundedAnswer("sent a compressed answer")
        limit, body = most(answer), bytearray()
        if answer.has_redirect_location:
            # Its text is for people.
            return answer, b""
        async for part in answer.aiter_raw():
            body += part
            if len(body) > limit:
                raise UnboundedAnswer(f"sent more than {limit:,} bytes")
    return answer, bytes(body)


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. Any thread may call it, also one with an event loop of its own.

    An interrupt of the thread that waits here, such as Ctrl-C, cancels the coroutine.
    """
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def known() -> T:
        if (task := asyncio.current_task()) is not None:
            begun.append((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="lockstep-http") as thread:
        result = thread.submit(asyncio.run, known())
        try:
            return result.result()
        except BaseException:
            # The end of this block waits for the thread.
            for loop, task in begun:
                with suppress(RuntimeError):  # The loop is closed: the coroutine itself has failed.
                    loop.call_soon_threadsafe(task.cancel)
            raise


def is_local(host: str) -> bool:
    """Whether a host is `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
