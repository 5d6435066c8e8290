"""The calls of a push are sent together where possible, and never before the answers that they depend on."""

from __future__ import annotations

import pytest
from conftest import VLLM
from faulty_proxy import faulty_proxy
from servers import Server, connect
from tiny import make_model

from lockstep.errors import EngineLost
from lockstep.weights.push import push_weights

pytestmark = VLLM

RESETS = ("/reset_encoder_cache", "/reset_prefix_cache")
# The calls of each row may begin only when all calls of the rows before it have been answered.
STEPS = (
    ("/is_paused",),
    ("/start_weight_update",),
    ("/update_weights",),
    ("/finish_weight_update",),
    RESETS,
    ("/update_weight_version",),
)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_no_step_begins_before_the_one_that_it_needs_has_ended(server: Server, transport: str) -> None:
    with faulty_proxy(server.url) as proxy:
        engine = connect(proxy.url, transport=transport)
        proxy.order.clear()
        proxy.together = {"/pause": {"/start_weight_update"}, **{path: set(RESETS) for path in RESETS}}
        proxy.rule = lambda path: "slow" if path == "/pause" or any(path in step for step in STEPS) else None
        push_weights(make_model(), engine, 1)
        engine.close()
        order = proxy.order
    for first, then in zip(STEPS, (*STEPS[1:], ("/resume",)), strict=True):
        ended = [i for i, path in enumerate(order) if path in {f"{name}!" for name in first}]
        began = [i for i, path in enumerate(order) if path in then]
        assert len(ended) >= len(first), (first, order)
        assert max(ended) < min(began), (first, then, order)
    # The answer to `pause` comes late, and the trainer still waits for it.
    assert order.index("/pause") < order.index("/start_weight_update")
    assert order.index("/pause!") < order.index("/finish_weight_update")
    # Calls that do not depend on each other do not wait for each other.
    assert max(order.index(path) for path in RESETS) < min(order.index(f"{path}!") for path in RESETS)


def test_a_step_that_fails_leaves_the_engine_closed_until_a_whole_push(server: Server) -> None:
    model = make_model()
    with faulty_proxy(server.url) as proxy:
        engine = connect(proxy.url)
        push_weights(model, engine, 1)
        for number, path in enumerate(("/pause", "/is_paused", "/start_weight_update", *RESETS), start=1):
            proxy.order.clear()
            proxy.once("500", path)
            with pytest.raises(EngineLost):
                push_weights(model, engine, 2 * number)
            assert engine.version is None, path
            assert not {"/update_weight_version", "/resume"} & set(proxy.order), path
            push_weights(model, engine, 2 * number + 1)
            assert engine.version == 2 * number + 1, path
        engine.close()
