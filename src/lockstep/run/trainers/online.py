"""`OnlineTrainer`: the base of the trainers of all methods, with TRL's constructor.

It checks the user's arguments, loads the policy, makes the parts of the run, and connects `transformers.Trainer` to
the loop in `run/loop.py`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from lockstep.config.checks import check_fields, check_installed
from lockstep.config.contradictions import check_adapter
from lockstep.config.effect import Run, say_without_effect, set_fields
from lockstep.config.fields import AgentFunction
from lockstep.config.run import OnlineConfig
from lockstep.config.sampling import sampling_of
from lockstep.contract.protocol import Engine
from lockstep.definitions.optimizer import optimizer_fields
from lockstep.definitions.sampling import UserSettings, user_settings
from lockstep.devices import marks_of, prepare_cuda
from lockstep.errors import InputError
from lockstep.learn.filters import IdRules
from lockstep.learn.generation import Preparation
from lockstep.learn.memory import RunModels, check_memory
from lockstep.learn.methods.objective import Objective
from lockstep.learn.moving_share import check_steps_move
from lockstep.learn.policy_and_reference import Reference, open_policy
from lockstep.learn.ranks import leave_unwrapped
from lockstep.learn.scoring import check_scorable
from lockstep.models.adapters import causal_model
from lockstep.models.arithmetic import check_gpu
from lockstep.models.parameters import refuse_shared_memory
from lockstep.private_caches import use_private_caches
from lockstep.report.alarms import Alarms
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.programs.environments import Factory
from lockstep.rollouts.programs.rollout_func import Bounds
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.rewards import Given, ProcessingClasses, Scorer, entries_of, reward_scorer
from lockstep.run.data.prompts import (
    SINGLE,
    GivenData,
    MicroBatch,
    PromptLoader,
    make_loader,
    order_of,
    read_data,
    read_prompts,
)
from lockstep.run.data.rehearsal import rehearse_functions, tell_unanswered
from lockstep.run.engine import check_engine_arguments, refuse_before_loading
from lockstep.run.files.checkpoints import MethodState
from lockstep.run.files.directory import CLOCK, clock_of_run, locked
from lockstep.run.files.identity import Changes, model_inputs, run_inputs
from lockstep.run.files.logs import StepLog, show_generation
from lockstep.run.loop import TrainingLoop
from lockstep.run.programs import RolloutFunc, RolloutFunction, rollout_tools
from lockstep.run.source import RolloutSource
from lockstep.run.trainers.checkpoints import WholeCheckpoints
from lockstep.run.trainers.checks import (
    RefusesForeignHooks,
    check_images,
    check_kinds,
    check_open,
    check_reference,
    check_reference_model,
    check_torch,
    context_within,
    kinds_of_data,
    may_read_pictures,
    needs_plain_rows,
    parts_of_processor,
    prompt_reader,
    refuse_arguments,
    router_coefficient,
)
from lockstep.run.trainers.evaluation import EvaluatesBySampling
from lockstep.run.trainers.hooks import StepHooks, add_callbacks
from lockstep.run.trainers.optimizer import makes_optimizer
from lockstep.run.trainers.sharding import shard_models
from lockstep.tokens.chat import TemplateClock, embedding_rows, end_ids
from lockstep.watch.given_rows import GivenRows
from lockstep.watch.run import RunWatch
from lockstep.watch.settings import SettingsProof

# A rank waits for the rank with the engine this many times as long as a generation may take. The longest wait is for
# a generation that is lost and repeated.
_LONGEST_CALL = 12
# Completions that `each_rollout` asks for at a time: enough for an engine to be busy.
_PART = 256


Config = TypeVar("Config", bound=OnlineConfig)
Data: TypeAlias = Dataset | IterableDataset


class OnlineTrainer(RefusesForeignHooks, EvaluatesBySampling, StepHooks, WholeCheckpoints, Generic[Config]):
    """The base of all trainers.

    Args:
        model: name, directory or hub id (see `lockstep.models.policy`), or a loaded causal language model whose
            `config.name_or_path` the engine can load too.
        reward_funcs: one reward function or several, with TRL's convention. A reward model, or its directory or hub
            id, may stand in place of a function (see `lockstep.rollouts.rewards`).
        args: the configuration; default: the method's configuration with its defaults.
        train_dataset: `datasets.Dataset` with a `prompt` column (text or messages); other columns go to the rewards.
            Of a `datasets.IterableDataset` the rows that `max_steps` need are read at once, and used in their order.
        eval_dataset: the same for `evaluate`, or several by name; they must not overlap with the training data.
        processing_class: the tokenizer, or a processor with a tokenizer and perhaps an image processor; by default
            the model's.
        reward_processing_classes: tokenizers of the reward models, one per entry of `reward_funcs`; default: the
            models' own.
        callbacks, optimizers: as in `transformers.Trainer`.
        quantization_config: a `transformers.BitsAndBytesConfig` in 4 bits; with a `peft_config` this is QLoRA.
        peft_config: a `peft.LoraConfig`; the trainer then trains a new adapter instead of the model's weights.
        tools: functions that the model may call in a rollout, sync or async, with type hints and a docstring.
        rollout_func: makes the rollouts itself (`lockstep.rollouts.programs.rollout_func`).
        environment_factory: makes the environment of a rollout, or a mapping of such functions by the column
            `environment` (`lockstep.rollouts.programs.environments`). `reward_funcs` may then be left out, and also
            the dataset.
        agent: makes the rollouts by calls to the gateway (docs/guides/agents.md): a function
            `agent(base_url, api_key, row)`, or a command line. `reward_funcs` may then be left out.
        engine: a running engine; the trainer uses it instead of starting one, and the caller closes it.
        ref_model: the reference model of the KL term; by default a copy of the policy as it is now, or with an
            adapter its base model. It needs `beta` above 0.
        refused: arguments of TRL's trainers that are not supported; a value other than None is refused by name.

    Raises:
        InputError: an argument cannot be used. The error names it, where possible before a model is loaded.
        ProofError: trainer and engine do not agree; no optimizer step was taken on that data.
    """

    config_class: ClassVar[type[OnlineConfig]]
    objective_class: ClassVar[type[Objective]]
    loop_class: ClassVar[type[TrainingLoop]] = TrainingLoop
    # The method's name in reports.
    method: ClassVar[str]

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Given | list[Given] | None = None,
        args: Config | None = None,
        train_dataset: Data | None = None,
        eval_dataset: Data | Mapping[str, Data] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: ProcessingClasses = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        *,
        agent: AgentFunction | str | None = None,
        engine: Engine | None = None,
        ref_model: PreTrainedModel | None = None,
        **refused: Any,
    ) -> None:
        began = time.monotonic()
        use_private_caches()
        refuse_arguments(refused)
        args = args if args is not None else self.config_class()
        if not isinstance(args, self.config_class):
            raise InputError(
                f"args is a {type(args).__name__}; {type(self).__name__} needs a {self.config_class.__name__}"
            )
        self.config: Any = args
        if args.output_dir:
            # A callback may change the working directory.
            args.output_dir = str(Path(args.output_dir).absolute())
        asked, self.optimizer_fields = user_settings(vars(args)), optimizer_fields(vars(args))
        self._is_closed = False
        processing_class, image_processor = parts_of_processor(processing_class)
        check_kinds(model, processing_class, callbacks, optimizers, engine)
        check_reference(model, ref_model, args, peft_config)
        check_adapter(peft_config)
        check_installed([args.report_to] if isinstance(args.report_to, str) else args.report_to or ())
        self._meet_ranks()
        data = self._read_data(train_dataset, eval_dataset, environment_factory, model)
        self._has_environments = environment_factory is not None
        # An environment adds text to prompts, and a function or an agent makes others.
        makes_text = any(maker is not None for maker in (environment_factory, rollout_func, agent))
        given = Run(
            acts=bool(tools) or environment_factory is not None,
            has_agent=agent is not None,
            reads_pictures=may_read_pictures(model),
            evaluates=eval_dataset is not None,
            starts_engine=engine is None,
            **kinds_of_data(data.named, entries_of(reward_funcs), makes_text=makes_text),
        )
        say_without_effect(args, set_fields(args), given, owner=self.ranks.owner)
        self._given = {
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }
        if self.ranks.owner:
            tell_unanswered(entries_of(reward_funcs), data.named)
        self._open_tools(agent, reward_funcs, data.train, model)
        # Errors in reward functions come before a model's name is looked up. Reward models are loaded after the
        # memory is counted.
        loads_rewards = any(isinstance(entry, str) for entry in entries_of(reward_funcs))
        if not loads_rewards:
            self._scorer = self.scorer(reward_funcs, reward_processing_classes)
        self.objective: Objective = self.objective_class(args)
        self._check_engine_arguments(engine, model if isinstance(model, str) else model.config.name_or_path)
        models = RunModels(
            model,
            peft_config,
            quantization_config,
            ref_model,
            entries_of(reward_funcs),
            self.objective.uses_reference,
            self.make_critic,
            own_optimizer=optimizers[0] is not None or makes_optimizer(type(self)),
            own_engine=engine is not None,
        )
        self.ranks.on_owner("memory", lambda: check_memory(args, models))
        if loads_rewards:
            self._scorer = self.scorer(reward_funcs, reward_processing_classes)
        prepare_cuda()
        self._opened = opened = open_policy(model, processing_class, peft_config, args, quantization_config)
        self._reader = prompt_reader(
            opened, args, data.named, image_processor, acting=bool(tools) or makes_text
        )
        self._prove_settings(asked)
        self.optimizer_is_given, self._said = optimizers[0] is not None, set()
        self._set_up_models(ref_model)
        self._read_prompts(data, makes_text=makes_text)
        self._check_models(ref_model)
        self._order = order_of(self._train_prompts, args, shuffle=args.shuffle_dataset and not data.ordered)
        self._loader = make_loader(self._train_prompts, self._order, args)
        self._note_inputs(agent, own_reference=ref_model is not None)
        if args.sharded_by is not None:
            shard_models(
                self.ranks,
                opened.model,
                self.reference,
                args,
                plain_rows=self._plain_rows,
                images=self._reader.shows_pictures,
            )
        super().__init__(
            model=opened.model,
            args=args,
            train_dataset=train_dataset if train_dataset is not None else data.train,
            eval_dataset=eval_dataset,
            processing_class=opened.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        leave_unwrapped(self.accelerator)
        self.clock = PhaseClock(marks_of(self.args.device))
        self.files = add_callbacks(self, began)
        for part in (self.reference, self.critic):
            if part is not None:
                part.to(self.args.device)
        self.last_eval_groups = []
        self._eval_notes = defaultdict(list)
        self._start_source(engine, rollout_func)
        self._make_loop()

    # ---- what the constructor sets up, in its order -----------------------------------------------------------------

    def _meet_ranks(self) -> None:
        """Make the ranks and the alarms. All ranks get one time for chat templates."""
        args = self.config
        self.ranks = Ranks(_LONGEST_CALL * args.generation_timeout * (args.generations_ahead + 1))
        self.alarms = Alarms(owner=self.ranks.owner)
        args.template_clock = self.ranks.from_owner(
            "clock",
            lambda: clock_of_run(args),
            lambda clock: clock.moment.isoformat(),
            lambda moment: TemplateClock(datetime.fromisoformat(moment)),
        )

    def _read_data(
        self, train_dataset: Any, eval_dataset: Any, environment_factory: Any, model: Any
    ) -> GivenData:
        """The rows of the data sets, checked. There are no prompts before there is a tokenizer."""
        found: list[GivenData] = []

        def read() -> None:
            found.append(read_data(train_dataset, eval_dataset, self.config, environment_factory))
            check_images(found[0].named, model, self.config)

        self.ranks.share("data", read)
        return found[0]

    def _open_tools(self, agent: Any, reward_funcs: Any, train: Dataset, model: Any) -> None:
        """Make the tools, environments or agents, and rehearse the reward functions."""
        args, function = self.config, self._given["rollout_func"]
        self.rollout_tools = rollout_tools(
            self._given["tools"],
            self._given["environment_factory"],
            function,
            agent,
            args,
            self.ranks,
            train,
            model,
        )
        # The columns that a `rollout_func` adds for the reward functions are not known before it has run.
        if args.rehearse_rewards and function is None:
            self.ranks.on_owner("rehearsal", lambda: self.rehearse(reward_funcs, train))

    def _check_engine_arguments(self, engine: Engine | None, name: str) -> None:
        args = self.config
        if engine is None:
            refuse_before_loading(args, name)
        # All ranks come here, also where only the owner was given an engine.
        self.ranks.on_owner(
            "engine arguments", lambda: check_engine_arguments(args, name) if engine is None else None
        )

    def _prove_settings(self, asked: UserSettings) -> None:
        tokenizer = self._opened.tokenizer
        self.settings = SettingsProof(
            asked,
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
            self._reader.banned_ids,
        )

    def _set_up_models(self, ref_model: PreTrainedModel | None) -> None:
        """Make the reference model and the value head, and read from the policy what prompts must fit."""
        args, policy, tokenizer = self.config, self._opened.model, self._opened.tokenizer
        refuse_shared_memory(policy)
        if not self.optimizer_is_given:
            check_steps_move(policy, args, self.alarms)
        self.reference = Reference(policy, ref_model) if self.objective.uses_reference else None
        self.critic = self.make_critic(policy)
        self._context = context_within(policy, args.context_limit)
        self._end_ids = tuple(end_ids(causal_model(policy), tokenizer))
        if self.rollout_tools is not None:
            self.rollout_tools.open(self._reader, self._end_ids)
        self._vocabulary = embedding_rows(policy)

    def _read_prompts(self, data: GivenData, *, makes_text: bool) -> None:
        """Make prompts of all rows, and count the longest rollout; `makes_text`: it has text that is in no prompt."""
        prompts, limit = self._prompts_of(data.named, self._context), self.config.completion_limit
        self._longest = max(len(p.ids) for own in prompts.values() for p in own) + limit
        if makes_text:
            # As many tokens more as a completion has, if they fit.
            self._longest = min(self._longest + limit, self._context)
        self._train_prompts = prompts.pop("train")
        self._eval_prompts = prompts
        tools, reader = self.rollout_tools, self._reader
        self._given_rows = GivenRows(
            data.train,
            self._opened.tokenizer,
            self.config,
            shuffled=self.config.shuffle_dataset and not data.ordered,
            tools_of=tools.shown_tools if tools is not None else None,
            messages_of=reader.messages_of if reader.shows_pictures else None,
        )

    def _prompts_of(self, datasets: Mapping[str, Dataset], longest: int) -> dict[str, list[Prompt]]:
        """Prompts of data sets. Prompt and completion have at most `longest` tokens together, and the model's limit."""
        return read_prompts(
            datasets,
            self._reader,
            min(self._context, longest),
            self.config,
            self.ranks,
            self.rollout_tools.prompt_ids if self.rollout_tools is not None else None,
            vocabulary=self._vocabulary,
        )

    def _check_models(self, ref_model: PreTrainedModel | None) -> None:
        """Check that policy and reference model can be scored, and how."""
        args, policy, tokenizer = self.config, self._opened.model, self._opened.tokenizer
        check_scorable(causal_model(policy))
        self.objective.router_coefficient = router_coefficient(policy, args)
        if ref_model is not None:
            check_reference_model(policy, ref_model)
        sampling = sampling_of(args, tokenizer, self._end_ids, self._reader.banned_ids)
        self.rules = IdRules.of_run(sampling, policy, tokenizer)
        self._plain_rows = needs_plain_rows(
            [policy, *([ref_model] if ref_model is not None else [])], self._longest
        )

    def _note_inputs(self, agent: Any, *, own_reference: bool) -> None:
        """Note what the run learns from, for its receipt, and what its checkpoints hold."""
        args, scorer, reference = self.config, self._scorer, self.reference
        follows = getattr(args, "sync_ref_model", False) and reference is not None
        code = {
            "reward": getattr(scorer, "functions", None) or getattr(scorer, "judge", None),
            "tool": self._given["tools"],
            "environment": self._given["environment_factory"],
            "rollout_func": self._given["rollout_func"],
            "agent": agent,
        }
        rows = {"train": self._train_prompts, **(self._eval_prompts or {SINGLE: []})}
        still = reference.own if reference is not None and not follows else None

        def take_inputs() -> None:
            policy, tokenizer, processor = self._opened.model, self._opened.tokenizer, self._reader.processor
            own = model_inputs(policy, tokenizer, self._end_ids, processor, still, own=own_reference)
            self.inputs |= run_inputs(rows, code, args, own)
            self.inputs[CLOCK] = args.template_clock.moment.isoformat()

        self.inputs = {}
        self.ranks.on_owner("inputs", take_inputs)
        self.rows = {part: len(prompts) for part, prompts in rows.items() if prompts}
        self._seen = {name: self.count_seen(prompts) for name, prompts in self._eval_prompts.items()}
        self.changes = Changes(self.objective, scorer, self.settings)
        moving = reference if follows else None
        self._method_state = MethodState(self.objective, moving, self.critic, self._order, self.changes)

    def _start_source(self, engine: Engine | None, rollout_func: RolloutFunc | None) -> None:
        """Start the engine, or use the one that was given."""
        args, policy = self.config, self._opened.model
        context, limit = self._context, args.completion_limit
        # One more token if the model allows it: an engine scores a sequence only if one more token fits behind it.
        max_model_len = context if args.context_limit else min(self._longest + 1, context)
        bounds = Bounds(self._vocabulary, limit, max_model_len, self._end_ids)
        function = None
        if rollout_func is not None:
            function = RolloutFunction(rollout_func, self, self._reader, bounds)
        self.source = RolloutSource(
            policy,
            self._scorer,
            self._reader,
            args,
            self.clock,
            self.ranks,
            engine,
            self.model_path,
            max_model_len,
            self._longest,
            self.settings,
            tools=self.rollout_tools,
            function=function,
            alarms=self.alarms,
        )

    def _make_loop(self) -> None:
        self.step_log = StepLog()
        self.watch = RunWatch(
            self.objective,
            self.source.watch,
            self._scorer,
            self._policy,
            self._trained_modules,
            lambda: self.state,
            self.ranks,
            self.clock,
            self.step_log.note,
            self.settings,
            self._given_rows,
        )
        self.loop = self.loop_class(
            self.objective,
            self.source,
            Preparation(self.objective, self.reference, self.clock, self.ranks, self.watch),
            self._order,
            self._train_prompts,
            self._policy,
            self._trained_modules,
            lambda: self.state,
            self.ranks,
            self.clock,
            self.step_log,
            self.watch,
        )

    @property
    def model_path(self) -> str:
        """The directory or hub id from which an engine loads the model."""
        return self._opened.path

    def rehearse(self, reward_funcs: Any, dataset: Dataset) -> None:
        """Call the reward functions on made-up completions, so that errors appear before a model is loaded."""
        tools, config = self.rollout_tools, self.config
        given = [] if reward_funcs is None and tools is not None else entries_of(reward_funcs)
        if tools is None:
            rehearse_functions(given, dataset, config)
            return
        limit = config.reward_timeout * (len(given) + 1)
        tools.beside_environments(lambda: rehearse_functions(given, dataset, config, tools.rehearsed), limit)

    def scorer(self, reward_funcs: Any, processing_classes: Any) -> Scorer:
        """The scorer that gives rollouts their rewards."""
        config = self.config
        return reward_scorer(
            reward_funcs,
            processing_classes,
            weights=config.reward_weights,
            timeout=config.reward_timeout,
            chat_template_kwargs=config.template_arguments,
            device=config.device,
            **(self.rollout_tools.rewards if self.rollout_tools is not None else {}),
        )

    def make_critic(self, policy: PreTrainedModel) -> torch.nn.Module | None:
        """The value head; None if the method has no value head."""
        return None

    @property
    def engine(self) -> Engine:
        """The engine; only on the rank that holds it."""
        return self.source.engine

    @property
    def proofs(self) -> Any:
        """The proofs of the run; only on the rank that holds the engine."""
        return self.source.proofs

    # ---- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> PromptLoader:
        """One item per micro-step. The order depends on seed and epoch only, and is the same on every rank."""
        return self._loader

    # ---- weights and rollouts ---------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as the base class does.

        At the end, also after an error, the engine's unfinished generations are cancelled.

        Raises:
            InputError: there is no checkpoint to resume from, another process is running in the output directory, or
                `use_liger_kernel` is set and there is no GPU.
            LockstepError: the trainer is closed.
        """
        check_open(self._is_closed)
        check_torch()
        check_fields(self.config, again=True)
        check_gpu(self.args.use_liger_kernel, use_cpu=self.args.use_cpu)
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        folder = Path(self.args.output_dir or ".")
        with ExitStack() as held:
            self.ranks.on_owner("lock", lambda: held.enter_context(locked(folder, "trainer")))
            self.check_resume(resume_from_checkpoint)
            try:
                with self.noting_failure():
                    return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.source.abandon_pending()

    def training_step(
        self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Learn from one part of the current generation: see `TrainingLoop.micro_step`.

        Raises:
            ProofError: trainer and engine do not agree; no optimizer step is taken.
        """
        self.take_weights()
        model.train()
        loss = self.loop.micro_step(inputs)
        every = self.config.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        # The base class logs the mean over ranks, but the ranks' parts of a step add up.
        return torch.tensor(loss * self.ranks.count, device=self.args.device)

    def rollouts(self) -> list[RolloutGroup]:
        """Scored rollouts of all training prompts, by the policy as it is. Nothing is learned."""
        return list(self.each_rollout())

    def each_rollout(self) -> Iterator[RolloutGroup]:
        """`rollouts`, each group as soon as its part of some hundred completions is scored."""
        self.take_weights()
        yield from self.loop.rollout_in_parts(self._train_prompts, self.config.group_size, _PART)

    # ---- evaluation, logs, checkpoints ------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log rollouts, proofs and seconds per phase since the last log, beside the figures of the base class.

        The entry at the end of training has the figures of the steps after the last multiple of `logging_steps`, as
        in TRL.
        """
        if "loss" in logs:
            logs |= self.step_log.take(self.clock)
            if self.source.losses:
                logs["engine/losses"] = self.source.losses
            if self.source.servers:
                logs["engine/servers"] = self.source.servers
            if alarms := self.alarms.texts:
                logs["alarms"] = len(alarms)
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if self.is_world_process_zero():
                callbacks = self.callback_handler.callbacks
                show_generation(self.loop.generation, self.config, self.state.global_step, callbacks)
        elif "train_runtime" in logs and self.state.global_step % max(int(self.state.logging_steps), 1):
            logs |= self.step_log.taken
        super().log(logs, start_time)

    def end(self) -> None:
        """Close the engine, finish the trackers and destroy the process group, as the last line of TRL's scripts."""
        self.close()
        super().end()

    def close(self) -> None:
        """Close the engine, if the trainer started it."""
        self._is_closed = True
        self.source.close()
