"""The agent of a run: from a trainer's argument `agent` to the gateway and the program of its rollouts.

It has the same methods as `RolloutTools` (`training/generate/rollouts/tools.py`): a run has either tools or an agent. The rank that
holds the engine serves the gateway and runs the agents.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.gateway.agents import Agent
from lockstep.gateway.parameters import RunLimits
from lockstep.gateway.program import AGENT_REWARD, AgentProgram, Extensions
from lockstep.gateway.recording import Counts
from lockstep.gateway.web import Gateway
from lockstep.images.prompts import ImagePrompts
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import render_prompt
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.sampling import sampling_of

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class RolloutAgents:
    """The agents of a run, and the gateway that they call.

    Args:
        agent: a function `agent(base_url, api_key, row)`, or a command line.
        model: the policy's name or directory. The gateway serves it under the last part of this name.

    Raises:
        InputError: the agent is neither, or fields contradict an agent.
    """

    # Rewards need nothing that is on one rank only.
    has_environments = False
    # The engine's thread waits for no agent, and runs none.
    calls = None
    rehearsed: Callable[[Any], Any] | None = None
    # What the agents return is one more score.
    reward_names = (AGENT_REWARD,)

    def __init__(self, agent: Any, config: OnlineConfig, ranks: Ranks, model: str) -> None:
        _check(config)
        self._agent = agent_of(agent, config.agent_timeout)
        self._config, self._ranks, self._model = config, ranks, Path(model).name
        self._extensions: Extensions | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._gateway: Gateway | None = None
        self._images: ImagePrompts | None = None
        self._end_ids: Sequence[int] = ()

    @property
    def rewards(self) -> dict[str, Any]:
        """The arguments `own` and `environment_of` of a scorer."""
        return {"own": self.reward_names, "environment_of": None}

    def open(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], images: ImagePrompts | None = None
    ) -> None:
        """Prepare the conversations of this tokenizer.

        Args:
            images: reads the images of prompts and of agents' messages; None: the run shows none.

        Raises:
            InputError: the tokenizer has no chat template, or its conversations cannot be extended.
        """
        arguments = self._config.template_arguments
        self._tokenizer, self._end_ids, self._images = tokenizer, end_ids, images
        placeholder = images.placeholder if images is not None else None
        self._extensions = Extensions(tokenizer, end_ids, arguments, self._config.tool_format, placeholder)

    def start(self) -> AgentProgram:
        """Start the gateway, and return the program of the run's rollouts. On the rank that holds the engine, after `open`.

        Raises:
            InputError: the gateway cannot listen on its address.
        """
        assert self._extensions is not None
        assert self._tokenizer is not None
        config = self._config
        limits = RunLimits(self._model, sampling_of(config, self._tokenizer, self._end_ids))
        self._gateway = Gateway(limits, config.gateway_host, config.gateway_port)
        _logger.info(f"agents call the gateway at {self._gateway.url}")
        return AgentProgram(self._agent, self._gateway, self._extensions, self._images)

    def prompt_ids(self, row: Mapping[str, Any]) -> Ids:
        """Ids of a row's prompt. An agent may ask something else: then they are not used.

        Raises:
            InputError: the prompt cannot be tokenized.
        """
        assert self._tokenizer is not None
        assert self._extensions is not None
        if self._images is not None and isinstance(row["prompt"], list):
            return self._extensions(()).prompt(row["prompt"])
        arguments = self._config.template_arguments
        special = self._config.add_special_tokens
        return whole_numbers(render_prompt(row["prompt"], self._tokenizer, arguments, add_special_tokens=special))

    def beside_environments(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that needs nothing of another thread."""
        return work()

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Nothing is kept until rollouts are scored."""

    def release_all(self) -> None:
        """Nothing is kept until rollouts are scored."""

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """What the calls of the agents were, per rollout.

        Returns:
            `agent/` and each name of `gateway.recording.Counts`; `agent/branches`; and `agent/failed`, the share of the rollouts
            whose agent failed.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        found = {
            f"agent/{name}": sum(rollout.notes["agent"][name] for rollout in rollouts) / len(rollouts)
            for name in Counts.__slots__
        }
        found["agent/branches"] = sum(len(rollout.branches) for rollout in rollouts) / len(rollouts)
        found["agent/failed"] = sum(rollout.failed is not None for rollout in rollouts) / len(rollouts)
        return found

    def close(self) -> None:
        """Stop the gateway."""
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None


def agent_of(agent: Any, timeout: float) -> Agent:
    """A user's agent.

    Raises:
        InputError: it is neither a function nor a command line.
    """
    if callable(agent):
        return Agent(agent, None, timeout)
    if not isinstance(agent, str) or not agent.strip():
        raise InputError(
            f"agent={agent!r:.80}; give a function agent(base_url, api_key, row), or a command line as one text"
        )
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise InputError(f"the agent's command line {agent!r:.80} cannot be split into words: {error}") from error
    return Agent(None, tuple(words), timeout)


def _check(config: OnlineConfig) -> None:
    if config.max_thinking_length is not None:
        raise InputError("max_thinking_length is not supported together with an agent; leave one of them out")
    if config.agent_timeout >= config.generation_timeout:
        raise InputError(
            f"agent_timeout={config.agent_timeout:g} must be below {config.generation_timeout:g} s, the time for which the engine "
            "waits while no agent asks anything; raise vllm_server_timeout"
        )
