"""Rollouts that agents make through a real gateway, on engines of the tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny import END, make_tokenizer

from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.extras.agents.agent_program import Agent, AgentProgram, Extensions
from lockstep.extras.agents.request_fields import RunLimits
from lockstep.extras.agents.web import Gateway
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.driver import Driver, Start
from lockstep.rollouts.group import Prompt, Rollout
from lockstep.watch.custody import Record

LIMIT = 60.0
HELLO = [{"role": "user", "content": "hello"}]
# Shows tools and tool calls in the format that Qwen and others use.
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_with(template: str = TEMPLATE) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


class Watched:
    """An engine whose requests and completions are kept."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: list[GenerationRequest] = []
        self.completions: list[Completion] = []
        self.given_up: list[RequestKey] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def serve(self, inbox: Inbox) -> None:
        self.inbox = inbox
        taken, answer, given_up = inbox.taken, inbox.answer, inbox.given_up

        @contextmanager
        def taking(working: int | None, wait: float) -> Iterator[Any]:
            with taken(working, wait) as requests:
                self.requests += requests or []
                yield requests

        def answered(completion: Completion, *expected: Any) -> None:
            self.completions.append(completion)
            answer(completion, *expected)

        def dropped() -> list[RequestKey]:
            self.given_up += (keys := given_up())
            return keys

        inbox.taken, inbox.answer, inbox.given_up = taking, answered, dropped  # type: ignore[method-assign]
        self.engine.serve(inbox)


class Scripted:
    """An engine that says prepared texts, one per request, each with an end token.

    A request whose text is None gets no answer.
    """

    version = 0

    def __init__(self, texts: Sequence[str | None], context: int = 512) -> None:
        self.texts = list(texts)
        self._settings = SimpleNamespace(max_model_len=context, vocab_size=384, request_limits={})
        self._tokenizer = make_tokenizer()
        self.held, self.dropped = threading.Event(), threading.Event()

    def settings(self) -> Any:
        return self._settings

    def serve(self, inbox: Inbox) -> None:
        while True:
            with inbox.taken(None, LIMIT) as requests:
                if requests is None:
                    return
            if inbox.given_up():
                self.dropped.set()
            for request in requests:
                text = self.texts.pop(0)
                if text is None:
                    self.held.set()
                    continue
                ids = self._tokenizer(text + END)["input_ids"][: request.sampling.max_tokens]
                reason = "stop" if ids[-1] == self._tokenizer.eos_token_id else "length"
                logprobs, versions = np.full(len(ids), -1.0), np.zeros(len(ids), np.int64)
                inbox.answer(
                    Completion(request.key, request.prompt_ids, ids, logprobs, versions, reason), [0]
                )
            inbox.settle()


class Runs:
    """Makes rollouts of one engine with agents."""

    def __init__(self, engine: Any, tokenizer: Any, after: Callable[[], None] = lambda: None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        # Called when the rollouts are there, while the gateway still answers.
        self._after = after

    def __call__(
        self,
        agent: Callable[..., Any] | list[str],
        *,
        count: int = 1,
        max_tokens: int = 96,
        timeout: float = LIMIT,
        prompt: Any = HELLO,
        seed: int = 0,
        **columns: Any,
    ) -> list[Rollout]:
        sampling = Sampling(max_tokens=max_tokens)
        function, command = (None, tuple(agent)) if isinstance(agent, list) else (agent, None)
        gateway = Gateway(RunLimits("tiny", sampling))
        extensions = Extensions(self.tokenizer, [self.tokenizer.eos_token_id])
        row = Prompt("p", extensions(()).prompt(HELLO), prompt, columns)
        starts = [Start(row, RequestKey("p", i), seed + i, sampling) for i in range(count)]
        try:
            with Driver(self.engine, self.tokenizer, Record) as driver:
                made, reader = Agent(function, command, timeout), PromptReader(self.tokenizer)
                program = AgentProgram(made, gateway, extensions, reader)
                found = driver.run(starts, program)
            self._after()
        finally:
            gateway.close()
        return [found[start.key] for start in starts]
