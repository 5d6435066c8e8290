"""Checks a trainer's arguments before training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import PreTrainedModel

from lockstep.errors import InputError, check_extra
from lockstep.models.adapters import causal_model, is_adapted
from lockstep.models.loaded_checks import check_finite
from lockstep.models.policy import context_length
from lockstep.models.routers import has_routers
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.training.config.fields.filters import FilterFields
from lockstep.training.forward.routing import check_routers
from lockstep.training.forward.scoring import check_scorable, why_plain_rows
from lockstep.training.generate.rollouts.tools import RolloutTools

if TYPE_CHECKING:
    from lockstep.training.generate.rollouts.agents import RolloutAgents

_logger = logging.getLogger(__name__)

# Arguments of TRL's trainers that Lockstep does not support yet.
_KNOWN = {"data_collator", "compute_metrics", "preprocess_logits_for_metrics"}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructors that are not supported yet.

    Raises:
        InputError: such an argument is not None.
        TypeError: no trainer of TRL has the argument.
    """
    for name, value in given.items():
        if name not in _KNOWN:
            raise TypeError(f"unexpected argument {name!r}")
        if value is not None:
            raise InputError(f"{name} is not supported yet; leave it out")


def rollout_tools(
    tools: Any,
    environment_factory: Any,
    rollout_func: Any,
    agent: Any,
    config: Any,
    ranks: Ranks,
    dataset: Dataset,
    model: Any,
) -> RolloutTools | RolloutAgents | None:
    """The tools and environments of a trainer, or its agents; None if it has none.

    Raises:
        InputError: as in `RolloutTools` and `RolloutAgents`; or a `rollout_func` is given beside them, with generations ahead, or
            with filters that need kept ids; or an agent beside others; or a setting counts the tokens of one call to the engine.
    """
    acting = bool(tools) or environment_factory is not None
    if agent is not None:
        if acting or rollout_func is not None:
            raise InputError(
                "an agent brings its own tools: leave tools, environment_factory and rollout_func out, or agent"
            )
        config.check_several_calls("an agent")
        return _rollout_agents(agent, config, ranks, model)
    if rollout_func is not None:
        if acting:
            raise InputError(
                "rollout_func makes rollouts itself; leave tools and environment_factory out, or rollout_func"
            )
        for name in ("max_staleness", "max_thinking_length"):
            if getattr(config, name):
                raise InputError(f"{name}={getattr(config, name)} is not supported with rollout_func; leave it out")
        # The bound on kept ids filters nothing by itself.
        plain = FilterFields(max_kept_ids=config.max_kept_ids).filter_values()
        if config.bad_words or config.filter_values() != plain:
            # The trainer would have to know which tokens each of the function's calls could sample.
            raise InputError(
                "rollout_func is supported with temperature and stop_strings only; leave top_p, top_k, min_p, penalties and "
                "structured outputs out"
            )
    if not acting:
        return None
    config.check_several_calls("a tool or an environment")
    row = dataset[0] if config.rehearse_rewards else None
    return RolloutTools(tools or [], environment_factory, config, ranks, row)


def _rollout_agents(agent: Any, config: Any, ranks: Ranks, model: Any) -> RolloutAgents:
    check_extra("an agent", "gateway", "starlette", "uvicorn")
    from lockstep.training.generate.rollouts.agents import RolloutAgents

    return RolloutAgents(agent, config, ranks, model if isinstance(model, str) else model.config._name_or_path)


def check_reference(model: Any, ref_model: Any, args: Any, peft_config: Any) -> None:
    """Refuse a reference model that is the policy itself, is not used, or cannot follow the policy.

    Raises:
        InputError: the reference is the policy itself; `beta` is 0; or `sync_ref_model` is set and an adapter is trained.
    """
    if ref_model is not None and ref_model is model:
        raise InputError("ref_model is the model that is trained; leave it out to use a copy of it as it is now")
    if ref_model is not None and not args.beta:
        raise InputError("ref_model is given, and beta=0.0 leaves it unused; set beta, or leave ref_model out")
    adapted = peft_config is not None or (not isinstance(model, str) and is_adapted(model))
    if getattr(args, "sync_ref_model", False) and adapted:
        raise InputError("sync_ref_model needs a reference model of its own; with an adapter it is the base model")


def router_coefficient(model: PreTrainedModel, args: Any) -> float:
    """The weight of the auxiliary loss of a mixture of experts: the user's, or the model's own, as in TRL. 0: there is none.

    Raises:
        InputError: the user asks for the loss, and the model has no routers; or the loss of the model's routers is another one.
    """
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


def context_within(model: PreTrainedModel, wanted: int | None) -> int:
    """The largest number of tokens in prompt and completion: `wanted`, bounded by the model's own limit.

    Raises:
        InputError: neither the model nor the config names a limit.
    """
    limits = [limit for limit in (wanted, context_length(causal_model(model).config)) if limit is not None]
    if not limits:
        raise InputError("the model's config names no longest sequence; set vllm_max_model_length")
    return min(limits)


def needs_plain_rows(models: Sequence[PreTrainedModel], max_length: int) -> bool:
    """Whether one of the models cannot attend within a tree. If so, prints that prompts are not shared."""
    reasons = [why for model in models if (why := why_plain_rows(causal_model(model), max_length))]
    if reasons:
        _logger.info(f"the model learns from one row per completion, and prompts are not shared: {reasons[0]}")
    return bool(reasons)


def check_reference_model(model: PreTrainedModel, ref_model: PreTrainedModel) -> None:
    """Refuse a reference model that cannot be scored correctly, or that has another vocabulary than the policy.

    Raises:
        InputError: as in `check_scorable`; or the vocabularies differ; or a weight is NaN or infinite.
    """
    check_scorable(causal_model(ref_model))
    check_finite("ref_model", ref_model.named_parameters())
    sizes = [m.get_input_embeddings().weight.shape[0] for m in (causal_model(model), causal_model(ref_model))]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"ref_model has a vocabulary of {sizes[1]} tokens, the policy one of {sizes[0]}; they must be the same"
        )
