"""Refuses subclasses that override a method which TRL's or transformers' loop calls and Lockstep's loop does not.

Such a subclass would train as if it did not override the method.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from lockstep.errors import InputError
from lockstep.whose_code import is_lockstep

_LOSS = "set objective_class to an Objective (lockstep.training.methods.objective) with a loss of its own"
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
        ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "get_high_entropy_mask", "_forward"),
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
        ("evaluation_loop", "prediction_step", "get_eval_dataloader", "_get_eval_sampler", "get_test_dataloader"),
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
        """Check a subclass when it is defined.

        Raises:
            InputError: the subclass, or a base class of it, overrides a method that Lockstep never calls.
        """
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            # Lockstep's own classes may use such a name for something else.
            ours = base in Trainer.__mro__ or is_lockstep(base)
            for name in () if ours else vars(base):
                if name in HOOKS:
                    raise InputError(
                        f"{base.__name__} overrides {name}(), which the loop of Lockstep's trainers never calls as TRL's "
                        f"does. Instead: {HOOKS[name]}"
                    )
