"""An agent of the real smolagents, which knows only a base URL and a key. It runs in a Python of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_rollouts import Runs, Scripted, Watched, tokenizer_with
from example_scripts import EXAMPLES
from other_pythons import needs, python_with
from test_recording import check_ids

COMMAND = [str(python_with("smolagents")), str(EXAMPLES / "smolagents_agent.py")]
PROMPT = [{"role": "user", "content": "What is 6 times 7?"}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# The second turn lacks the call that smolagents requires: it says so to the model, and asks again.
RIGHT = [call("multiply", a=6, b=7), "It is 42.", call("final_answer", answer="42")]
GUESSED = [call("final_answer", answer="42")]


@needs("smolagents")
@pytest.mark.parametrize(
    # Which calls of the agent are in each branch.
    ("texts", "branches", "unmet", "reward"),
    [(RIGHT, [[0], [1, 2]], 1, 1.0), (GUESSED, [[0]], 0, 0.0)],
    ids=["right", "guessed"],
)
def test_an_unchanged_agent_is_recorded_id_for_id_and_gives_its_reward(
    texts: list[str], branches: list[list[int]], unmet: int, reward: float
) -> None:
    tokenizer = tokenizer_with()
    # The agent's own prompt has 9,000 characters, and most tokens of this tokenizer are one character.
    watched = Watched(Scripted(texts, context=1 << 15))
    (rollout,) = Runs(watched, tokenizer)(COMMAND, prompt=PROMPT, max_tokens=1 << 14, answer="42")
    assert rollout.notes["rewards"] == {"agent": reward}
    counts = rollout.notes["agent"]
    assert (counts["answered"], counts["unmet"], counts["refused"], counts["malformed"]) == (
        len(texts),
        unmet,
        0,
        0,
    )
    # A turn with a call is written again by smolagents, so that the rollout branches. A turn without one is extended.
    assert len(rollout.branches) == len(branches)
    assert counts["extended"] == len(texts) - len(branches)
    for branch, calls in zip(rollout.branches, branches, strict=True):
        check_ids(watched, branch, calls)
    shown = [tokenizer.decode(request.prompt_ids) for request in watched.requests]
    assert all("What is 6 times 7?" in prompt for prompt in shown)
    # After the first call comes the result of the tool; after the turn without a call, what smolagents says of it.
    found = [("Observation:\n42" in prompt, "Error:" in prompt) for prompt in shown]
    assert found == [(number > 0, number > 1) for number in range(len(texts))]
