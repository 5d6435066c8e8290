"""vLLM's engine as one release has it: settings, server program, sleep mode, and places for faults.

The settings that vLLM runs with are read from `vllm_config` in the process that runs the model, as plain JSON; they go
to `watch/settings.py` as `EngineSettings`.

In sleep mode an engine in the trainer's process gives its memory back while the trainer learns. The order is: sleep →
learn → wake the weights → push and its proofs → wake the key-value cache → sample → sleep. Between the two wakes vLLM
holds no cache, so that a push has its room. There are two levels:

- Level 1 moves the weights to main memory. Their digests before and after show that they came back.
- Level 2 discards the weights. The engine forgets what it holds, so that only a push of all weights is accepted
  afterwards.

vLLM has it on GPUs only; it has run on a pretend GPU, and not on a real one yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.contract.probe import fields_of_parts
from lockstep.contract.protocol import EngineSettings
from lockstep.contract.tensors import digests_of, dtype_name, new_key
from lockstep.engines.vllm.arguments import NEUTRAL_SAMPLING, SleepLevel
from lockstep.errors import InputError, LockstepError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.engine.arg_utils import AsyncEngineArgs


def build_engine(arguments: Mapping[str, Any]) -> None:
    """Let vLLM build its settings from arguments of `vllm.LLM`, and choose the weights' loader. It reads no weight."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.usage.usage_lib import UsageContext

    get_model_loader(EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS).load_config)


def register_backends(module: str, classes: Mapping[str, str]) -> None:
    """Register weight-transfer backends: the class of each, and the module from which vLLM imports them when used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, name in classes.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)


def read_environment_again() -> None:
    """vLLM reads the environment once per process, also that of an earlier engine. Let it read the present one."""
    from vllm import envs

    envs.disable_envs_cache()


def end_steps(engine: Any) -> None:
    """Wait for the steps that an `LLMEngine` in this process has begun ahead of their turn, and drop their results."""
    while engine.engine_core.engine_core.batch_queue:
        engine.step()


def shut_down(engine: Any) -> None:
    """End the processes and release the memory of an `LLMEngine`."""
    engine.engine_core.shutdown()


def has_open_update(worker: Any) -> bool:
    """Whether a worker's weight update has begun and not ended. vLLM would refuse a further one."""
    return worker._weight_update_active


def effective_settings(vllm_config: Any) -> dict[str, Any]:
    """All fields of `EngineSettings`, as JSON types."""
    config = vllm_config.model_config
    defaults = config.get_diff_sampling_param()
    return {
        "engine": "vllm",
        "model": str(config.model),
        "architecture": _architecture(config),
        "dtype": dtype_name(config.dtype),
        "head_dtype": dtype_name(config.head_dtype),
        "vocab_size": config.get_vocab_size(),
        "max_model_len": config.max_model_len,
        "logprobs_mode": str(config.logprobs_mode),
        "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "quantization": config.quantization,
        "sampling_defaults": {
            k: v for k, v in defaults.items() if k in NEUTRAL_SAMPLING and v != NEUTRAL_SAMPLING[k]
        },
        "model_config": _model_config(config),
        "kept_ids": True,
        "structured_outputs": _structured_outputs(vllm_config.structured_outputs_config),
        "normalises_pixels": bool(getattr(config.multimodal_config, "mm_device_do_normalize", False)),
        "second_runner": bool(vllm_config.use_v2_model_runner),
        "searches_top_p": searches_top_p(),
        "request_limits": request_limits(vllm_config),
    }


def _model_config(config: Any) -> dict[str, Any]:
    """The config's fields, as in the model's files.

    If the files of a tied model also have a head, vLLM sets the field that ties them to False while it loads. After
    that it ties a head that is equal to the embedding, and leaves the field at False.
    """
    fields = fields_of_parts(config.hf_text_config, config.hf_config)
    if getattr(config, "word_embeddings_untied_by_checkpoint", False):
        fields["tie_word_embeddings"] = True
    return fields


def searches_top_p() -> bool:
    """Whether vLLM searches the edge of top-p: with Triton both of its model runners do, for batches of every size."""
    from vllm.v1.sample.ops.topk_topp_sampler import HAS_TRITON

    return bool(HAS_TRITON)


def _architecture(config: Any) -> str:
    """The name of the model's class. Without one of its own, vLLM would name its Transformers backend instead."""
    return config.hf_config.architectures[0] if config.using_transformers_backend() else config.architecture


def _structured_outputs(config: Any) -> str:
    """The library that makes the masks of grammars, and its settings that are not vLLM's defaults."""
    defaults = {"disable_any_whitespace": False, "reasoning_parser": "", "enable_in_reasoning": False}
    changed = [
        f"{name}={getattr(config, name)}" for name in defaults if getattr(config, name) != defaults[name]
    ]
    return ", ".join([str(config.backend), *changed])


def splits_prompts(vllm_config: Any) -> bool:
    """Whether a CPU engine may compute a prompt in parts. A request with its own seed then fails (vLLM 0.32.0)."""
    return vllm_config.device_config.device_type == "cpu" and bool(
        vllm_config.scheduler_config.enable_chunked_prefill
    )


def settings_from(found: Mapping[str, Any]) -> EngineSettings:
    """`EngineSettings` from the result of `effective_settings`, which may come from another process."""
    dtypes = {name: getattr(torch, found[name]) for name in ("dtype", "head_dtype")}
    return EngineSettings(**{**found, **dtypes})


def only_dtype(names: Sequence[str]) -> torch.dtype | None:
    """The dtype that all these names mean; None if they differ or if it is no floating-point dtype."""
    dtypes = {getattr(torch, name) for name in names}
    return next(iter(dtypes)) if len(dtypes) == 1 and all(d.is_floating_point for d in dtypes) else None


def differing_settings(one: EngineSettings, other: EngineSettings) -> list[str]:
    """Names of the settings in which two engines differ."""
    return [name for name in EngineSettings.__slots__ if getattr(one, name) != getattr(other, name)]


def changed_settings(before: EngineSettings, now: EngineSettings) -> str:
    """A text for an error: the old and the new value of every setting that has changed."""
    changes = []
    for name in differing_settings(before, now):
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(old, Mapping):
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            changes += [f"{key} of {name} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys]
        else:
            changes.append(f"{name} was {old!r} and is {new!r}")
    return "; ".join(changes)


def request_limits(vllm_config: Any) -> dict[str, int]:
    """The largest number of ids that one request may name, per setting; empty: there is no limit.

    Returns:
        `allowed_token_ids`, `logit_bias`: ids. `end_ids`: ids, in a request with `min_tokens`. `bad_words`: sequences
            of ids.
        `bad_word_ids`: ids of all these sequences together.
    """
    if not vllm_config.use_v2_model_runner:
        return {}
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias

    return {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "end_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "bad_words": envs.VLLM_MAX_NUM_BAD_WORDS,
        "bad_word_ids": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    }


def server_parser() -> argparse.ArgumentParser:
    """The parser of the server's command line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def names_of_arguments(parser: argparse.ArgumentParser) -> set[str]:
    """The whole names of all arguments, with dashes."""
    return set(parser._option_string_actions)


def build_server(given: argparse.Namespace | AsyncEngineArgs) -> None:
    """Let vLLM build the settings of a server."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    AsyncEngineArgs.from_cli_args(given).create_engine_config(UsageContext.OPENAI_API_SERVER)


def run_server(given: argparse.Namespace) -> None:
    """Run the server until it ends. A later node only runs workers, because the first node answers calls."""
    if given.node_rank == 0:
        # It reads the command line again.
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()
        return
    from vllm.entrypoints.cli.serve import run_headless

    given.headless, given.api_server_count = True, 0
    run_headless(given)


Place = tuple[Any, str]


def penalties_of_first_runner() -> Place:
    """The function by which the sampler of the first model runner applies penalties."""
    from vllm.v1.sample import sampler

    return sampler, "apply_all_penalties"


def counts_of_second_runner() -> Place:
    """The function by which the second model runner counts the ids of a request."""
    from vllm.v1.worker.gpu.sample import penalties

    return penalties, "bincount"


def lora_of_linear() -> Place:
    """The method by which a linear layer adds the output of its adapter."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    return BaseLinearLayerWithLoRA, "_apply_lora_to_output"


_WEIGHTS, _CACHE = "weights", "kv_cache"


def sleep_arguments(level: SleepLevel) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that sleeps. Level 0: it never sleeps."""
    if level == 0:
        return {}
    from vllm.platforms import current_platform

    if not current_platform.is_sleep_mode_available():
        raise InputError(
            "vllm_enable_sleep_mode: vLLM has sleep mode on GPUs only, and this engine runs on "
            f"{current_platform.device_name or 'another device'}; leave it out"
        )
    return {"enable_sleep_mode": True}


class Woken(NamedTuple):
    """One worker's parameters after a sleep: how many it has, and the names of those that have other bytes."""

    parameters: int
    differing: list[str]


class Sleep:
    """The sleep of one engine. `call` gives every worker to a function, and returns the results."""

    def __init__(self, llm: LLM, call: Callable[..., list[Any]], level: SleepLevel) -> None:
        self._llm, self._call, self.level = llm, call, level
        self._asleep: tuple[str, ...] = ()
        self._key = 0
        self._digests: list[dict[str, str]] = []

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has no weights to compute with."""
        return _WEIGHTS in self._asleep

    def begin(self) -> None:
        """Fall asleep. Does nothing if the weights sleep already. No request may run."""
        if self.is_asleep:
            return
        # vLLM sleeps as a whole, so that a cache which was not needed since the last push wakes first.
        self.wake_cache()
        if self.level == 1:
            self._key = new_key()
            self._digests = self._call(weight_digests, f"{self._key:x}")
        else:
            # First, so that no failure can leave the engine with a record of weights that it lost.
            self._call(forget_weights)
        self._llm.sleep(level=self.level)
        self._asleep = (_WEIGHTS, _CACHE)

    def wake_weights(self) -> list[Woken]:
        """Wake the weights, and not the cache. The engine can then receive a push, and its modules can be probed.

        Returns, of each worker, the parameters with other bytes than before they slept; empty if nothing slept, or
        after level 2.
        """
        if not self.is_asleep:
            return []
        self._wake(_WEIGHTS)
        if self.level == 2:
            return []
        now = self._call(weight_digests, f"{self._key:x}")
        return [_differing(before, after) for before, after in zip(self._digests, now, strict=True)]

    def wake_cache(self) -> None:
        """Wake what sleeps beside the weights. The engine can then answer requests."""
        if self._asleep:
            self._wake(_CACHE)

    def _wake(self, part: str) -> None:
        if part not in self._asleep:
            return
        if torch.cuda.is_available():
            # The trainer's free memory must be free for vLLM too.
            torch.cuda.empty_cache()
        left = tuple(other for other in self._asleep if other != part)
        is_awake = self._llm.wake_up(tags=[part])
        if is_awake is not (not left):
            raise LockstepError(f"vLLM did not wake its {part.replace('_', ' ')} (awake: {is_awake})")
        self._asleep = left


def _differing(before: dict[str, str], now: dict[str, str]) -> Woken:
    return Woken(
        len(before), sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    )


def weight_digests(worker: Any, key: str) -> dict[str, str]:
    """The digest of each parameter as a worker holds it, under a key in hex. vLLM calls it inside the worker."""
    return digests_of(dict(worker.model_runner.model.named_parameters()), int(key, 16))


def forget_weights(worker: Any) -> None:
    """Let a worker forget which weights it holds, so that it refuses a push of changes. It runs inside the worker."""
    worker.weight_transfer_engine.forget_weights()
