"""The pause of a server at the beginning of a push."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.engines.servers.set import Pauses


@pytest.mark.parametrize("ahead", [True, False])
def test_weights_wait_for_the_end_of_a_step_that_was_begun_ahead(ahead: bool) -> None:
    done: list[str] = []

    class Pause:
        def done(self) -> bool:
            return False

        def result(self) -> None:
            done.append("every step has ended")

    server = SimpleNamespace(
        world_size=1,
        settings=SimpleNamespace(async_scheduling=ahead),
        begin=lambda *call, **fields: Pause(),
        together=lambda *calls: ([{"open": False}], {"is_paused": True}),
        call=lambda method, path, *rest: done.append(path),
    )
    begun: Future[Any] = Future()
    servers = SimpleNamespace(all=[server], submit=lambda call: begun.set_result(call(server)) or [begun])
    Pauses(servers).begin()  # type: ignore[arg-type]
    assert done == [*(["every step has ended"] if ahead else []), "/start_weight_update"]
