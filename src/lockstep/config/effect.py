"""When a field has an effect: conditions by name, and what is said of a field that was set where it has none.

Conditions are named beside the declaration of a field (`only_with`). Most ask the config alone. Those of `OF_A_RUN`
ask what a trainer was given, so that the trainer says them. A field counts as set if it has another value than its
default. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from lockstep.config.option import Part, value_of
from lockstep.config.table import with_key
from lockstep.errors import InputError
from lockstep.private_caches import expanded
from lockstep.tasks import MADE

_logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """What a trainer was given, as far as fields depend on it.

    Attributes:
        acts: whether there are tools or environments.
        has_texts: whether prompts may be plain text.
        has_conversations: whether a chat template may be used: by prompts, agents, reward models.
        scores: whether there are plain reward functions.
        starts_engine: whether the trainer starts the engine, or connects to servers.
    """

    acts: bool
    has_agent: bool
    reads_pictures: bool
    evaluates: bool
    has_texts: bool
    has_conversations: bool
    scores: bool
    starts_engine: bool


class Condition(NamedTuple):
    """When a field has an effect.

    Attributes:
        without: what is missing where it has none.
        holds: whether it has one, by the config; of a condition of a run, by the `Run`.
        remedy: what to set where a field without an effect is refused; None: a line says so, and the run goes on.
    """

    without: str
    holds: Callable[[Any], bool]
    remedy: str | None = None


def _is(name: str, *values: str) -> Callable[[Any], bool]:
    return lambda c: value_of(getattr(c, name)) in values


def _is_not(name: str, *values: str) -> Callable[[Any], bool]:
    return lambda c: value_of(getattr(c, name)) not in values


def _loss(*names: str) -> Callable[[Any], bool]:
    """Methods other than GRPO have one loss, which is clipped."""
    return lambda c: getattr(c, "loss_type", None) in (None, *names)


def _tracks(*names: str) -> Callable[[Any], bool]:
    def holds(config: Any) -> bool:
        given = [config.report_to] if isinstance(config.report_to, str) else config.report_to or ()
        return bool({*names, "all"} & set(given))

    return holds


def _has_subsets(arguments: Any) -> bool:
    """A file has no subsets, and neither have two of the built-in problems."""
    name = arguments.dataset_name or ""
    return name not in ("calculator", "dots") and not expanded(name).exists()


def _is_made(arguments: Any) -> bool:
    return arguments.dataset_name in MADE


# Schedules that follow the metrics of evaluations, and know neither steps nor a warm-up.
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
WITHOUT_WARM_UP = ("constant", *BY_METRIC)
# With one step, the ratios of a generation are 1.
_ONE_STEP = "without several optimizer steps per generation (num_iterations)"
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")

CONDITIONS = {
    "vllm": Condition("without vLLM (use_vllm)", lambda c: c.uses_vllm),
    "vllm_here": Condition(
        "without vLLM in this process (use_vllm, vllm_mode=colocate)",
        lambda c: c.uses_vllm and c.vllm_mode != "server",
    ),
    "engine_here": Condition("with servers", lambda c: c.vllm_mode != "server"),
    "servers": Condition(
        "without servers (vllm_mode=server, or vllm_server_base_url)", lambda c: c.vllm_mode == "server"
    ),
    "server_without_url": Condition(
        "unless vllm_mode is server, without vllm_server_base_url and vllm_server_url_file",
        lambda c: c.vllm_mode == "server" and not (c.vllm_server_base_url or c.vllm_server_url_file),
    ),
    "token_weights": Condition("without a loss with such weights", lambda c: c.weights_tokens),
    "correction": Condition(
        "without vllm_importance_sampling_correction", lambda c: c.vllm_importance_sampling_correction
    ),
    "thinking": Condition("without max_thinking_length", lambda c: c.max_thinking_length is not None),
    "filter": Condition(
        "without top_p, top_k or min_p",
        lambda c: c.top_p < 1.0 or c.top_k > 0 or bool(c.min_p) or bool(c.generation_kwargs),
    ),
    "printing": Condition("without log_completions", lambda c: c.log_completions),
    "low_head": Condition(
        "with float32 on both sides (bf16, engine_dtype)",
        lambda c: c.bf16 or value_of(c.engine_dtype) == "bfloat16",
    ),
    "clip": Condition(f"without loss_type {', '.join(_CLIPPED)}", _loss(*_CLIPPED)),
    "upper_clip": Condition(
        f"without loss_type {', '.join((*_CLIPPED, 'cispo'))}",
        # A config that was made has the value of `epsilon`.
        lambda c: _loss(*_CLIPPED, "cispo")(c) or c.epsilon_high == c.epsilon,
    ),
    "sapo": Condition("without loss_type sapo", _loss("sapo")),
    "vespo": Condition("without loss_type vespo", _loss("vespo")),
    "kl": Condition("without beta", lambda c: bool(c.beta)),
    "summed_rewards": Condition(
        "with multi_objective_aggregation=normalize_then_sum",
        lambda c: c.multi_objective_aggregation != "normalize_then_sum",
    ),
    "adaptive_entropy": Condition("without use_adaptive_entropy", lambda c: c.use_adaptive_entropy),
    "moving_reference": Condition("without sync_ref_model", lambda c: c.sync_ref_model),
    "checkpointing": Condition("without gradient_checkpointing", lambda c: c.gradient_checkpointing),
    "several_steps": Condition(_ONE_STEP, lambda c: not c.single_update),
    # The bound of CISPO may be below 1, and that of dual clipping too.
    "several_steps_or_cispo": Condition(_ONE_STEP, lambda c: not c.single_update or not _loss(*_CLIPPED)(c)),
    "several_steps_or_below_1": Condition(_ONE_STEP, lambda c: not c.single_update or (c.delta or 1.0) < 1.0),
    "several_steps_or_kl": Condition(
        "without beta, or several optimizer steps per generation (num_iterations)",
        lambda c: not c.single_update or (bool(c.beta) and c.use_bias_correction_kl),
    ),
    "warm_up": Condition(
        "without an lr_scheduler_type that warms up", _is_not("lr_scheduler_type", *WITHOUT_WARM_UP)
    ),
    "shuffled": Condition("without shuffle_dataset", lambda c: c.shuffle_dataset),
    "gpu": Condition("without a GPU", lambda c: c.device.type != "cpu"),
    "epochs": Condition("with max_steps", lambda c: c.max_steps <= 0),
    "betas": Condition("with this optim", lambda c: c.optimizer_takes("betas")),
    "eps": Condition("with this optim", lambda c: c.optimizer_takes("eps")),
    "projection": Condition(
        "without an optim that projects (galore, apollo)",
        lambda c: any(word in value_of(c.optim) for word in ("galore", "apollo")),
    ),
    "log_steps": Condition("without logging_strategy=steps", _is("logging_strategy", "steps")),
    "evaluation": Condition("without eval_strategy", _is_not("eval_strategy", "no")),
    "evaluation_steps": Condition("without eval_strategy=steps", _is("eval_strategy", "steps")),
    "saving": Condition("without save_strategy", _is_not("save_strategy", "no")),
    "saving_best": Condition(
        "without save_strategy", _is_not("save_strategy", "no"), "set save_strategy and eval_strategy"
    ),
    "save_steps": Condition("without save_strategy=steps", _is("save_strategy", "steps")),
    "metric": Condition(
        "without load_best_model_at_end, save_strategy=best or a schedule by metric",
        lambda c: c.follows_metric,
    ),
    "hub": Condition("without push_to_hub while training", lambda c: c.push_to_hub),
    "hub_or_trackio": Condition(
        "without push_to_hub or report_to=trackio while training",
        lambda c: c.push_to_hub or _tracks("trackio")(c),
    ),
    "trackio": Condition("without report_to=trackio", _tracks("trackio")),
    "fsdp": Condition("without fsdp", lambda c: c.shards is not None),
    "processes": Condition("with one process", lambda c: c.world_size > 1),
    "peft": Condition("without use_peft", lambda c: c.use_peft, "set use_peft"),
    "four_bits": Condition("without load_in_4bit", lambda c: c.load_in_4bit, "set load_in_4bit"),
    "data": Condition("without dataset_name", lambda c: c.dataset_name is not None),
    "subsets": Condition("with calculator, dots, a file or a directory", _has_subsets),
    "splits": Condition("with built-in problems", lambda c: not _is_made(c)),
    "drawn_rows": Condition(
        "without eval_size, or with dataset_test_split",
        lambda c: (c.eval_size > 0 and c.dataset_test_split is None) or _is_made(c),
    ),
}
# A call of `trainer.evaluate` with other data is not known before.
OF_A_RUN = {
    "acting": Condition("without tools or environments", lambda r: r.acts),
    "calls": Condition("without tools, environments or an agent", lambda r: r.acts or r.has_agent),
    "agent": Condition("without an agent", lambda r: r.has_agent),
    "pictures": Condition("with a model that reads no pictures", lambda r: r.reads_pictures),
    "texts": Condition("without prompts that are plain text", lambda r: r.has_texts),
    "conversations": Condition("without conversations", lambda r: r.has_conversations),
    "plain_rewards": Condition("without plain reward functions", lambda r: r.scores),
    "own_engine": Condition("without an engine that the trainer starts", lambda r: r.starts_engine),
    "held_out": Condition("without data to evaluate on while training", lambda r: r.evaluates),
}
# What a command says of itself that lacks a part of a run.
NOTHING_OF = {
    Part.LEARNING: "learns nothing",
    Part.STEPS: "takes no optimizer step",
    Part.RUN: "makes no training run",
    Part.HELD_OUT: "evaluates nothing",
    Part.REWARDS: "has rewards of its own",
    Part.ACTING: "calls no tool and no agent",
}


def set_fields(given: Any) -> list[str]:
    """The fields of a dataclass that have another value than their default."""
    found = []
    for field in dataclasses.fields(given):
        usual = field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        value = getattr(given, field.name, usual)
        is_usual = value in (None, [], {}, "", usual) or value_of(value) == value_of(usual)
        if field.init and not is_usual:
            found.append(field.name)
    return found


def say_without_effect(
    given: Any, named: Collection[str], run: Run | None = None, *, owner: bool = True
) -> None:
    """Say which fields were set and have no effect, in one line for each condition.

    Args:
        given: a dataclass of `option`s.
        named: the fields that were set.
        run: of a trainer, for the conditions of a run; None: the others are checked.
        owner: whether this process prints.

    Raises:
        InputError: such a field changes what was meant, so that it is refused.
    """
    known, asked = (CONDITIONS, given) if run is None else (OF_A_RUN, run)
    lines: dict[str, list[str]] = {}
    for name, conditions in with_key(type(given), "only_with").items():
        if name not in named:
            continue
        for condition in (known[c] for c in conditions if c in known):
            if condition.holds(asked):
                continue
            if condition.remedy is not None:
                raise InputError(
                    f"{name} has no effect {condition.without}; {condition.remedy}, or leave {name} out"
                )
            lines.setdefault(condition.without, []).append(name)
            break
    for without, names in lines.items() if owner else ():
        tell_no_effect(names, without)


def tell_no_effect(names: Collection[str], without: str) -> None:
    """Say in one line which fields have no effect, and where."""
    verb = "has" if len(names) == 1 else "have"
    _logger.warning(f"{' and '.join(names)} {verb} no effect {without}")


def without_effect(conditions: Collection[str]) -> str:
    """What a field needs to have an effect, or where it has none, for a reader of the reference."""
    found = [(CONDITIONS | OF_A_RUN)[name].without for name in conditions]
    if all(each.startswith("without ") for each in found):
        return f"Needs {' and '.join(each.removeprefix('without ') for each in found)}."
    return f"No effect {' or '.join(found)}."
