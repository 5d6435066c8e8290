"""An agent of the real LangGraph, which knows only a base URL and a key. It runs in a Python of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_rollouts import Runs, Scripted, Watched, tokenizer_with
from example_scripts import EXAMPLES
from other_pythons import needs, python_with
from test_recording import check_ids

COMMAND = [str(python_with("langgraph")), str(EXAMPLES / "langgraph_agent.py")]
PROMPT = [{"role": "user", "content": "What is 6 times 7?"}]


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'multiply', 'arguments': arguments})}\n</tool_call>"


@needs("langgraph")
@pytest.mark.parametrize(
    # What the second prompt must show.
    ("texts", "shown", "reward"),
    [
        ([call(a=6, b=7), "It is 42"], "<|tool|>42<|end|>", 1.0),
        (["Let me see. " + call(a=6, b=8), "It is 48"], "<|tool|>48<|end|>", 0.5),
        # LangGraph tells the model what is wrong with a call.
        ([call(a=6), "It is 42"], "<|tool|>Error", 1.0),
        (["It is 42"], "", 0.0),
        ([call(a=6, b=7)] * 3, "<|tool|>42<|end|>", 0.0),
    ],
    ids=["right", "wrong", "bad call", "guessed", "no answer"],
)
def test_an_unchanged_graph_is_recorded_id_for_id_in_one_branch_and_gives_its_reward(
    texts: list[str], shown: str, reward: float
) -> None:
    tokenizer = tokenizer_with()
    watched = Watched(Scripted(texts, context=4096))
    (rollout,) = Runs(watched, tokenizer)(COMMAND, prompt=PROMPT, max_tokens=2048, answer="42")
    assert rollout.notes.get("failed") is None
    assert rollout.notes["rewards"] == {"agent": reward}
    counts = rollout.notes["agent"]
    assert (counts["answered"], counts["refused"], counts["malformed"]) == (len(texts), 0, 0)
    # LangGraph sends its history back as it was, so that every call extends the ids of the last one.
    (branch,) = rollout.branches
    assert counts["extended"] == len(texts) - 1
    check_ids(watched, branch, list(range(len(texts))))
    assert shown in tokenizer.decode(watched.requests[-1].prompt_ids)
