"""What TRL's users read and set at a trainer, under TRL's names, and TRL's arguments of the model card.

`TRLNames` is a table. Nothing is stored twice: an attribute reads what the run uses, and an assignment changes that or
is refused by a sentence.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from transformers import GenerationConfig, Trainer

from lockstep.config.checks import check_number
from lockstep.errors import InputError
from lockstep.learn.methods.objective import Objective
from lockstep.learn.policy_and_reference import Reference
from lockstep.models.policy import first_line, reads_pictures
from lockstep.models.reward_model import RewardModel
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.rewards import OwnReward, Scorer, reward_name
from lockstep.run.engine import vllm_installed
from lockstep.run.files.identity import Changes
from lockstep.run.files.logs import StepLog
from lockstep.run.programs import Acting, RolloutTools
from lockstep.run.source import RolloutSource

Read = Callable[[Any], Any]
Write = Callable[[Any, Any], None]


class Attribute:
    """A data descriptor.

    Args:
        read: gives the value for a trainer; or the name of an attribute of its config. If that config has no such
            attribute, the trainer does not have this one either (`AttributeError`).
        write: takes a new value; None: an assignment is refused.
        instead: what to do instead of an assignment that is refused, as an imperative.
    """

    def __init__(self, read: Read | str, *, write: Write | None = None, instead: str | None = None) -> None:
        self._read, self._write = read, write
        self._instead = instead or (f"set {read} in the config" if isinstance(read, str) else "")
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @property
    def acts(self) -> bool:
        """Whether an assignment changes the run."""
        return self._write is not None

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        """The value; of the class, the descriptor itself."""
        if trainer is None:
            return self
        if callable(self._read):
            return self._read(trainer)
        try:
            return getattr(trainer.config, self._read)
        except AttributeError:
            raise AttributeError(f"{type(trainer).__name__} has no attribute {self._name!r}") from None

    def __set__(self, trainer: Any, value: Any) -> None:
        """Take a new value, or refuse it with what to do instead."""
        self.__get__(trainer)
        if self._write is None:
            advice = f"{self._instead}, and make a new trainer" if self._instead else "make a new trainer"
            raise InputError(
                f"trainer.{self._name} cannot be changed, because the run would not follow it: {advice}"
            )
        self._write(trainer, value)


class OnceGiven:
    """A data descriptor for what `transformers.Trainer` sets once: what was given then stays.

    Args:
        instead: what to do instead of a later assignment, as an imperative.
    """

    def __init__(self, instead: str) -> None:
        self._instead, self._name = instead, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        """What was given; of the class, the descriptor itself."""
        if trainer is None:
            return self
        try:
            return vars(trainer)[self._name]
        except KeyError:
            raise AttributeError(f"{type(trainer).__name__} has no attribute {self._name!r} yet") from None

    def __set__(self, trainer: Any, value: Any) -> None:
        """Take the value, the first time."""
        if self._name in vars(trainer) and value is not vars(trainer)[self._name]:
            raise InputError(
                f"trainer.{self._name} cannot be changed, because its rows were read when the trainer was "
                f"made: {self._instead}"
            )
        vars(trainer)[self._name] = value


class Absent:
    """A descriptor for a name that TRL's trainers have and ours do not. `hasattr` is False.

    Args:
        why: the reason, and what to use instead.
    """

    def __init__(self, why: str) -> None:
        self.why, self._name = why, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        """Raise an AttributeError with the reason."""
        owner = kind if trainer is None else type(trainer)
        raise AttributeError(f"{owner.__name__ if owner else 'the trainer'} has no {self._name}: {self.why}")


_logger = logging.getLogger(__name__)

# The base class of all errors of a call to the hub. Which HTTP library has it depends on the version of
# huggingface_hub.
_HTTP_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


@contextmanager
def _hub_errors(folder: str | None) -> Iterator[None]:
    try:
        yield
    except (OfflineModeIsEnabled, LocalTokenNotFoundError, _HTTP_ERROR) as error:
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise InputError(
            f"push_to_hub: {hub} cannot be used ({first_line(error)}). Check the network, HF_HUB_OFFLINE "
            "and 'hf auth login'. Nothing on disk is lost: call push_to_hub() later, or upload what is in "
            f"{folder} with 'hf upload'"
        ) from error


_CONNECTION = (
    "it is TRL's own connection to vLLM; the engine is trainer.engine (lockstep.contract.protocol), and a "
    "rollout_func samples with generate_rollout_completions"
)
_EVENT_LOOP = (
    "it is TRL's event loop for coroutines; Lockstep runs the coroutines of rewards and tools itself"
)
_LOSS = "it is a part of TRL's loss; the parts of this one are the functions of lockstep.algorithms"
_PIPELINE = (
    "it is a part of TRL's data pipeline; lockstep.run.data makes the prompts, in one form for all trainers"
)


def _image_id(name: str) -> Attribute:
    return Attribute(lambda t: getattr(t._causal().config, name, None))


def _image_token(trainer: Any) -> str | None:
    place = trainer.image_token_id
    return None if place is None else trainer.processing_class.decode([place])


class TRLNames(Trainer):
    """The public attributes of TRL's trainers.

    Those that have no counterpart stand at the end, each with the reason.
    """

    config: Any
    method: ClassVar[str]
    reference: Reference | None
    step_log: StepLog
    ranks: Ranks
    source: RolloutSource
    objective: Objective
    inputs: dict[str, Any]
    changes: Changes
    _scorer: Scorer
    rollout_tools: Acting | None
    # Arguments of the constructor that TRL's trainers keep, by name.
    _given: dict[str, Any]
    # Ids that end a completion.
    _end_ids: tuple[int, ...]
    # Figures that a callback or a reward function adds to the next evaluation.
    _eval_notes: dict[str, list[float]]

    train_dataset = OnceGiven("make a new trainer with the other data")
    eval_dataset = OnceGiven("give the other data to evaluate(eval_dataset=…)")

    # ---- rewards ----------------------------------------------------------------------------------------------------

    # A reward model stands for itself. The environments' own rewards, and that of an agent, stand behind the
    # functions, as in TRL.
    reward_funcs = Attribute(
        lambda t: [f.model if isinstance(f, RewardModel) else f for f in t._functions] + t._own_rewards,
        instead="give reward_funcs",
    )
    reward_func_names = Attribute(
        lambda t: [reward_name(f) for f in (*t._functions, *t._own_rewards)], instead="give reward_funcs"
    )
    # The tokenizer of each reward model; None for a function.
    reward_processing_classes = Attribute(
        lambda t: [
            f.tokenizer if isinstance(f, RewardModel) else None for f in (*t._functions, *t._own_rewards)
        ],
        instead="give reward_processing_classes",
    )
    # (K,) weights of the K rewards.
    reward_weights = Attribute(
        lambda t: t.changes.weights, write=lambda t, value: t.change("reward_weights", value)
    )

    # ---- sampling ---------------------------------------------------------------------------------------------------

    num_generations = Attribute("group_size", instead="set num_generations in the config")
    num_generations_eval = Attribute("group_size_eval", instead="set num_generations_eval in the config")
    max_completion_length = Attribute(
        "completion_limit", instead="set the limit of completions in the config"
    )
    max_length = Attribute("max_length")
    temperature = Attribute("temperature")
    top_p = Attribute("top_p")
    top_k = Attribute("top_k")
    min_p = Attribute("min_p")
    repetition_penalty = Attribute("repetition_penalty")
    structured_outputs_regex = Attribute("vllm_structured_outputs_regex")
    # In transformers' form. Both are made again at each use.
    generation_kwargs = Attribute(
        lambda t: t._generation_kwargs(), instead="set generation_kwargs in the config"
    )
    generation_config = Attribute(
        lambda t: GenerationConfig(**t._generation_kwargs()), instead="set the sampling fields of the config"
    )
    eos_token_ids = Attribute(
        lambda t: list(t._end_ids), instead="set eos_token_id in the model's generation_config"
    )

    # ---- the engine -------------------------------------------------------------------------------------------------

    # Whether vLLM samples, in this process or on servers.
    use_vllm = Attribute(lambda t: t._samples_with_vllm(), instead="set use_vllm in the config")
    vllm_mode = Attribute("vllm_mode")
    vllm_model_impl = Attribute("vllm_model_impl")
    vllm_gpu_memory_utilization = Attribute("vllm_gpu_memory_utilization")
    vllm_tensor_parallel_size = Attribute("vllm_tensor_parallel_size")
    vllm_importance_sampling_correction = Attribute("vllm_importance_sampling_correction")
    vllm_importance_sampling_mode = Attribute("vllm_importance_sampling_mode")
    vllm_importance_sampling_clip_max = Attribute("vllm_importance_sampling_clip_max")
    vllm_importance_sampling_clip_min = Attribute("vllm_importance_sampling_clip_min")
    use_transformers_continuous_batching = Attribute("use_transformers_continuous_batching")
    continuous_batching_config = Attribute(lambda t: None)

    # ---- data and rollouts ------------------------------------------------------------------------------------------

    shuffle_dataset = Attribute("shuffle_dataset")
    # Nothing is padded.
    pad_to_multiple_of = Attribute(lambda t: None)
    # TRL replaces some templates. Here the tokenizer's own is always used, and None says so, as in TRL.
    chat_template = Attribute(lambda t: None, instead="set it at the tokenizer")
    chat_template_kwargs = Attribute(
        lambda t: dict(t.config.chat_template_kwargs or {}), instead="set chat_template_kwargs in the config"
    )
    # The functions that were given, and the methods of the environments, each of one of them.
    tools = Attribute(lambda t: t._tools(), instead="give tools")
    rollout_func = Attribute(lambda t: t._given["rollout_func"], instead="give rollout_func")
    environment_factories = Attribute(lambda t: t._factories(), instead="give environment_factory")
    # Those of the rollouts that were scored last, in the order of the rollouts, until the next generation resets
    # them; None if there are none. They are on the rank that holds the engine.
    environments = Attribute(
        lambda t: getattr(t.rollout_tools, "scored_environments", None), instead="give environment_factory"
    )
    # As a number, also where the config sets no limit.
    max_tool_calling_iterations = Attribute(
        lambda t: (
            sys.maxsize
            if t.config.max_tool_calling_iterations is None
            else t.config.max_tool_calling_iterations
        ),
        instead="set max_tool_calling_iterations in the config",
    )
    is_encoder_decoder = Attribute(lambda t: False)
    is_vision_model = Attribute(lambda t: reads_pictures(t._causal().config))
    image_token_id = _image_id("image_token_id")
    vision_start_token_id = _image_id("vision_start_token_id")
    vision_end_token_id = _image_id("vision_end_token_id")
    image_token = Attribute(_image_token)

    # ---- the loss ---------------------------------------------------------------------------------------------------

    # Weight of the reference model; Online DPO: the value of the current epoch.
    beta = Attribute(lambda t: t._beta(), write=lambda t, value: t.change("beta", value))
    # The reference model; None if there is none, or if it is the policy without its adapter.
    ref_model = Attribute(
        lambda t: None if t.reference is None else t.reference.own, instead="give ref_model"
    )
    num_iterations = Attribute("num_iterations")
    epsilon_low = Attribute("epsilon", write=lambda t, value: t.change("epsilon", value))
    epsilon_high = Attribute("epsilon_high", write=lambda t, value: t.change("epsilon_high", value))
    loss_type = Attribute("loss_type")
    importance_sampling_level = Attribute("importance_sampling_level")
    scale_rewards = Attribute("scale_rewards")
    multi_objective_aggregation = Attribute("multi_objective_aggregation")
    normalize_advantages = Attribute("normalize_advantages")
    reward_clip_range = Attribute("reward_clip_range")
    mask_truncated_completions = Attribute("mask_truncated_completions")
    off_policy_mask_threshold = Attribute("off_policy_mask_threshold")
    top_entropy_quantile = Attribute("top_entropy_quantile")
    # With `use_adaptive_entropy` the coefficient that the last step has left.
    entropy_coef = Attribute(
        lambda t: t._entropy_coef(), write=lambda t, value: t.change("entropy_coef", value)
    )
    use_adaptive_entropy = Attribute("use_adaptive_entropy")
    # Of the run: the config's coefficient, or the model's own; 0: there is no auxiliary loss.
    router_aux_loss_coef = Attribute(
        lambda t: t.objective.router_coefficient, instead="set router_aux_loss_coef in the config"
    )
    aux_loss_enabled = Attribute(
        lambda t: t.objective.router_coefficient != 0.0, instead="set router_aux_loss_coef in the config"
    )

    # ---- logs -------------------------------------------------------------------------------------------------------

    log_completions = Attribute(
        "log_completions", write=lambda t, value: t._set_log("log_completions", value)
    )
    num_completions_to_print = Attribute(
        "num_completions_to_print", write=lambda t, value: t._set_log("num_completions_to_print", value)
    )
    log_unique_prompts = Attribute(
        "log_unique_prompts", write=lambda t, value: t._set_log("log_unique_prompts", value)
    )
    log_multimodal = Attribute("log_multimodal")
    # Online DPO's name of the figures since the last log.
    stats = Attribute(lambda t: t._stats())

    # ---- without a counterpart --------------------------------------------------------------------------------------

    vllm_generation = Absent(_CONNECTION)
    vllm_client = Absent(_CONNECTION)
    llm = Absent(_CONNECTION)
    async_loop = Absent(_EVENT_LOOP)
    async_loop_thread = Absent(_EVENT_LOOP)
    async_loop_ready_event = Absent(_EVENT_LOOP)
    commit_scheduler = Absent(
        "it uploads completions to the hub; here they stay in the run's folder rollouts/"
    )
    get_high_entropy_mask = Absent(_LOSS)
    get_off_policy_mask = Absent(_LOSS)
    get_gamma_weights = Absent(_LOSS)
    tokenize_row = Absent(_PIPELINE)
    process_vision_row = Absent(_PIPELINE)

    # ---- what the attributes read -----------------------------------------------------------------------------------

    @property
    def _functions(self) -> list[Any]:
        return list(getattr(self._scorer, "functions", ()))

    @property
    def _own_rewards(self) -> list[OwnReward]:
        """The rewards that rollouts bring themselves."""
        return [OwnReward(name) for name in getattr(self._scorer, "own", ())]

    def _tools(self) -> list[Any]:
        methods = self.rollout_tools.methods if isinstance(self.rollout_tools, RolloutTools) else []
        return [*(self._given["tools"] or []), *methods]

    def _generation_kwargs(self) -> dict[str, Any]:
        config, tokenizer = self.config, self.processing_class
        return {
            "max_new_tokens": config.completion_limit,
            "do_sample": not config.is_greedy,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": list(self._end_ids),
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
        }

    def _samples_with_vllm(self) -> bool:
        if self.ranks.owner:
            return self.source.engine.settings().engine != "transformers"
        return vllm_installed() if self.config.use_vllm is None else self.config.use_vllm

    def _factories(self) -> dict[str | None, Any] | None:
        given = self._given["environment_factory"]
        if given is None:
            return None
        return dict(given) if isinstance(given, Mapping) else {None: given}

    def _beta(self) -> float:
        by_epoch = getattr(self.config, "beta_of", None)
        return self.config.beta if by_epoch is None else by_epoch(int(self.state.epoch or 0))

    def _entropy_coef(self) -> float:
        found = getattr(self.objective, "entropy_coef", None)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no attribute 'entropy_coef'")
        return found

    def _stats(self) -> dict[str, list[float]]:
        if self.method != "Online DPO":
            raise AttributeError(f"{type(self).__name__} has no attribute 'stats'")
        return self.step_log.noted

    # ---- what assignments do ----------------------------------------------------------------------------------------

    def change(self, field: str, value: Any) -> None:
        """Give a number of the loss another value, from the next micro-batch on. A line of log and receipt says so.

        A checkpoint keeps the change, so that a resumed run has it too.

        Raises:
            InputError: the run cannot use the value.
        """
        before = self.changes.make(field, value)
        now = self.changes.made.get(field, before)
        if self.ranks.owner and now != before:
            _logger.info(f"{field} is now {now}, and was {before}: the run has set it at the trainer")
            self.source.proofs.note_change(
                self.state.global_step, field, now, self.inputs.get("settings", {})
            )

    def take_weights(self) -> None:
        """Use the weights that a user has written into `reward_weights`, from the next generation on."""
        if self.changes.weights_differ:
            self.change("reward_weights", self.changes.weights.tolist())

    def _set_log(self, field: str, value: Any) -> None:
        """Change what is printed from the next log on."""
        if value is not None:
            check_number(type(self.config), field, value)
        setattr(self.config, field, value)

    @property
    def _metrics(self) -> dict[str, dict[str, list[float]]]:
        """The figures since the last log, and those for the next evaluation. What is appended is logged as a mean."""
        return {"train": self.step_log.noted, "eval": self._eval_notes}

    def take_eval_notes(self, prefix: str) -> dict[str, float]:
        """The means of what was appended for an evaluation, each under `prefix`. Then forget them."""
        means = {f"{prefix}_{name}": sum(own) / len(own) for name, own in self._eval_notes.items() if own}
        self._eval_notes = defaultdict(list)
        return means

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository on the hub: at the start of a run that pushes, or at the first push.

        Raises:
            InputError: the hub cannot be reached, or refuses.
        """
        with _hub_errors(self.args.output_dir):
            super().init_hf_repo(token)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the model, its tokenizer and a model card, as the base class does.

        Raises:
            InputError: the hub cannot be reached, or refuses.
        """
        with _hub_errors(self.args.output_dir):
            return super().push_to_hub(*args, **kwargs)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **more: Any,
    ) -> None:
        """Write the model card of `transformers.Trainer`, with TRL's arguments.

        Args:
            dataset_name: the dataset's name on the hub.
            tags: more tags; the card also has `lockstep` and the method's name.
            more: the other arguments of `transformers.Trainer.create_model_card`, by name.
        """
        if dataset_name is not None:
            more = {"dataset_tags": dataset_name, "dataset": dataset_name, **more}
        given = [tags] if isinstance(tags, str) else list(tags or ())
        own = ["lockstep", self.method.lower().replace(" ", "-")]
        super().create_model_card(model_name=model_name, tags=[*given, *own], **more)
