"""The fields of all online methods (`OnlineConfig`), and of methods that sample groups (`GroupConfig`).

They are those of `transformers.TrainingArguments` and additional fields with TRL's names. A method's own config
extends them. Fields of TRL that Lockstep does not support are refused in `__post_init__`. No field is ignored. Some
defaults depend on the machine (`devices.py`).
"""

from __future__ import annotations

import copy
import json
import logging
import os
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import torch
from transformers import Trainer, TrainingArguments

from lockstep.algorithms.corrections import CorrectionMode
from lockstep.config.checks import check_fields
from lockstep.config.contradictions import (
    check_accelerator,
    check_best_model,
    check_corrections,
    check_mappings,
    check_optimizer,
    check_quantised_sampling,
    check_schedule,
    check_staleness,
    check_switches,
    complete_schedule,
)
from lockstep.config.effect import BY_METRIC, say_without_effect, set_fields
from lockstep.config.fields import (
    AgentFields,
    ColocateFields,
    ImageFields,
    LogFields,
    OneValueFields,
    ServerFields,
    ToolFields,
)
from lockstep.config.launcher import (
    ask_for_determinism,
    meeting_ranks,
    take_device,
    take_launcher,
    use_one_gpu,
)
from lockstep.config.option import CONTEXT, COUNT, SECONDS, SHARE, Bookkeeping, Bounds, Part, option, value_of
from lockstep.config.sampling import FilterFields, InterruptionFields
from lockstep.config.table import with_key
from lockstep.devices import has_fast_bf16
from lockstep.engines.vllm.arguments import MODEL_IMPLEMENTATIONS, check_adapters, usual_sequences
from lockstep.engines.vllm.start import vllm_installed
from lockstep.errors import InputError, one_line
from lockstep.extensions import SHARDINGS, load
from lockstep.models.arithmetic import Precision, liger_config
from lockstep.models.policy import check_init_kwargs
from lockstep.private_caches import expanded
from lockstep.safe_text import masked, without_secrets
from lockstep.shards.settings import Sharding, switched_on, take_settings
from lockstep.tokens.chat import NAME_IN_TEMPLATES, TemplateClock


def engine_dtype(name: str) -> torch.dtype:
    """The dtype for `float32`, `bfloat16` or `auto`; `auto` is chosen as in training."""
    return getattr(torch, ("bfloat16" if has_fast_bf16() else "float32") if name == "auto" else name)


_logger = logging.getLogger(__name__)

# A rank may wait for all generations that are sampled ahead. With the usual limit of 7200 s for each, 1000 of them are
# nearly `LONGEST_WAIT`.
MOST_STALENESS = Bounds(0, 1000, usual=(0, 64))


@dataclass
class OnlineConfig(
    AgentFields,
    ColocateFields,
    FilterFields,
    ImageFields,
    ToolFields,
    InterruptionFields,
    LogFields,
    ServerFields,
    OneValueFields,
    TrainingArguments,
):
    """Fields of every online method.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    learning_rate: float = option(
        1e-6,
        "Initial learning rate of AdamW.",
        group="method",
        common=True,
        bounds=Bounds(0, 1000, usual=(0, 1)),
        part=Part.STEPS,
    )
    bf16: bool | None = option(
        None,
        "bf16 autocast over fp32 weights. Default: true if this machine computes bf16 fast.",
        group="model",
        common=True,
    )
    liger_kernel_config: dict[str, bool] | str | None = option(
        None, "With use_liger_kernel: kernels by Liger's names, on or off.", group="model"
    )

    model_init_kwargs: dict | str | None = option(
        None, "Arguments of `from_pretrained`, if the model is given by name.", group="model", mapping=True
    )
    chat_template_kwargs: dict | str | None = option(
        None, "Arguments of the chat template.", group="model", mapping=True, only_with="conversations"
    )
    add_special_tokens: bool = option(
        True,
        "Add the tokenizer's special tokens (such as a begin token) to prompts that are text, as TRL does.",
        group="data",
        only_with="texts",
    )
    shuffle_dataset: bool = option(
        True, "Shuffle the training prompts every epoch.", group="data", part=Part.RUN
    )

    reward_weights: list[float] | None = option(
        None,
        "One weight per reward function; default: 1 each.",
        group="reward",
        part=Part.REWARDS,
    )
    reward_timeout: float = option(
        600.0,
        "Seconds that reward functions may take for a generation.",
        group="reward",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
        part=Part.REWARDS,
    )
    max_unscored_generations: int = option(
        10,
        "Generations in a row without a single score that end the run. Fewer of them raise an alarm.",
        group="reward",
        bounds=COUNT,
        bookkeeping=Bookkeeping.PATIENCE,
        part=Part.RUN,
    )
    resume_with_changes: bool = option(
        False,
        "Resume although the data, a reward function or a setting has changed since.",
        group="saving",
        bookkeeping=Bookkeeping.RESUMING,
        part=Part.RUN,
    )
    rehearse_rewards: bool = option(
        True,
        "Call reward functions and judges once on made-up completions before a model is loaded, to report "
        "errors early.",
        group="reward",
        bookkeeping=Bookkeeping.REHEARSAL,
        part=Part.REWARDS,
    )
    recheck_rewards: bool = option(
        True,
        "Ask plain reward functions again about one drawn group per generation, to prove the scores. Not for "
        "functions with side effects, or that depend on time or earlier calls.",
        group="reward",
        bookkeeping=Bookkeeping.COMPARISON,
        only_with="plain_rewards",
        part=Part.LEARNING,
    )
    vllm_importance_sampling_correction: bool = option(
        True,
        "Weight tokens by the measured trainer / engine ratio, after the gap has passed.",
        group="proofs",
        only_with="token_weights",
        part=Part.LEARNING,
    )
    vllm_importance_sampling_mode: CorrectionMode = option(
        "token_truncate",
        "How such a weight is bounded; see lockstep.algorithms.corrections.",
        group="proofs",
        only_with="correction",
        part=Part.LEARNING,
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0,
        "Upper bound of such a weight.",
        group="proofs",
        bounds=Bounds(0, above=True, infinite=True),
        only_with="correction",
        part=Part.LEARNING,
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None,
        "Lower bound of such a weight.",
        group="proofs",
        bounds=Bounds(0),
        only_with="correction",
        part=Part.LEARNING,
    )

    use_vllm: bool | None = option(
        None,
        "vLLM (true) or transformers (false) generates. Default: vLLM if it is installed.",
        group="engine",
        common=True,
    )
    vllm_gpu_memory_utilization: float = option(
        0.3,
        "Share of a GPU's memory for vLLM.",
        group="engine",
        bounds=SHARE,
        bookkeeping=Bookkeeping.MEMORY,
        only_with=("vllm_here", "own_engine"),
    )
    vllm_max_model_length: int | None = option(
        None,
        "Engine context. Default: the longest prompt plus max_completion_length.",
        group="engine",
        bounds=CONTEXT,
    )
    vllm_max_num_seqs: int | None = option(
        None,
        "Largest number of sequences that are decoded together. Default: 256 in vLLM on a GPU; 64 on a CPU, and in the "
        "transformers engine.",
        group="engine",
        common=True,
        bounds=COUNT,
        bookkeeping=Bookkeeping.MEMORY,
        only_with="engine_here",
    )
    max_staleness: int = option(
        0,
        "How many optimizer steps tokens may be older than the policy that first learns from them. Above 0, "
        "generations are sampled ahead: by a server while the trainer learns, in this process before it learns. "
        "0: they take turns.",
        group="server",
        bounds=MOST_STALENESS,
        part=Part.LEARNING,
    )
    vllm_model_impl: str = option(
        "vllm",
        "The model's implementation in vLLM: vllm (or auto), which takes transformers' where vLLM has none, "
        "or transformers.",
        group="engine",
        only_with=("vllm_here", "own_engine"),
    )
    vllm_engine_kwargs: dict | str | None = option(
        None,
        "Further arguments of vllm.LLM.",
        group="engine",
        mapping=True,
        only_with=("vllm_here", "own_engine"),
    )
    vllm_enable_lora: bool = option(
        False,
        "Send a LoRA adapter alone, to vLLM's own LoRA: less is sent, and sampling is slower. A server needs "
        "--enable_lora.",
        group="engine",
        only_with="vllm",
    )
    vllm_quantization: str | None = option(
        None,
        "Sample with weights in 8 bits: fp8_per_channel. The trainer keeps its own, and importance weights correct "
        "for the difference. A server needs --quantization.",
        group="engine",
        only_with="vllm",
    )
    engine_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Dtype of the engine. Default: bfloat16 with bf16, else float32.", group="engine"
    )

    cast_lm_head_to_fp32: bool = option(
        False,
        "Compute the output head in float32 on both sides, while the rest is bfloat16.",
        group="model",
        only_with="low_head",
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of the auxiliary loss that keeps the routers of a mixture of experts balanced. Default: the "
        "model's own "
        "(router_aux_loss_coef in its config). 0: none.",
        group="method",
        bounds=Bounds(0),
        part=Part.LEARNING,
    )
    token_budget: int | None = option(
        None,
        "Largest number of positions per forward: tokens after sharing, padding included. Memory grows with it. "
        "Default: 4096 on a GPU. On a CPU 2048, or up to 5120 where all completions of a prompt then fit together.",
        group="model",
        bounds=COUNT,
        bookkeeping=Bookkeeping.MEMORY,
    )
    logits_chunk_size: int = option(
        512,
        "Rows of logits in memory at a time.",
        group="model",
        bounds=COUNT,
        bookkeeping=Bookkeeping.MEMORY,
    )

    @property
    def _VALID_DICT_FIELDS(self) -> list[str]:
        return [*TrainingArguments._VALID_DICT_FIELDS, *with_key(type(self), "mapping")]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Otherwise `dataclass` would give each config a text of its own, with all values.
        cls.__repr__ = cls.__str__  # type: ignore[method-assign, assignment]

    def __str__(self) -> str:
        return masked(super().__str__())

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All fields for a tracker, without secrets. transformers hides those whose own names end in `_token`."""
        return {name: without_secrets(value) for name, value in super().to_dict().items()}

    def __getstate__(self) -> dict[str, Any]:
        """What `pickle` writes, for example into `training_args.bin` of each checkpoint: the fields without secrets."""
        return dict.fromkeys(vars(self)) | without_secrets(vars(self))

    def __copy__(self) -> Any:
        return self.__deepcopy__({}, copied=lambda value, _: value)

    def __deepcopy__(self, memo: dict[int, Any], copied: Any = copy.deepcopy) -> Any:
        # A copy within the process keeps its secrets.
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__.update({name: copied(value, memo) for name, value in vars(self).items()})
        return other

    def __post_init__(self) -> None:
        # transformers replaces None by a value of its own.
        self.asks_for_progress_bar = self.disable_tqdm is False
        if self.report_to is None:  # type: ignore[has-type]
            self.report_to = "none"
        check_fields(self)
        if isinstance(self.fsdp_config, str) and self.fsdp_config.startswith("{"):  # type: ignore[has-type]
            self.fsdp_config = json.loads(self.fsdp_config)  # type: ignore[has-type]
        named = set_fields(self)
        dropped = self.drop_what_has_no_effect()
        if self.follows_metric and self.metric_for_best_model is None:  # type: ignore[has-type]
            # transformers would take the evaluation's loss. The loss of a policy on what it has just sampled says
            # little.
            self.metric_for_best_model = "reward"
        take_launcher(self, os.environ)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            # accelerate would ask for the group of processes that it names.
            self.ddp_backend = None
        if self.bf16 is None:
            self.bf16 = not self.fp16 and has_fast_bf16()
        take_device(self, os.environ)
        if self.vllm_max_num_seqs is None and (vllm_installed() if self.use_vllm is None else self.use_vllm):
            self.vllm_max_num_seqs = usual_sequences()
        ask_for_determinism(self, os.environ)
        # The trainer shards the models itself, on a CPU too, so that accelerate must not.
        self.shards = take_settings(self.fsdp, self.fsdp_config, os.environ)  # type: ignore[has-type]
        asks = self.deepspeed or switched_on("DEEPSPEED", os.environ)  # type: ignore[has-type]
        self.zero: Sharding | None = None
        if asks:
            self.zero = load(SHARDINGS["deepspeed"])(self.deepspeed, os.environ)  # type: ignore[has-type]
        if self.shards is not None and self.zero is not None:
            raise InputError("FSDP and DeepSpeed are both asked for; leave one of the two out")
        self.fsdp = self.fsdp_config = self.deepspeed = None
        # A trainer sets the time of its run (`run/files/directory.py`).
        self.template_clock = TemplateClock(datetime.now())
        dropped += check_accelerator(self.accelerator_config)
        check_switches(self)
        with meeting_ranks(os.environ, self.ddp_timeout, use_cpu=self.use_cpu):
            try:
                super().__post_init__()
            except (ValueError, TypeError, ArithmeticError, ImportError) as error:
                # Fields that contradict each other, or that this machine does not support.
                raise InputError(one_line(error) or type(error).__name__) from error
        use_one_gpu(self)
        if self.zero is not None:
            self.zero.check_values(self)
            self.deepspeed = self.zero.field
            if self.zero.saves_less and self.process_index == 0:
                _logger.warning(self.zero.saves_less)
        if self.shards is not None:
            # As the user has set them: a copy of the config asks for the same. The base class has made no plugin from
            # them.
            self.fsdp, self.fsdp_config = True, self.shards.fields
        for name in ("vllm_server_url_file", "vllm_server_key_file"):
            if given := getattr(self, name):
                # They are read again while the run lasts, and a reward function may change the working directory.
                setattr(self, name, str(expanded(given).absolute()))
        if self.vllm_server_base_url is not None or self.vllm_server_url_file is not None:
            self.vllm_mode = "server"
        self.refuse_other_values()
        self._refuse_unsupported()
        self.liger_kernel_config = liger_config(self.use_liger_kernel, self.liger_kernel_config)
        self._check_engine()
        check_corrections(self)
        self.check_images()
        self.size_generation()
        self.check_interruption(self.completion_limit, self.stop_strings or [])
        self.take_generation_kwargs()
        self.check_filters(self.completion_limit, interrupted=self.max_thinking_length is not None)
        check_staleness(self)
        check_quantised_sampling(self)
        check_best_model(self)
        check_optimizer(self)
        complete_schedule(self)
        check_schedule(self)
        owner = self.process_index == 0
        for line in dropped if owner else ():
            _logger.warning(line)
        say_without_effect(self, named, owner=owner)

    def size_generation(self) -> None:
        """Set and check the sizes of a generation.

        Raises:
            InputError: the sizes contradict each other.
        """

    @property
    def best_metric(self) -> str | None:
        """What the log of an evaluation calls `metric_for_best_model`; None: it is not set."""
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples, here or on servers, unless the trainer is given another engine."""
        here = vllm_installed() if self.use_vllm is None else self.use_vllm
        return here or self.vllm_mode == "server"

    def optimizer_takes(self, argument: str) -> bool:
        """Whether the optimizer that `optim` names has an argument (`betas`, `eps`). DeepSpeed makes its own."""
        return self.zero is not None or argument in Trainer.get_optimizer_cls_and_kwargs(self)[1]

    @property
    def saves_best(self) -> bool:
        """Whether a checkpoint is written after an evaluation that is better than all before, and only then."""
        return value_of(self.save_strategy) == "best"

    @property
    def follows_metric(self) -> bool:
        """Whether a metric of the evaluations decides which model is the best, or the learning rate."""
        by_metric = value_of(self.lr_scheduler_type) in BY_METRIC
        return bool(self.load_best_model_at_end) or self.saves_best or by_metric

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the run's chat templates: `chat_template_kwargs`, and the run's clock."""
        given: Any = self.chat_template_kwargs
        return {NAME_IN_TEMPLATES: self.template_clock.strftime_now, **(given or {})}

    @property
    def sharded_by(self) -> str | None:
        """What shards the models over ranks: FSDP, DeepSpeed ZeRO-3, or nothing."""
        if self.zero is not None and self.zero.shards:
            return self.zero.title
        return None if self.shards is None else "FSDP"

    @property
    def weights_tokens(self) -> bool:
        """Whether the loss weights tokens by the ratio of trainer and engine."""
        return True

    @property
    def group_size(self) -> int:
        """Completions per prompt in training."""
        raise NotImplementedError

    @property
    def group_size_eval(self) -> int:
        """Completions per prompt in evaluation."""
        return self.group_size

    @property
    def completion_limit(self) -> int:
        """Largest number of tokens of a completion."""
        raise NotImplementedError

    @property
    def context_limit(self) -> int | None:
        """Largest number of tokens of prompt and completion together; None: the model's own limit."""
        return self.vllm_max_model_length

    @property
    def completions_per_micro_batch(self) -> int:
        """Number of completions from which one process learns between two calls of the loop."""
        return self.per_device_train_batch_size

    @property
    def parts_per_generation(self) -> int:
        """Number of micro-batches into which one process splits its share of a generation."""
        return self.gradient_accumulation_steps

    @property
    def passes(self) -> int:
        """Number of passes over each generation."""
        return 1

    @property
    def completions_per_step(self) -> int:
        """Number of completions of one optimizer step, over all processes."""
        return self.completions_per_micro_batch * self.gradient_accumulation_steps * self.world_size

    @property
    def prompts_per_generation(self) -> int:
        """Number of prompts of one generation, over all processes."""
        return (
            self.completions_per_micro_batch * self.parts_per_generation * self.world_size // self.group_size
        )

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches between two generations."""
        return self.parts_per_generation * self.passes

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Number of optimizer steps between two generations."""
        return self.micro_batches_per_generation // self.gradient_accumulation_steps

    @property
    def generations_ahead(self) -> int:
        """Number of later generations that are begun before the current one is used."""
        return self.max_staleness // self.optimizer_steps_per_generation

    @property
    def single_update(self) -> bool:
        """Whether each generation serves exactly one optimizer step, so that the policy does not change in between."""
        return self.optimizer_steps_per_generation == 1

    @property
    def trainer_dtype(self) -> torch.dtype:
        """Dtype in which the trainer computes its forward."""
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def precision(self) -> Precision:
        """How the trainer computes a forward."""
        return Precision(
            torch.bfloat16 if self.bf16 else None, torch.float32 if self.cast_lm_head_to_fp32 else None
        )

    @property
    def engine_torch_dtype(self) -> torch.dtype:
        """Dtype in which the engine computes."""
        return self.trainer_dtype if self.engine_dtype == "auto" else getattr(torch, self.engine_dtype)

    @property
    def engine_head_dtype(self) -> torch.dtype:
        """Dtype in which the engine computes its output head."""
        return torch.float32 if self.cast_lm_head_to_fp32 else self.engine_torch_dtype

    def _refuse_unsupported(self) -> None:
        if self.world_size > 1 and self.saves_best:
            raise InputError(
                "save_strategy=best is not supported with several processes; use steps, epoch or no"
            )
        for name, value in {
            "save_on_each_node": False,
            "metric_for_best_model": None,
            "save_only_model": False,
        }.items():
            # One rank saves while the others wait.
            if self.world_size > 1 and getattr(self, name) != value:
                raise InputError(
                    f"{name}={getattr(self, name)!r} is not supported with several processes; leave it out"
                )
        optimizer = value_of(self.optim)
        if "layerwise" in optimizer or optimizer.startswith(("lomo", "adalomo", "schedule_free")):
            raise InputError(
                f"optim={optimizer} steps inside the backward pass, before the proof; it is not supported"
            )
        for name in ("model_init_kwargs", "chat_template_kwargs", "vllm_engine_kwargs"):
            if not isinstance(getattr(self, name), dict | None):
                raise InputError(
                    f'{name}={getattr(self, name)!r}; it must be a mapping, such as {{"key": 1}}'
                )
        check_init_kwargs(self.model_init_kwargs or {})  # type: ignore[arg-type]
        check_mappings(self)

    def _check_engine(self) -> None:
        server, owner = self.vllm_mode == "server", self.process_index == 0
        self.check_servers(owner=owner)
        self.check_colocated(server=server, use_vllm=self.use_vllm, owner=owner)
        if self.vllm_model_impl not in MODEL_IMPLEMENTATIONS:
            raise InputError(
                f"vllm_model_impl={self.vllm_model_impl!r}; it must be {', '.join(MODEL_IMPLEMENTATIONS)}"
            )
        if self.vllm_enable_lora and self.use_vllm is False:
            raise InputError("vllm_enable_lora needs vLLM, and use_vllm is false; leave one of the two out")
        if self.vllm_enable_lora and self.vllm_mode != "server":
            check_adapters(self.engine_torch_dtype, "vllm_enable_lora")
        if not server:
            return
        if self.use_vllm is False:
            named = [
                n for n in ("vllm_server_base_url", "vllm_server_url_file") if getattr(self, n) is not None
            ]
            asks = named[0] if named else "vllm_mode=server"
            raise InputError(f"{asks} and use_vllm=false contradict each other; leave use_vllm out")
        if self.vllm_engine_kwargs:
            raise InputError(
                "vllm_engine_kwargs are for vLLM in this process; give them to 'lockstep serve' instead"
            )
        if self.vllm_model_impl == "transformers":
            raise InputError(
                "vllm_model_impl is for vLLM in this process; give --model-impl to 'lockstep serve' instead"
            )


@dataclass
class GroupConfig(OnlineConfig):
    """Fields shared by the methods that sample groups.

    `per_device_train_batch_size` counts completions, as in TRL. One generation makes `per_device_train_batch_size ×
    steps_per_generation` completions per process, from `… ÷ num_generations` prompts.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    num_generations: int = option(
        8, "Completions per prompt (the size of a group).", group="method", common=True, bounds=COUNT
    )
    num_generations_eval: int | None = option(
        None,
        "Completions per prompt in evaluation; default: num_generations.",
        group="sampling",
        bounds=COUNT,
        only_with="held_out",
        part=Part.HELD_OUT,
    )
    max_completion_length: int = option(
        512, "Largest number of tokens of a completion.", group="sampling", common=True, bounds=COUNT
    )
    generation_batch_size: int | None = option(
        None,
        "Completions per generation, over all ranks.",
        group="method",
        bounds=COUNT,
        part=Part.LEARNING,
    )
    steps_per_generation: int | None = option(
        None,
        "Micro-batches per generation; default: gradient_accumulation_steps.",
        group="method",
        bounds=COUNT,
        part=Part.LEARNING,
    )
    num_iterations: int = option(
        1,
        "Passes over each generation (μ in the GRPO paper).",
        group="method",
        bounds=COUNT,
        part=Part.LEARNING,
    )
    epsilon: float = option(
        0.2,
        "Lower clip of the ratio: 1 − epsilon.",
        group="method",
        bounds=Bounds(0, infinite=True),
        only_with=("several_steps", "clip"),
        part=Part.LEARNING,
    )
    epsilon_high: float | None = option(
        None,
        "Upper clip: 1 + epsilon_high; default: epsilon.",
        group="method",
        bounds=Bounds(0, infinite=True),
        only_with=("several_steps_or_cispo", "upper_clip"),
        part=Part.LEARNING,
    )
    beta: float = option(
        0.0,
        "Weight of the KL to the reference model; 0: no reference model.",
        group="method",
        common=True,
        bounds=Bounds(0),
        part=Part.LEARNING,
    )
    mask_truncated_completions: bool = option(
        False,
        "Leave completions cut at the length limit out of the loss (not out of the proof).",
        group="method",
        part=Part.LEARNING,
    )
    no_positive_resampling: float | None = option(
        None,
        "Mean reward of a group from which its prompt is left out of later passes over the data; unset: none "
        "is left out.",
        group="method",
        part=Part.RUN,
    )
    sync_ref_model: bool = option(
        False,
        "Let the reference model follow the policy (TR-DPO).",
        group="method",
        part=Part.STEPS,
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "Share of the policy in the reference at a sync.",
        group="method",
        bounds=SHARE,
        only_with="moving_reference",
        part=Part.STEPS,
    )
    ref_model_sync_steps: int = option(
        512,
        "Optimizer steps between two syncs.",
        group="method",
        bounds=COUNT,
        only_with="moving_reference",
        part=Part.STEPS,
    )

    @property
    def group_size(self) -> int:
        return self.num_generations

    @property
    def group_size_eval(self) -> int:
        return self.num_generations_eval or self.num_generations

    @property
    def least_group(self) -> int:
        """Smallest number of completions per prompt that the method needs."""
        return 2

    @property
    def completion_limit(self) -> int:
        return self.max_completion_length

    @property
    def parts_per_generation(self) -> int:
        assert self.steps_per_generation is not None
        return self.steps_per_generation

    @property
    def passes(self) -> int:
        return self.num_iterations

    @property
    def clip_high(self) -> float:
        """Upper clip of the ratio."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def size_generation(self) -> None:
        """Set and check the sizes of a generation.

        Raises:
            InputError: the sizes contradict each other.
        """
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        if self.sync_ref_model and not self.beta:
            raise InputError("sync_ref_model has no reference model to sync: beta is 0")
        if self.num_generations < self.least_group:
            raise InputError(
                f"num_generations={self.num_generations}; an advantage needs at least {self.least_group} "
                f"completions per prompt"
            )
        batch = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None:
            if self.generation_batch_size % batch:
                raise InputError(
                    f"generation_batch_size={self.generation_batch_size} is not a multiple of "
                    f"per_device_train_batch_size × processes = {batch}"
                )
            steps = self.generation_batch_size // batch
            if self.steps_per_generation not in (None, steps):
                raise InputError(
                    f"generation_batch_size={self.generation_batch_size} means steps_per_generation={steps}, "
                    f"but it is given "
                    f"as {self.steps_per_generation}; give one of the two"
                )
            self.steps_per_generation = steps
        elif self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        assert self.steps_per_generation is not None
        self.generation_batch_size = batch * self.steps_per_generation
        if self.generation_batch_size % self.num_generations:
            raise InputError(
                f"one generation makes {self.generation_batch_size} completions (per_device_train_batch_size × "
                f"processes = {batch}, × steps_per_generation={self.steps_per_generation}), not a multiple of "
                f"num_generations={self.num_generations}"
            )
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} is not a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: an optimizer step would span two generations"
            )
