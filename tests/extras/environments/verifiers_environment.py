"""An environment of verifiers for the tests: two turns, and a rubric that counts small letters."""

from __future__ import annotations

import os
from typing import Any

import verifiers as vf
from datasets import Dataset


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict[str, str]]:
        if state["input"]["info"].get("dies"):
            os._exit(9)
        return [{"role": "user", "content": "and 3?"}]


def small_letters(completion: Any, **_: Any) -> float:
    said = "".join(message["content"] or "" for message in completion if message["role"] == "assistant")
    return sum("a" <= character <= "z" for character in said) / max(len(said), 1)


def own_seed(state: Any, **_: Any) -> float:
    return state["input"]["seed"] / 2**32


def load_environment(rows: int = 8, reward: str = "letters", dies: bool = False) -> vf.Environment:
    data = [
        # The fields of `info` differ from row to row.
        {
            "question": f"what is {i} + {i}",
            "answer": str(2 * i),
            "info": {f"row {i}": i} | ({"dies": 1} if dies else {}),
        }
        for i in range(rows)
    ]
    rubric = vf.Rubric(funcs=[own_seed if reward == "seed" else small_letters])
    return TwoTurns(dataset=Dataset.from_list(data), rubric=rubric, max_turns=2)
