"""The tools and environments of a run: from a trainer's arguments to the program of its rollouts.

A trainer makes `RolloutTools` before it loads a model, so that a tool without a schema or an environment that does not start is
reported at once. With the tokenizer it makes the prompts, which show the tools, and the program
(`rollouts/programs/tool_program.py`). The rank that holds the engine runs the tools and environments. The other ranks only know
their schemas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.images.pictures import Picture
from lockstep.images.prompts import ImagePrompts
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.rollouts.programs.content import Process, shows_no_images
from lockstep.rollouts.programs.environments import EnvironmentKind, Environments, Factory
from lockstep.rollouts.programs.tool_program import ToolProgram
from lockstep.rollouts.programs.tools import ToolCalls, tools_of
from lockstep.rollouts.programs.workers import Here, TookTooLong, Worker
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.conversation.extension import Extension
from lockstep.tokens.conversation.extension_proof import BRANCHES, REFUSED, USER_TURN
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.generate.metrics import tool_metrics

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# Seconds beyond the limits of its calls in which all environments must have been tried.
_PROBING = 60.0


class RolloutTools:
    """What the rollouts of a run act with.

    Args:
        tools: functions that every rollout may call.
        factory: makes environments; or a mapping of such functions by the values of the column `environment`; or None.
        row: the first row of the dataset, with which an environment is tried. None: `reset` is not tried.

    Attributes:
        scored_environments: the users' objects that the rollouts which were scored last acted on; None if there are none.

    Raises:
        InputError: a function has no schema, an environment cannot be made or reset, or fields contradict the tools.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        factory: Factory | Mapping[str, Factory] | None,
        config: OnlineConfig,
        ranks: Ranks,
        row: Mapping[str, Any] | None,
    ) -> None:
        if config.max_thinking_length is not None:
            raise InputError(
                "max_thinking_length is not supported together with tools or environments; leave one of them out"
            )
        self._config, self._owner = config, ranks.owner
        self._tools = tools_of(tools)
        # Generations ahead are made in threads of their own. Tools then have one thread for all of them.
        home = Worker("lockstep-tools") if config.max_staleness else Here()
        self.calls = ToolCalls(config.tool_timeout, home, threads=config.tool_threads)
        self._environments: Environments | None = None
        self._share_a_thread = False
        self.kinds: dict[str | None, EnvironmentKind] = {}
        if factory is not None:
            made = Environments(factory, self.calls)
            self._share_a_thread = made.share_a_thread
            self.calls.process = _unprocessed
            # Only the owner makes environments.
            self._environments = made if ranks.owner else None
            limit = config.tool_timeout * 2 * max(len(made.names), 1) + _PROBING
            self.kinds = ranks.from_owner(
                "environments",
                lambda: self.calls.finish(made.probe(row), limit),
                lambda kinds: [
                    [name, kind.title, list(kind.schemas), kind.has_reward, kind.speaks] for name, kind in kinds.items()
                ],
                lambda sent: {name: EnvironmentKind(title, tuple(s), *rest) for name, title, s, *rest in sent},
            )
            self._check_names()
        self.scored_environments: list[Any] | None = None
        self._routed = isinstance(factory, Mapping)
        self._extensions: dict[str | None, Extension] = {}
        self._program: ToolProgram | None = None

    def _check_names(self) -> None:
        for kind in self.kinds.values():
            clash = [s["function"]["name"] for s in kind.schemas if s["function"]["name"] in self._tools]
            if clash:
                raise InputError(
                    f"environment {kind.title} has a method {clash[0]!r}, which is also the name of a tool"
                )

    @property
    def methods(self) -> list[Callable[..., Any]]:
        """The methods of the environments that a model may call; empty on ranks without environments."""
        return [] if self._environments is None else self._environments.methods

    @property
    def reward_names(self) -> list[str]:
        """Names under which environments give rewards, each once."""
        return list(dict.fromkeys(kind.title for kind in self.kinds.values() if kind.has_reward))

    @property
    def rewards(self) -> dict[str, Any]:
        """The arguments `own` and `environment_of` of a scorer."""
        return {"own": self.reward_names, "environment_of": self._environment_of if self.kinds else None}

    @property
    def rehearsed(self) -> Callable[[Any], Any] | None:
        """Gives an environment to reward functions before there is a rollout; None if there are no environments."""
        environments = self._environments
        return None if environments is None else lambda _: environments.spare()

    @property
    def has_environments(self) -> bool:
        """Whether rollouts have environments. Then the rank that has them scores all rollouts."""
        return bool(self.kinds)

    def _environment_of(self, rollout: Rollout) -> Any:
        return self.program.environment_of(rollout)

    def open(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], images: ImagePrompts | None = None
    ) -> None:
        """Prepare the conversations of this tokenizer.

        Args:
            images: processes the pictures that tools and environments give; None: the run shows no pictures.

        Raises:
            InputError: its chat template cannot be extended, or shows no tools.
        """
        own = [tool.schema for tool in self._tools.values()]
        kinds: dict[str | None, tuple[Any, ...]] = {name: kind.schemas for name, kind in self.kinds.items()}
        self._extensions = {
            name: Extension(
                tokenizer,
                end_ids,
                chat_template_kwargs=self._config.template_arguments,
                tools=[*own, *schemas],
                tool_format=self._config.tool_format,
                placeholder=images.placeholder if images is not None else None,
            )
            for name, schemas in (kinds or {None: ()}).items()
        }
        for name, kind in self.kinds.items():
            # Without tools the extension itself needs this case.
            if kind.speaks and (why := self._extensions[name].cases[USER_TURN]).startswith(REFUSED):
                raise InputError(f"environment {kind.title} answers as the user, and the chat template cannot: {why}")
        if self._owner:
            self._tell_branches()
        longest = max(len(token) for token in tokenizer.get_vocab())
        iterations = self._config.max_tool_calling_iterations
        self.calls.process = self._process(images)
        self._program = ToolProgram(
            self._extensions, self._tools, self.calls, self._environments, iterations, longest, images
        )

    def _process(self, images: ImagePrompts | None) -> Process:
        """Processes an image that a tool or an environment gives."""
        if images is None:
            return shows_no_images
        trial = Picture(torch.zeros(1, 1), torch.ones(3, dtype=torch.long), 1, whole_numbers([images.placeholder]))
        reasons = [extension.why_no_pictures(trial) for extension in self._extensions.values()]
        return next((_refusing(reason) for reason in reasons if reason is not None), images.opened_pictures)

    def _tell_branches(self) -> None:
        """Say in which cases the chat template makes a rollout branch."""
        (extension, *_) = self._extensions.values()
        branching = [case for case, outcome in extension.cases.items() if outcome.startswith(BRANCHES)]
        if branching:
            _logger.info(
                f"after some turns ({'; '.join(branching)}) the chat template shows earlier turns differently: rollouts "
                "branch there"
            )

    @property
    def program(self) -> ToolProgram:
        """The program of the run's rollouts; only after `open`."""
        assert self._program is not None
        return self._program

    def prompt_ids(self, row: Mapping[str, Any]) -> Ids:
        """Ids of a row's prompt, with the tools that its rollouts may call.

        Raises:
            InputError: the prompt is no list of messages, or the row names no environment.
        """
        prompt = row["prompt"]
        if not isinstance(prompt, list) or not prompt:
            raise InputError("with tools or environments, a prompt must be a list of messages")
        name = row.get("environment") if self._routed else None
        if name not in self._extensions:
            raise InputError(
                f"environment={name!r} is not among the environments of environment_factory: "
                f"{', '.join(map(repr, self._extensions))}"
            )
        return self._extensions[name].prompt(prompt)

    def beside_environments(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that reads environments, done in the thread in which they live.

        Args:
            limit: seconds that it may take in another thread than this one.

        Raises:
            InputError: it took longer.
        """
        if not (self.has_environments and self._share_a_thread):
            return work()
        try:
            return self.calls.home.do(work, limit)
        except TookTooLong as error:
            raise InputError(
                f"the reward functions took longer than {limit:g} s (reward_timeout) in a call that cannot be ended; with "
                "max_staleness they run in the thread of the environments"
            ) from error

    def start(self) -> ToolProgram:
        """The program of the run's rollouts. On the rank that holds the engine, after `open`."""
        return self.program

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Use the environments of these rollouts again: they are scored."""
        scored = list(rollouts)
        if self.has_environments:
            self.scored_environments = [self._environment_of(rollout) for rollout in scored]
        self.program.release(scored)

    def release_all(self) -> None:
        """Use the environments of all rollouts again that are not running."""
        self.program.release_all()

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """What the tools and environments of scored groups did."""
        return tool_metrics(groups, environments=self.has_environments)

    def close(self) -> None:
        """End all environments and threads."""
        if self._program is not None:
            self._program.close()
        elif self._environments is not None:
            self._environments.close()


def _refusing(reason: str) -> Process:
    def process(images: Sequence[Any]) -> Iterable[tuple[Image.Image, Picture]]:
        raise InputError(reason)

    return process


def _unprocessed(images: Sequence[Any]) -> Iterable[tuple[Image.Image, Picture]]:
    """Stands for images while environments are tried, before the model and its image processor are there."""
    return [(Image.new("RGB", (1, 1)), Picture(torch.zeros(1, 1), torch.ones(3, dtype=torch.long), 1)) for _ in images]
