"""An agent of LangGraph that multiplies with a tool. It knows a base URL and a key, and nothing of Lockstep.

    pip install langgraph langchain-openai      (in any Python; that of Lockstep does not need it)
    lockstep grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl \\
        --agent_command "python examples/langgraph_agent.py" --vllm_max_model_length 4096 --max_completion_length 2048

A row of `data.jsonl` is {"prompt": [{"role": "user", "content": "What is 6 times 7?"}], "answer": "42"}. The reward
is 1 for a right answer after a call of the tool, 0.5 for another answer after such a call, and else 0.
docs/guides/agents.md
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def agent() -> Any:
    """A graph of two nodes: the model, and the tools that it calls."""
    # Reads OPENAI_BASE_URL and OPENAI_API_KEY.
    model = ChatOpenAI(model="policy").bind_tools([multiply])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", answer)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def main() -> None:
    row = json.load(sys.stdin)
    try:
        # At most three turns of the model.
        messages = agent().invoke({"messages": row["prompt"]}, {"recursion_limit": 6})["messages"]
    except GraphRecursionError:
        # It still calls the tool instead of an answer.
        print(json.dumps({"reward": 0.0}))
        return
    called = any(message.type == "tool" for message in messages)
    right = row["answer"] in messages[-1].text.split()
    print(json.dumps({"reward": (1.0 if right else 0.5) if called else 0.0}))


if __name__ == "__main__":
    main()
