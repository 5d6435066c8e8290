"""Fields by subject, one class each: servers, vLLM in this process, images, tools, agents, logs, and TRL's others.

`OnlineConfig` inherits all of them. `run/engine.py` connects to the servers of `ServerFields`. The names of the
fields about vLLM's devices and memory are TRL's.

TRL and transformers have fields that support one value here, have no effect here, or have other names here. A script
that sets the first two kinds runs. Any other value of the first kind is refused by name. Any value of the second kind
is taken, and a line says that it has no effect. A field of the third kind is refused with what to set instead;
removed fields of Lockstep are among them. Other fields of the first two kinds are transformers' own
(`config/table.py`). docs/reference/migrating-from-trl.md gives reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from lockstep.config.option import (
    COUNT,
    PORT,
    SECONDS,
    Bookkeeping,
    Bounds,
    Part,
    option,
    refuse_other_value,
)
from lockstep.config.other_names import hint_of
from lockstep.config.table import with_key
from lockstep.engines.servers.calls import check_urls, server_urls, urls_of_file
from lockstep.engines.vllm.arguments import SleepLevel
from lockstep.errors import InputError
from lockstep.images.prompts import PictureLimits
from lockstep.images.urls import ImageUrls
from lockstep.weights.wire.transport import check_transport


@dataclass
class ServerFields:
    """The fields of servers."""

    vllm_mode: Literal["colocate", "server"] = option(
        "colocate",
        "vLLM in this process, or running servers ('lockstep serve').",
        group="server",
        common=True,
    )
    vllm_server_base_url: str | None = option(
        None,
        "URL of the server, or several separated by commas. Setting it implies server mode.",
        group="server",
        common=True,
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_url_file: str | None = option(
        None,
        "Text file with the base URL of a server per line, instead of vllm_server_base_url. It is read again "
        "before every "
        "generation, so that servers can join and leave.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_host: str = option(
        "0.0.0.0",
        "The server's host, if no URL is given; 0.0.0.0: this machine.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
        only_with="server_without_url",
    )
    vllm_server_port: int = option(
        8000,
        "The server's port, if no URL is given.",
        group="server",
        bounds=PORT,
        bookkeeping=Bookkeeping.SERVERS,
        only_with="server_without_url",
    )
    vllm_server_key_file: str | None = option(
        None,
        "File with the server's key. Default: LOCKSTEP_SERVER_KEY, or the key that a server here saved.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
        only_with="servers",
    )
    vllm_weight_transport: str = option(
        "auto",
        "shared_memory, gloo, cuda_ipc (on one GPU), nccl (GPU to GPU), or auto: the fastest that works, without nccl. "
        "cuda_ipc and nccl have not been run on a GPU yet.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
        only_with="vllm",
    )
    vllm_weight_deltas: bool = option(
        True,
        "Over gloo, send bf16 servers only the elements of weights that changed. Trainer and workers then keep "
        "a copy in main memory, if there is room.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
        only_with="vllm",
    )
    vllm_group_host: str = option(
        "127.0.0.1",
        "This machine's address as other machines' servers reach it; the trainer listens there.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
        only_with="servers",
    )
    vllm_group_port: int = option(
        0,
        "Port on which workers meet the trainer. Default: a free one.",
        group="server",
        bounds=Bounds(0, 65535),
        bookkeeping=Bookkeeping.SERVERS,
        only_with="servers",
    )
    vllm_server_timeout: float = option(
        240.0,
        "Seconds for one call or the wait for a server; a generation may take 2.5 times as long.",
        group="server",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
    )

    @property
    def generation_timeout(self) -> float:
        """Seconds that the engine may take for one request, and that it waits for a request.

        With TRL's default, which is meant for a server's start, long completions on a CPU would be cut off.
        """
        return 2.5 * self.vllm_server_timeout

    @property
    def server_urls(self) -> list[str]:
        """Base URL of each server, in server mode. They are those that the file has now.

        Raises:
            InputError: the file cannot be read, or has something other than URLs.
        """
        if self.vllm_server_url_file is not None:
            return urls_of_file("vllm_server_url_file", self.vllm_server_url_file)
        return server_urls(self.vllm_server_base_url, self.vllm_server_host, self.vllm_server_port)

    def check_servers(self, *, owner: bool) -> None:
        """Check the fields.

        Args:
            owner: whether this process reads the file of URLs. The machines of other processes may not have it.

        Raises:
            InputError: a field has an unknown value, or the servers are not named by URLs.
        """
        if self.vllm_mode not in ("colocate", "server"):
            raise InputError(f"vllm_mode={self.vllm_mode!r}; it must be colocate or server")
        check_transport(self.vllm_weight_transport)
        if self.vllm_mode == "colocate":
            return
        if self.vllm_server_url_file is None:
            check_urls("vllm_server_base_url", self.server_urls)
        elif self.vllm_server_base_url is not None:
            raise InputError(
                "vllm_server_base_url and vllm_server_url_file both name the servers; leave one of the two out"
            )
        elif owner:
            urls_of_file("vllm_server_url_file", self.vllm_server_url_file)


_logger = logging.getLogger(__name__)


@dataclass
class ColocateFields:
    """The fields of an engine in the trainer's process."""

    vllm_tensor_parallel_size: int = option(
        1,
        "Number of devices that vLLM's model is split over, with vllm_mode colocate. Above 1, vLLM starts a "
        "process per device.",
        group="engine",
        bounds=COUNT,
        bookkeeping=Bookkeeping.MEMORY,
        only_with="vllm",
    )

    vllm_enable_sleep_mode: bool = option(
        False,
        "Let vLLM in this process give its GPU memory back while the trainer learns. Not on a CPU.",
        group="engine",
        bookkeeping=Bookkeeping.MEMORY,
        only_with="vllm",
    )

    def check_colocated(self, *, server: bool, use_vllm: bool | None, owner: bool) -> None:
        """Check the fields.

        Args:
            server: whether the engine is a server.
            use_vllm: the field of this name.
            owner: whether this process prints warnings.

        Raises:
            InputError: vLLM is needed and switched off.
        """
        for name, is_set, otherwise in (
            (
                "vllm_tensor_parallel_size",
                self.vllm_tensor_parallel_size != 1,
                f"start them with 'lockstep serve MODEL --tensor_parallel_size {self.vllm_tensor_parallel_size}'",
            ),
            ("vllm_enable_sleep_mode", self.vllm_enable_sleep_mode, "a server keeps its memory"),
        ):
            if is_set and use_vllm is False:
                raise InputError(f"{name} needs vLLM, and use_vllm is false; leave one of the two out")
            if is_set and server and owner:
                _logger.warning(f"{name} has no effect with servers: {otherwise}")

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine gives its memory back between a generation and the next push."""
        return self.vllm_enable_sleep_mode and self.vllm_mode == "colocate"  # type: ignore[attr-defined]

    @property
    def sleep_level(self) -> SleepLevel:
        """The level of vLLM's sleep mode. If only an adapter is sent, the engine must keep its base model: level 1."""
        return 0 if not self.engine_sleeps else 1 if self.vllm_enable_lora else 2  # type: ignore[attr-defined]


@dataclass
class ImageFields:
    """The fields of pictures."""

    freeze_vision_tower: bool = option(
        False,
        "Keep the vision tower and its projector as they are; with an adapter, also the adapter in them.",
        group="model",
        part=Part.LEARNING,
    )
    min_pixels: int | None = option(
        None,
        "A smaller picture is enlarged to this many pixels. Default: preprocessor_config.json. Not for tiles.",
        group="data",
        only_with="pictures",
    )
    max_pixels: int | None = option(
        None,
        "A larger picture is shrunk to at most this many pixels. Default: preprocessor_config.json.",
        group="data",
        only_with="pictures",
    )
    limit_mm_per_prompt: dict | str | None = option(
        None,
        'Largest number of pictures per conversation, as {"image": 4}. A row with more is refused; a tool\'s '
        "result with one "
        "more is an error for the model.",
        group="data",
        mapping=True,
        only_with="pictures",
    )
    image_urls: list[str] | None = option(
        None,
        "Beginnings of URLs from which pictures may be fetched. Default: no picture is fetched.",
        group="data",
        only_with="pictures",
    )

    def check_images(self) -> None:
        """Check the fields.

        Raises:
            InputError: a limit is not a positive number, they contradict each other, or one is for something else
                than pictures; or `image_urls` has something else than beginnings of URLs.
        """
        for name in ("min_pixels", "max_pixels"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise InputError(f"{name}={given}; it must be 1 or more")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InputError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")
        limit = self.limit_mm_per_prompt
        count = limit.get("image") if isinstance(limit, dict) and limit.keys() == {"image"} else None
        if limit is not None and (type(count) is not int or count < 1):
            raise InputError(
                f'limit_mm_per_prompt={limit!r}; it must be {{"image": N}} with N of 1 or more: only pictures '
                f"are supported"
            )

        if isinstance(self.image_urls, str):
            raise InputError(f"image_urls={self.image_urls!r:.100}; it must be a list of beginnings of URLs")
        ImageUrls(self.image_urls or ())

    @property
    def picture_limits(self) -> PictureLimits:
        """The limits on pictures."""
        limit = self.limit_mm_per_prompt
        return PictureLimits(
            self.min_pixels, self.max_pixels, limit["image"] if isinstance(limit, dict) else None
        )


@dataclass
class ToolFields:
    """The fields of tool calls."""

    max_tool_calling_iterations: int | None = option(
        None,
        "How often a rollout may call tools and go on. Default: until it calls none, or is out of tokens.",
        group="tools",
        bounds=Bounds(0),
        only_with="acting",
        part=Part.ACTING,
    )
    tool_timeout: float = option(
        60.0,
        "Seconds that one tool call, or one call of an environment, may take; later the model reads an error.",
        group="tools",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
        only_with="acting",
        part=Part.ACTING,
    )
    tool_threads: bool = option(
        False,
        "Each call of a plain tool, and each environment, gets a thread of its own, so that slow ones run together. "
        "Signals do not work there, nor does a connection that was made once (SQLite).",
        group="tools",
        bookkeeping=Bookkeeping.THREADS,
        only_with="acting",
        part=Part.ACTING,
    )
    tool_format: str | None = option(
        None,
        "How the model writes tool calls: hermes, qwen3_xml, glm, mistral, deepseek, kimi, harmony, gemma, pythonic or "
        "llama3_json. Default: as the chat template writes them.",
        group="tools",
        only_with="calls",
        part=Part.ACTING,
    )


Reward: TypeAlias = float | None
# agent(base_url, api_key, row) -> reward or None
AgentFunction = Callable[[str, str, dict[str, Any]], Reward | Awaitable[Reward]]


@dataclass
class AgentFields:
    """The fields of agents."""

    agent_timeout: float = option(
        300.0,
        "Seconds that an agent may take for one rollout, its wait for the engine included.",
        group="tools",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
        only_with="agent",
        part=Part.ACTING,
    )
    gateway_host: str = option(
        "127.0.0.1",
        "Address on which agents reach the gateway; other machines need another one.",
        group="tools",
        bookkeeping=Bookkeeping.SERVERS,
        only_with="agent",
        part=Part.ACTING,
    )
    gateway_port: int = option(
        0,
        "Port of the gateway. Default: a free one.",
        group="tools",
        bounds=Bounds(0, 65535),
        bookkeeping=Bookkeeping.SERVERS,
        only_with="agent",
        part=Part.ACTING,
    )


@dataclass
class LogFields:
    """Fields of `OnlineConfig` about logs, and about rollouts that are printed, tracked, shown in a report or kept."""

    logging_steps: float = option(
        10,
        "Optimizer steps between two logs.",
        group="logging",
        common=True,
        bounds=Bounds(0, above=True),
        bookkeeping=Bookkeeping.LOGS,
        only_with="log_steps",
        part=Part.RUN,
    )
    logging_nan_inf_filter: bool = option(
        False,
        "Has no effect: a proof ends the run before such a loss is logged.",
        no_effect="a proof ends the run before a loss that is not finite is logged",
    )
    log_completions: bool = option(
        False,
        "Print prompts, completions, rewards and advantages of the last generation at every log, and send "
        "them to wandb, "
        "trackio and TensorBoard as a table.",
        group="logging",
        common=True,
        bookkeeping=Bookkeeping.LOGS,
        part=Part.RUN,
    )
    log_multimodal: bool = option(
        True,
        "Put small copies of images into the report, beside prompts and rollouts.",
        group="logging",
        only_with="pictures",
        part=Part.RUN,
    )
    num_completions_to_print: int | None = option(
        None,
        "How many completions to print; default: all.",
        group="logging",
        bounds=COUNT,
        bookkeeping=Bookkeeping.LOGS,
        only_with="printing",
        part=Part.RUN,
    )
    log_unique_prompts: bool = option(
        False,
        "Print only one completion per prompt.",
        group="logging",
        bookkeeping=Bookkeeping.LOGS,
        only_with="printing",
        part=Part.RUN,
    )
    rollouts_size_limit: float = option(
        1.0,
        "Gigabytes of training rollouts that output_dir/rollouts keeps. If there are more, steps between "
        "others are removed. "
        "0: none are kept.",
        group="logging",
        bounds=Bounds(0),
        bookkeeping=Bookkeeping.LOGS,
        part=Part.RUN,
    )


_ONE_VALUE = "Only one value is supported; see docs/reference/migrating-from-trl.md."


@dataclass
class OneValueFields:
    """The fields of TRL's configs, and two of transformers whose default is another one here."""

    trust_remote_code: bool = option(False, _ONE_VALUE, only="code that comes with a model is not run")
    disable_dropout: bool = option(
        True,
        "Switch dropout off. False is refused where the model or its adapter has dropout.",
        group="model",
    )
    ds3_gather_for_generation: bool = option(
        True, _ONE_VALUE, only="a push gathers one tensor at a time, as it must"
    )
    pad_to_multiple_of: int | str | None = option(
        "auto", "Has no effect: nothing is padded.", no_effect="nothing is padded"
    )
    cache_implementation: str | None = option(None, _ONE_VALUE, only="the engines choose their own cache")
    use_transformers_continuous_batching: bool = option(False, _ONE_VALUE, only="use vLLM")
    transformers_continuous_batching_config: dict | str | None = option(None, _ONE_VALUE, only="use vLLM")
    use_transformers_paged: bool = option(False, _ONE_VALUE, only="use vLLM")
    log_completions_hub_repo: str | None = option(
        None, _ONE_VALUE, only="completions are kept in the run's directory"
    )
    vllm_importance_sampling_cap: float | None = option(
        None, _ONE_VALUE, only="TRL has renamed it to vllm_importance_sampling_clip_max"
    )

    remove_unused_columns: bool | None = option(
        False, "Must stay false: rewards get all columns.", only="reward functions get all columns"
    )
    dataloader_drop_last: bool = option(
        True, "Must stay true: a generation is always whole.", only="a generation is always whole"
    )

    def __new__(cls, *_: Any, **given: Any) -> Self:
        fields = vars(cls)["__dataclass_fields__"]
        for name in given.keys() - fields.keys():
            if hint := hint_of(name, fields):
                raise InputError(f"{cls.__name__} has no field {name!r}; {hint}")
        return super().__new__(cls)

    def refuse_other_values(self) -> None:
        """Check the fields that support one value.

        Raises:
            InputError: a field has a value that is not supported.
        """
        for name, only in with_key(type(self), "only").items():
            refuse_other_value(name, getattr(self, name), only)

    def drop_what_has_no_effect(self) -> list[str]:
        """Set the fields that have no effect to their neutral values. Returns a line for each that had another one."""
        lines = []
        for name, (neutral, why) in with_key(type(self), "no_effect").items():
            given = getattr(self, name)
            if given not in (neutral, None):
                lines.append(f"{name}={given!r} has no effect here: {why}")
            setattr(self, name, neutral)
        return lines
