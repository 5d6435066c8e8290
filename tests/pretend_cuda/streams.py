"""The only stream of the pretend GPU, and its events, which have always happened."""

from __future__ import annotations

import time
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
    """Stands for `torch.cuda.Event`. Its time is the host's, because all work is done at once."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing, self.recorded_at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self.recorded_at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LOG.event("sync", "Event.synchronize", "", 0)

    def elapsed_time(self, end_event: Any) -> float:
        if not (
            self.enable_timing and end_event.enable_timing and self.recorded_at and end_event.recorded_at
        ):
            raise ValueError("both events must be recorded, with enable_timing")
        return (end_event.recorded_at - self.recorded_at) * 1000
