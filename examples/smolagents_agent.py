"""An agent of smolagents that multiplies with a tool. It knows a base URL and a key, and nothing of Lockstep.

    pip install 'smolagents[openai]'      (in any Python; that of Lockstep does not need it)
    lockstep grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl \\
        --agent_command "python examples/smolagents_agent.py" --vllm_max_model_length 8192 --max_completion_length 4096

A row of `data.jsonl` is {"prompt": [{"role": "user", "content": "What is 6 times 7?"}], "answer": "42"}. The reward
is 1 for a right answer after a call of the tool, 0.5 for another answer after such a call, and else 0.
docs/guides/agents.md
"""

from __future__ import annotations

import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def main() -> None:
    row = json.load(sys.stdin)
    model = OpenAIModel(
        "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=3, verbosity_level=0)
    answer = agent.run(row["prompt"][-1]["content"])
    called = any(
        call.name == "multiply"
        for step in agent.memory.steps
        for call in getattr(step, "tool_calls", None) or []
    )
    right = str(answer).strip() == row["answer"]
    print(json.dumps({"reward": (1.0 if right else 0.5) if called else 0.0}))


if __name__ == "__main__":
    main()
