"""The programs of a run's rollouts: tools and environments, agents, or a function of the user's.

A trainer makes `RolloutTools` before it loads a model, so that a tool without a schema or an environment that does
not start is reported at once. With the tokenizer it makes the prompts, which show the tools, and the program. The rank
that holds the engine runs tools and environments; the other ranks only know their schemas.

`RolloutFunction` calls a user's `rollout_func(prompts, trainer)` in the place of the driver. The function may sample
with `generate_rollout_completions`, exactly as the run samples. `rollouts/programs/rollout_func.py` checks its result.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from datasets import Dataset

from lockstep.config.run import OnlineConfig
from lockstep.config.sampling import FilterFields, sampling_of
from lockstep.contract.protocol import GenerationRequest, RequestKey, request_seed
from lockstep.errors import InputError, LockstepError, ProofError, quoted
from lockstep.extensions import PROGRAMS, load
from lockstep.images.content import NO_IMAGES, unprocessed
from lockstep.images.pictures import PromptPictures
from lockstep.images.prompts import PromptReader
from lockstep.images.reading import with_images
from lockstep.rollouts.call_fits import not_callable_as
from lockstep.rollouts.driver import decoding
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.programs.environments import EnvironmentKind, Environments, Factory
from lockstep.rollouts.programs.rollout_func import Bounds, groups_of_columns
from lockstep.rollouts.programs.tool_program import ToolProgram
from lockstep.rollouts.programs.tools import ToolCalls, tools_of
from lockstep.rollouts.programs.workers import Here, TookTooLong, Worker
from lockstep.rollouts.ranks import Ranks
from lockstep.run.metrics import tool_metrics
from lockstep.threads import process_as_before
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.extension import BRANCHES, REFUSED, USER_TURN, Extension

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# Seconds beyond the limits of its calls in which all environments must have been tried.
_PROBING = 60.0


class Acting(Protocol):
    """What the rollouts of a run act with: tools and environments, or the agents of an extra.

    Attributes:
        calls: the calls of tools and environments; None: the engine's thread waits for none.
        has_environments: whether rollouts have environments. Then the rank that has them scores all rollouts.
        reward_names: names of the rewards that the rollouts bring themselves, each once.
        rewards: the arguments `own` and `environment_of` of a scorer.
        rehearsed: gives an environment to reward functions before there is a rollout; None if there are no
            environments.
    """

    @property
    def calls(self) -> ToolCalls | None: ...

    @property
    def has_environments(self) -> bool: ...

    @property
    def reward_names(self) -> Sequence[str]: ...

    @property
    def rewards(self) -> dict[str, Any]: ...

    @property
    def rehearsed(self) -> Callable[[Any], Any] | None: ...

    def open(self, reader: PromptReader, end_ids: Sequence[int]) -> None:
        """Prepare the conversations of a run with this reader."""

    def start(self) -> Any:
        """The program of the run's rollouts. On the rank that holds the engine, after `open`."""

    def prompt_ids(self, row: Mapping[str, Any]) -> Ids:
        """Ids of a row's prompt."""

    def shown_tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Schemas of the tools that a row's prompt shows."""

    def beside_environments(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that may read environments. It may take `limit` seconds in their thread."""

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """These rollouts are scored: nothing must be kept for their rewards."""

    def release_all(self) -> None:
        """No rollout that has ended is scored any more."""

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """What the tools, environments or agents of scored groups did."""

    def close(self) -> None:
        """End all that was started."""


class RolloutTools:
    """The tools and environments that the rollouts of a run act with.

    Args:
        factory: makes environments; or a mapping of such functions by the values of the column `environment`; or None.
        row: the first row of the dataset, with which an environment is tried. None: `reset` is not tried.

    Attributes:
        scored_environments: the users' objects on which the rollouts that were scored last acted; None: there are none.
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
            self.calls.process = unprocessed
            # Only the owner makes environments.
            self._environments = made if ranks.owner else None
            limit = config.tool_timeout * 2 * max(len(made.names), 1) + _PROBING
            self.kinds = ranks.from_owner(
                "environments",
                lambda: self.calls.finish(made.probe(row), limit),
                lambda kinds: [
                    [name, kind.title, list(kind.schemas), kind.has_reward, kind.speaks]
                    for name, kind in kinds.items()
                ],
                lambda sent: {
                    name: EnvironmentKind(title, tuple(s), *rest) for name, title, s, *rest in sent
                },
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
        """Gives reward functions an environment before there is a rollout; None if there are no environments."""
        environments = self._environments
        return None if environments is None else lambda _: environments.spare()

    @property
    def has_environments(self) -> bool:
        """Whether rollouts have environments. Then the rank that has them scores all rollouts."""
        return bool(self.kinds)

    def _environment_of(self, rollout: Rollout) -> Any:
        return self.program.environment_of(rollout)

    def open(self, reader: PromptReader, end_ids: Sequence[int]) -> None:
        """Prepare the conversations of a run with this reader, which also reads what tools give."""
        own = [tool.schema for tool in self._tools.values()]
        kinds: dict[str | None, tuple[Any, ...]] = {name: kind.schemas for name, kind in self.kinds.items()}
        self._extensions = {
            name: Extension(
                reader.tokenizer,
                end_ids,
                chat_template_kwargs=self._config.template_arguments,
                tools=[*own, *schemas],
                tool_format=self._config.tool_format,
                placeholder=reader.placeholder,
            )
            for name, schemas in (kinds or {None: ()}).items()
        }
        for name, kind in self.kinds.items():
            # Without tools the extension itself needs this case.
            if kind.speaks and (why := self._extensions[name].cases[USER_TURN]).startswith(REFUSED):
                raise InputError(
                    f"environment {kind.title} answers as the user, and the chat template cannot: {why}"
                )
        if self._owner:
            self._tell_branches()
        longest = max(len(token) for token in reader.tokenizer.get_vocab())
        iterations = self._config.max_tool_calling_iterations
        self.calls.process = reader.in_turns(self._extensions.values())
        self._program = ToolProgram(
            self._extensions, self._tools, self.calls, self._environments, iterations, longest, reader
        )

    def _tell_branches(self) -> None:
        """Say in which cases the chat template makes a rollout branch."""
        (extension, *_) = self._extensions.values()
        branching = [case for case, outcome in extension.cases.items() if outcome.startswith(BRANCHES)]
        if branching:
            _logger.info(
                f"after some turns ({'; '.join(branching)}) the chat template shows earlier turns "
                "differently: rollouts branch there"
            )

    @property
    def program(self) -> ToolProgram:
        """The program of the run's rollouts; only after `open`."""
        assert self._program is not None
        return self._program

    def prompt_ids(self, row: Mapping[str, Any]) -> Ids:
        """Ids of a row's prompt, with the tools that its rollouts may call."""
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

    def shown_tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Schemas of the tools, and of the methods of the row's environment."""
        own = [tool.schema for tool in self._tools.values()]
        kind = self.kinds.get(row["environment"] if self._routed else None)
        return own if kind is None else [*own, *kind.schemas]

    def beside_environments(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that reads environments, done in their thread; `limit` is in seconds."""
        if not (self.has_environments and self._share_a_thread):
            return work()
        try:
            return self.calls.home.do(work, limit)
        except TookTooLong as error:
            raise InputError(
                f"the reward functions took longer than {limit:g} s (reward_timeout) in a call that cannot "
                "be ended; with max_staleness they run in the thread of the environments"
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


def rollout_tools(
    tools: Any,
    environment_factory: Any,
    rollout_func: Any,
    agent: Any,
    config: Any,
    ranks: Ranks,
    dataset: Dataset,
    model: Any,
) -> Acting | None:
    """The tools and environments of a trainer, or its agents; None if it has none."""
    acting = bool(tools) or environment_factory is not None
    if agent is not None:
        if acting or rollout_func is not None:
            raise InputError(
                "an agent brings its own tools: leave tools, environment_factory and rollout_func out, or agent"
            )
        config.check_several_calls("an agent")
        name = model if isinstance(model, str) else model.config._name_or_path
        return load(PROGRAMS["agent"])(agent, config, ranks, name)
    if rollout_func is not None:
        if acting:
            raise InputError(
                "rollout_func makes rollouts itself; leave tools and environment_factory out, or rollout_func"
            )
        for name in ("max_staleness", "max_thinking_length"):
            if getattr(config, name):
                raise InputError(
                    f"{name}={getattr(config, name)} is not supported with rollout_func; leave it out"
                )
        # The bound on kept ids filters nothing by itself.
        plain = FilterFields(max_kept_ids=config.max_kept_ids).filter_values()
        if config.bad_words or config.filter_values() != plain:
            # The trainer would have to know which tokens each of the function's calls could sample.
            raise InputError(
                "rollout_func is supported with temperature and stop_strings only; leave top_p, top_k, "
                "min_p, penalties and structured outputs out"
            )
    if not acting:
        return None
    config.check_several_calls("a tool or an environment")
    row = dataset[0] if config.rehearse_rewards else None
    return RolloutTools(tools or [], environment_factory, config, ranks, row)


RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]


class RolloutFunction:
    """A user's function that makes rollouts. It gets the trainer, and the prompts, each once per rollout.

    `bounds` are what its ids must keep to.
    """

    def __init__(
        self,
        function: RolloutFunc,
        trainer: Any,
        reader: PromptReader,
        bounds: Bounds,
    ) -> None:
        if not callable(function):
            raise InputError(
                f"rollout_func is a {type(function).__name__}; it must be a function of (prompts, trainer)"
            )
        self._function, self._trainer, self._bounds = function, trainer, bounds
        self._decode, self.reader, self.end_ids = decoding(reader.tokenizer), reader, tuple(bounds.end_ids)
        # Number of calls of the helper below within one generation. Seeds depend on it.
        self.calls = 0

    def groups(self, prompts: Sequence[Prompt], num_generations: int, version: int) -> list[RolloutGroup]:
        """One unscored group per prompt."""
        self.calls = 0
        given = [_given(prompt) for prompt in prompts for _ in range(num_generations)]
        try:
            with process_as_before("rollout_func"):
                columns = self._function(given, self._trainer)
        except (KeyboardInterrupt, LockstepError):
            raise
        except BaseException as error:
            advice = ""
            if isinstance(error, TypeError):
                advice = not_callable_as(
                    self._function, "rollout_func(prompts, trainer)", given, self._trainer
                )
            raise InputError(
                f"rollout_func raised {type(error).__name__}: {quoted(error)}{advice}"
            ) from error
        return groups_of_columns(
            columns, prompts, num_generations, version, self._bounds, self._decode, self.reader
        )


def _given(prompt: Prompt) -> Any:
    """A prompt as the function gets it: messages contain their images, as in TRL."""
    if not prompt.pictures or not isinstance(prompt.source, list):
        return copy.deepcopy(prompt.source)
    return with_images({**prompt.columns, "prompt": prompt.source})


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    max_tokens: int | None = None,
    images: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Sample one completion per prompt inside a `rollout_func`: with the run's sampling settings, and own seeds.

    Args:
        trainer: the trainer that the function got.
        prompts: text, messages, or lists of token ids; for further turns give ids, so that nothing is tokenized again.
        max_tokens: largest number of new tokens; None: the run's limit, as far as the engine's context has room.
        images: for each prompt, the images whose ids are in it, in order. None: there are none but those in messages.

    Returns:
        One dict per prompt, in their order: `prompt_ids`, `completion_ids`, `logprobs` (lists), `text` and
        `finish_reason`.

    Raises:
        InputError: a prompt does not fit into the engine's context, or this is not called from a `rollout_func`.
        ProofError: an answer does not match its request.
    """
    own, config, engine = trainer.source.rollout_function, trainer.config, trainer.engine
    if own is None or engine.version is None:
        raise InputError("generate_rollout_completions samples for a rollout_func; call it from there")
    number, own.calls = own.calls, own.calls + 1
    tokenizer, context = own.reader.tokenizer, engine.settings().max_model_len
    sampling = sampling_of(config, tokenizer, own.end_ids, own.reader.banned_ids)
    requests = []
    for place, prompt in enumerate(prompts):
        key = RequestKey(f"rollout_func/{number}", place)
        ids, shown = _seen(prompt, images[place] if images is not None else (), own.reader)
        room = min(sampling.max_tokens if max_tokens is None else max_tokens, context - len(ids))
        if room < 1:
            raise InputError(
                f"prompt {place} has {len(ids)} tokens; the engine's context of {context} has no room for another"
            )
        seed = request_seed(config.seed, engine.version, key)
        requests.append(GenerationRequest(key, ids, replace(sampling, max_tokens=room), seed, shown))
    answers = engine.generate(requests) if requests else {}
    decode = decoding(tokenizer)
    found = [answers[request.key] for request in requests]
    return [
        {
            "prompt_ids": answer.prompt_ids.tolist(),
            "completion_ids": answer.token_ids.tolist(),
            "logprobs": answer.logprobs.tolist(),
            "text": decode(answer.token_ids),
            "finish_reason": answer.finish_reason,
        }
        for answer in found
    ]


def _seen(prompt: Any, given: Sequence[Any], reader: PromptReader) -> tuple[Ids, PromptPictures]:
    """The ids and the pictures of a prompt. `given` are the images beside the prompt."""
    if given and not reader.shows_pictures:
        raise InputError(NO_IMAGES)
    ids = _as_ids(prompt)
    if ids is None:
        return reader.read({"prompt": prompt, "images": list(given)})
    reader.check_count(len(given))
    try:
        return ids, reader.placed(ids, reader.pictures(given))
    except ProofError as error:
        raise InputError(f"{error.found}; give the images of each prompt of ids in `images`") from error


def _as_ids(prompt: Any) -> Ids | None:
    """A list or an array of token ids; None: the prompt is something else."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(plain, list | tuple) and plain and all(isinstance(i, int) for i in plain):
        return whole_numbers(plain)
    return None
