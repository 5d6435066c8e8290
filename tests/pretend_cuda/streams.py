"""The only stream of the pretend GPU, and its events, which have always happened."""

from __future__ import annotations

from typing import Any

from .log import LOG


class Stream:
    """Stands for `torch.cuda.Stream`. All work on it is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = 0

    def synchronize(self) -> None:
        LOG.event("sync", "Stream.synchronize", "", 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LOG.event("sync", "Event.synchronize", "", 0)

    def elapsed_time(self, other: Any) -> float:
        return 0.0
