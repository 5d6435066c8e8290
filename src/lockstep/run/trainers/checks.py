"""Checks of a trainer's arguments, pictures and class, before a model is loaded.

The objects that a user gives are of the right kind; a wrong one would otherwise end in an error of another library. A
run has pictures or has none, and what is not supported with them is refused. So is a subclass that overrides a method
which TRL's or transformers' loop calls and Lockstep's does not: it would train as if it did not override the method.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Value
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
)

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError, LockstepError
from lockstep.images.prompts import ImagePrompts, PromptReader
from lockstep.images.reading import COLUMNS, has_images
from lockstep.images.urls import ImageUrls
from lockstep.learn.experts import check_routers, has_routers
from lockstep.learn.policy_and_reference import OpenedPolicy
from lockstep.learn.scoring import check_scorable, why_plain_rows
from lockstep.model_files import load_files
from lockstep.models.adapters import causal_model, is_adapted
from lockstep.models.policy import BAD_FILES, FAMILIES, check_finite, context_length, reads_pictures
from lockstep.models.resolve import resolve_model
from lockstep.models.reward_model import RewardModel
from lockstep.whose_code import is_lockstep

_logger = logging.getLogger(__name__)

# Arguments of TRL's trainers that Lockstep does not support yet.
_KNOWN = {"data_collator", "compute_metrics", "preprocess_logits_for_metrics"}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructors that are not supported yet."""
    for name, value in given.items():
        if name not in _KNOWN:
            raise TypeError(f"unexpected argument {name!r}")
        if value is not None:
            raise InputError(f"{name} is not supported yet; leave it out")


def check_reference(model: Any, ref_model: Any, args: Any, peft_config: Any) -> None:
    """Refuse a reference model that is the policy itself, is not used, or cannot follow the policy."""
    if ref_model is not None and ref_model is model:
        raise InputError(
            "ref_model is the model that is trained; leave it out to use a copy of it as it is now"
        )
    if ref_model is not None and not args.beta:
        raise InputError(
            "ref_model is given, and beta=0.0 leaves it unused; set beta, or leave ref_model out"
        )
    adapted = peft_config is not None or (not isinstance(model, str) and is_adapted(model))
    if getattr(args, "sync_ref_model", False) and adapted:
        raise InputError(
            "sync_ref_model needs a reference model of its own; with an adapter it is the base model"
        )


def router_coefficient(model: PreTrainedModel, args: Any) -> float:
    """The weight of the auxiliary loss of a mixture of experts: the user's, or the model's own; 0: none."""
    inner, given = causal_model(model), args.router_aux_loss_coef
    config = inner.config.get_text_config()
    if not has_routers(inner):
        if given:
            raise InputError(
                f"router_aux_loss_coef={given}, and {type(inner).__name__} is no mixture of experts; leave it out"
            )
        return 0.0
    coefficient = float((getattr(config, "router_aux_loss_coef", None) or 0.0) if given is None else given)
    if coefficient:
        check_routers(inner)
    return coefficient


def kinds_of_data(
    datasets: Mapping[str, Any], rewards: Sequence[Any], *, makes_text: bool
) -> dict[str, bool]:
    """Whether a run has texts and conversations, and plain reward functions, as `Run` has it.

    Args:
        datasets: each has a column `prompt`, or rows of which something else makes prompts (`makes_text`).
        rewards: functions, reward models, and their names; None: there are none.
    """
    texts = {isinstance(rows.features.get("prompt"), Value) for rows in datasets.values()}
    plain = [
        callable(r) and not isinstance(r, torch.nn.Module | RewardModel) for r in rewards if r is not None
    ]
    return {
        "has_texts": makes_text or True in texts,
        # Reward models and judges have chat templates too.
        "has_conversations": makes_text or False in texts or not all(plain) or not plain,
        "scores": any(plain),
    }


def context_within(model: PreTrainedModel, wanted: int | None) -> int:
    """The largest number of tokens in prompt and completion: `wanted`, bounded by the model's own limit."""
    limits = [limit for limit in (wanted, context_length(causal_model(model).config)) if limit is not None]
    if not limits:
        raise InputError("the model's config names no longest sequence; set vllm_max_model_length")
    return min(limits)


def needs_plain_rows(models: Sequence[PreTrainedModel], max_length: int) -> bool:
    """Whether one of the models cannot attend within a tree. If so, prints that prompts are not shared."""
    reasons = [why for model in models if (why := why_plain_rows(causal_model(model), max_length))]
    if reasons:
        _logger.info(
            f"the model learns from one row per completion, and prompts are not shared: {reasons[0]}"
        )
    return bool(reasons)


def check_reference_model(model: PreTrainedModel, ref_model: PreTrainedModel) -> None:
    """Refuse a reference model that cannot be scored correctly, or that has another vocabulary than the policy."""
    check_scorable(causal_model(ref_model))
    check_finite("ref_model", ref_model.named_parameters())
    sizes = [m.get_input_embeddings().weight.shape[0] for m in (causal_model(model), causal_model(ref_model))]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"ref_model has a vocabulary of {sizes[1]} tokens, the policy one of {sizes[0]}; they must be the same"
        )


def check_kinds(model: Any, tokenizer: Any, callbacks: Any, optimizers: Any, engine: Any) -> None:
    """Check the kinds of a constructor's arguments, and what torch does in this process."""
    check_torch()
    check_model_kind(model)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(
            f"processing_class is a {_kind(tokenizer)}; it must be a tokenizer of transformers, or a "
            "processor with a tokenizer"
        )
    if callbacks is not None and not (
        isinstance(callbacks, list | tuple) and all(map(_is_callback, callbacks))
    ):
        raise InputError(f"callbacks is {callbacks!r:.80}; it must be a list of transformers.TrainerCallback")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise InputError(
            f"optimizers is {optimizers!r:.80}; it must be a pair: an optimizer and a learning-rate schedule"
        )
    if engine is not None and not all(
        hasattr(engine, name) for name in ("settings", "generate", "score", "load")
    ):
        raise InputError(f"engine is a {_kind(engine)}; it must be an engine of lockstep.engines")


def check_torch() -> None:
    """Refuse settings of torch that hold for the whole process, or for the block of the caller, and change a run.

    Raises:
        InputError: the default dtype is not float32, gradients are switched off, or autocast is on.
    """
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        raise InputError(
            f"torch's default dtype is {str(dtype).removeprefix('torch.')} here: call "
            "torch.set_default_dtype(torch.float32) before (bf16 and model_init_kwargs.dtype choose the model's)"
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise InputError(
            "torch's gradients are switched off here (no_grad, inference_mode or set_grad_enabled(False)): make "
            "and call the trainer outside of it"
        )
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise InputError(
            "torch.autocast is on here: make and call the trainer outside of it; bf16=True computes in bfloat16"
        )


def check_model_kind(model: Any) -> None:
    """Check that a trainer's model is a name or a causal language model of transformers, maybe with an adapter."""
    if isinstance(model, str):
        return
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(
            f"model is a {_kind(model)}; it must be a name, a directory as text, a hub id, or a causal "
            "language model of transformers"
        )
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        raise InputError(
            "model is compiled (torch.compile): its weights have other names, and its forward has not been compared "
            "with the engine; give the model itself"
        )
    inner = causal_model(model)
    if inner.get_output_embeddings() is None:
        raise InputError(f"model is a {_kind(inner)}, which has no output head; give a causal language model")


def check_open(is_closed: bool) -> None:
    """Refuse to work with a trainer whose engine is closed."""
    if is_closed:
        raise LockstepError("the trainer is closed (close() was called); make a new one")


def _is_callback(given: Any) -> bool:
    return isinstance(given, TrainerCallback) or (
        isinstance(given, type) and issubclass(given, TrainerCallback)
    )


def _kind(given: Any) -> str:
    return type(given).__name__


def parts_of_processor(given: Any) -> tuple[Any, Any]:
    """A trainer's `processing_class` as a tokenizer and an image processor; None: it has none.

    TRL's scripts give both as one.
    """
    if not isinstance(given, ProcessorMixin):
        return given, None
    tokenizer: Any = getattr(given, "tokenizer", None)
    if tokenizer is not None and given.chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = given.chat_template
    return tokenizer if tokenizer is not None else given, getattr(given, "image_processor", None)


def check_images(datasets: Mapping[str, Any], model: Any, args: OnlineConfig) -> None:
    """Refuse pictures that the model cannot read, or that the run cannot show it yet. Data sets may be None."""
    in_use = {"use_liger_kernel": bool(args.use_liger_kernel)}
    for name, data in datasets.items():
        if not shows_pictures(data):
            continue
        if not may_read_pictures(model):
            if columns := set(COLUMNS) & set(data.column_names):
                # TRL would show the images to the model. If they were ignored, the model would answer without having
                # seen them.
                raise InputError(
                    f"the {name} dataset has a column {min(columns)!r}: images are not supported for this model "
                    f"({_family(model)}); drop the column, or give a model that reads images ({', '.join(FAMILIES)})"
                )
            # Parts of messages are refused where they are rendered, with the name of the row.
            continue
        if found := [feature for feature, used in in_use.items() if used]:
            raise InputError(
                f"not supported with images yet: {'; '.join(found)}. Leave it out, or drop the images "
                "(docs/guides/images.md lists what works)"
            )


def prompt_reader(
    opened: OpenedPolicy,
    args: OnlineConfig,
    datasets: Mapping[str, Any],
    processor: Any = None,
    *,
    acting: bool,
) -> PromptReader:
    """The reader of a run's prompts: of text alone, if the run has no pictures or cannot show any.

    If `acting`, tools, environments, a function or an agent may give pictures that no dataset has. Where such a run
    cannot show them, a tool that gives one gives an error to the model, and an agent gets an error.
    """
    model, arguments, special = causal_model(opened.model), args.template_arguments, args.add_special_tokens
    text = PromptReader(opened.tokenizer, arguments, add_special_tokens=special)
    in_data = any(map(shows_pictures, datasets.values()))
    if not reads_pictures(model.config) or not (in_data or acting):
        return text
    try:
        return ImagePrompts(
            model,
            opened.tokenizer,
            opened.path,
            arguments,
            args.picture_limits,
            ImageUrls(args.image_urls or ()),
            processor,
            add_special_tokens=special,
        )
    except InputError:
        # A model that comes without an image processor may still be trained on text.
        if in_data:
            raise
        return text


def shows_pictures(data: Any) -> bool:
    """Whether the prompts of a dataset show pictures: in columns of their own, or in parts of messages."""
    if data is None:
        return False
    if set(COLUMNS) & set(data.column_names):
        # Its rows need not be decoded.
        return True
    # The contents of a dataset's messages are of one kind: text, or lists of parts.
    first = data[0]["prompt"]
    in_parts = isinstance(first, list) and any(
        isinstance(m, Mapping) and isinstance(m.get("content"), list) for m in first
    )
    return in_parts and any(has_images({"prompt": prompt}) for prompt in data["prompt"])


def may_read_pictures(model: Any) -> bool:
    """Whether the model reads pictures, as far as its config is on this machine."""
    config = _config(model)
    # Loading the model says what is wrong with it. If it reads no pictures, `load_prompts` refuses them.
    return config is None or reads_pictures(config)


def _family(model: Any) -> str:
    config = _config(model)
    return config.model_type if config is not None else "unknown"


def _config(model: Any) -> PreTrainedConfig | None:
    """The config of a trainer's model; None: it cannot be read."""
    if not isinstance(model, str):
        return causal_model(model).config
    try:
        return load_files(AutoConfig, resolve_model(model), local_files_only=True)
    except BAD_FILES:
        return None


_LOSS = "set objective_class to an Objective (lockstep.learn.methods.objective) with a loss of its own"
_SCORES = "give reward_funcs, or override scorer()"
_ROLLOUTS = "set loop_class to a TrainingLoop (lockstep.run.loop) with its own rollout()"
_TOOLS = "give tools, environment_factory, or a rollout_func with its own loop"
_ADVANTAGES = "set objective_class to an Objective with its own with_advantages()"
_PROMPTS = "give train_dataset as the run should see it"
_EVALUATION = "override evaluate()"
_METRICS = "override log(), or call log_metric and log_extra in a reward function"
_PUSH = "every push goes through RolloutSource.push() (lockstep.run.source), which also proves it"

_CHECKPOINTING = "set gradient_checkpointing and gradient_checkpointing_kwargs"

# For each method of TRL or transformers: the part of Lockstep that does the same.
HOOKS: dict[str, str] = {
    **dict.fromkeys(
        (
            "compute_loss",
            "_compute_loss",
            "_get_per_token_logps_and_entropies",
            "get_high_entropy_mask",
            "_forward",
        ),
        _LOSS,
    ),
    **dict.fromkeys(("_calculate_rewards", "_calculate_rewards_from_functions"), _SCORES),
    **dict.fromkeys(
        (
            "_generate",
            "_generate_and_score_completions",
            "_generate_single_turn",
            "_generate_vllm",
            "_generate_vllm_colocate",
            "_generate_vllm_server",
        ),
        _ROLLOUTS,
    ),
    **dict.fromkeys(("_tool_call_loop", "_get_tool_suffix_ids"), _TOOLS),
    **dict.fromkeys(
        ("_prepare_inputs", "_prepare_input"), f"{_ROLLOUTS}; for what is learned from them, {_ADVANTAGES}"
    ),
    **dict.fromkeys(
        (
            "_tokenize_prompts",
            "_get_train_sampler",
            "_get_dataloader",
            "_remove_unused_columns",
            "_get_collator_with_removed_columns",
            "_set_signature_columns_if_needed",
            "process_vision_row",
        ),
        _PROMPTS,
    ),
    **dict.fromkeys(
        (
            "evaluation_loop",
            "prediction_step",
            "get_eval_dataloader",
            "_get_eval_sampler",
            "get_test_dataloader",
        ),
        _EVALUATION,
    ),
    "_enable_gradient_checkpointing": _CHECKPOINTING,
    **dict.fromkeys(("_log_metric", "_log_completion_extra"), _METRICS),
    **dict.fromkeys(
        (
            "_fix_param_name_to_vllm",
            "_move_model_to_vllm",
            "_move_model_to_vllm_inner",
            "_sync_fsdp1_params_to_vllm",
            "_sync_fsdp2_params_to_vllm",
        ),
        _PUSH,
    ),
}


class RefusesForeignHooks:
    """A base class of the trainers. It checks their subclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass that overrides, itself or in a base class, a method that Lockstep never calls."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            # Lockstep's own classes may use such a name for something else.
            ours = base in Trainer.__mro__ or is_lockstep(base)
            for name in () if ours else vars(base):
                if name in HOOKS:
                    raise InputError(
                        f"{base.__name__} overrides {name}(), which the loop of Lockstep's trainers never "
                        f"calls as TRL's does. Instead: {HOOKS[name]}"
                    )
