"""The user's model, engine and settings as a training run with a few prompts, on which proofs run.

It is a real `GRPOTrainer` with a real engine. Therefore the proofs test the same code that trains. Nothing is
learned. Instead of an optimizer step, the stage changes the weights by small random amounts and restores them later.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, Engine
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.extras.verify.sizes import SIZES
from lockstep.files import temporary_folder
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.model_files import load_files
from lockstep.models.arithmetic import Precision
from lockstep.models.resolve import resolve_model
from lockstep.rollouts.driver import collect
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.run.data.prompts import MicroBatch
from lockstep.run.trainers.evaluation import evaluate
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.run.trainers.run_files import RunFiles
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import end_ids, load_tokenizer
from lockstep.watch.custody import Record
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.inputs import data_digest
from lockstep.watch.modules import ProbeRecord
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.tolerances import tolerance

_SCALES = (0.05, 0.1, 0.2, 0.4, 0.8)
_QUESTIONS = (
    "Which number is larger, 38 or 61?",
    "Repeat the following words in reverse order, one by one: " + "red green blue yellow black white " * 6,
)


class _BeginAndEnd(TrainerCallback):
    """Calls a function before an optimizer step of a run begins, and ends the run when it is long enough."""

    def __init__(self, after: int, begin: Callable[[], Any], is_enough: Callable[[], bool]) -> None:
        self._after, self._begin, self._is_enough = after, begin, is_enough

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._after:
            self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._is_enough():
            control.should_training_stop = True


@dataclass
class Stage:
    """The trainer, engine and prompts that every check uses.

    Attributes:
        trainer: a trainer whose engine runs. Its `global_step` is the weight version.
        prompts: a short prompt, one longer than a cache block, and one whose ids no tokenizer would make from its text.
        scale: how far the weights change between two steps, relative to their size.
    """

    trainer: GRPOTrainer
    prompts: tuple[Prompt, ...]
    scale: float = _SCALES[0]

    @property
    def engine(self) -> Engine:
        return self.trainer.engine

    @property
    def model(self) -> PreTrainedModel:
        return self.trainer._policy_model()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.trainer.processing_class

    @property
    def config(self) -> GRPOConfig:
        return self.trainer.config

    @property
    def version(self) -> int:
        return self.trainer.state.global_step

    @property
    def precision(self) -> Precision:
        return self.trainer.proofs.precision

    def push(self, *, every_module: bool = False) -> ProbeRecord:
        """Push the current weights as a new version, with the proofs of training."""
        self.trainer.state.global_step += 1
        push = self.trainer.proofs.push
        push.every_module = every_module
        self.trainer.source.send(self.version)
        assert push.proof is not None
        return push.proof.probe

    def step(self) -> int:
        """One training step, until the optimizer would change the weights. Returns the number of proven tokens."""
        self.trainer.state.global_step += 1
        # The prompts of a stage are not always the rows of its trainer.
        rows = self.trainer.watch.given_rows
        with patch.object(rows, "check_order"), patch.object(rows, "check_ids", return_value=[]):
            self.trainer.training_step(self.trainer.model, MicroBatch(self.prompts, 0))
        self.model.zero_grad(set_to_none=True)
        generation = self.trainer.loop.generation
        return generation.sampled_tokens if generation is not None else 0

    def evaluate(self) -> None:
        """One evaluation on the stage's prompts."""
        self.trainer.state.global_step += 1
        digest = data_digest(self.prompts)
        evaluate(self.trainer.loop, self.prompts, lambda: digest)

    def learn(
        self,
        steps: int,
        after: int = 0,
        begin: Callable[[], Any] = lambda: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Real optimizer steps, in the loop of training, from version 0 on. The caller restores the weights.

        `begin` is called after so many steps, before the next forward. `is_enough` may end the run after each step.
        """
        trainer, args = self.trainer, self.trainer.args
        caller = _BeginAndEnd(after, begin, is_enough)
        trainer.add_callback(caller)
        limit = args.max_steps
        args.max_steps, args.logging_strategy = steps, IntervalStrategy.NO
        try:
            # transformers prints a summary at the end.
            with redirect_stdout(io.StringIO()):
                trainer.train()
        finally:
            trainer.remove_callback(caller)
            args.max_steps = limit
            if trainer.watch.update is not None:
                trainer.watch.update.abandon()
            trainer.watch.update = None
            # The next call makes them again.
            trainer.optimizer = trainer.lr_scheduler = trainer.optimizer_settings = None
            self.model.zero_grad(set_to_none=True)

    def groups(self, sampling: Sampling, prompts: Sequence[Prompt], samples: int) -> list[RolloutGroup]:
        """Rollout groups, sampled by the engine with its current weights."""
        asked: dict[str, Any] = {
            "num_generations": samples,
            "run_seed": self.config.seed,
            "version": self.version,
        }
        return collect(prompts, self.engine, self.tokenizer, sampling, Record, **asked)

    def sample(
        self, sampling: Sampling, prompts: Sequence[Prompt] | None = None, samples: int = 2
    ) -> list[Completion]:
        """Completions, sampled by the engine with its current weights."""
        groups = self.groups(sampling, self.prompts if prompts is None else prompts, samples)
        return [rollout.completion for group in groups for rollout in group.rollouts]

    def encoded_again(self, ids: Ids) -> Ids:
        """The ids after decoding them to text and encoding the text again."""
        text = self.tokenizer.decode(ids.tolist())
        return whole_numbers(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def gap(
        self, completions: Sequence[Completion], sampling: Sampling, precision: Precision | None = None
    ) -> GapStats:
        """Parity gap between completions and the trainer's plain forward."""
        stats, precision = GapStats(), precision or self.precision
        for c in completions:
            ids = c.prompt_ids, c.token_ids
            own = completion_logps(self.model, *ids, sampling, precision, pictures=c.pictures)
            stats = stats + measure_gap(torch.tensor(c.logprobs), own, [str(c.key)], [len(own)])
        return stats

    def prompt_logps(self) -> torch.Tensor:
        """(N,) the policy's log-probs of all tokens of the prompts but their first ones, at temperature 1."""
        return torch.cat([self.logps_of(p.ids) for p in self.prompts]).cpu()

    def logps_of(self, ids: Ids) -> torch.Tensor:
        """(N − 1,) the policy's log-probs of N ids but the first one, at temperature 1."""
        return completion_logps(self.model, ids[:1], ids[1:], Sampling(1), self.precision)

    def sampling(self, **changes: Any) -> Sampling:
        """The run's sampling settings, with changes."""
        ends, limit = end_ids(self.model, self.tokenizer), self.config.max_completion_length
        return replace(Sampling(limit, temperature=self.config.temperature, end_ids=ends), **changes)

    def move(self, scale: float, seed: int | None = None) -> None:
        """Add noise to every trained weight: `scale` × its tensor's mean absolute value, with a seed per version."""
        generator = torch.Generator().manual_seed(self.version if seed is None else seed)
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, self.model.parameters()):
                p += scale * p.abs().mean() * torch.randn(p.shape, generator=generator).to(p.device, p.dtype)

    @contextmanager
    def kept_weights(self) -> Iterator[None]:
        """A context that restores the weights bit for bit at its end."""
        parameters = list(self.model.parameters())
        kept = [p.detach().clone() for p in parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for p, old in zip(parameters, kept, strict=True):
                    p.copy_(old)

    @contextmanager
    def moved(self, scale: float, seed: int = 0) -> Iterator[None]:
        """A context that changes the weights with `move` and restores them at its end."""
        with self.kept_weights():
            self.move(scale, seed)
            yield

    @contextmanager
    def counted_tokens(self) -> Iterator[Callable[[], int]]:
        """A context that gives a function, which returns how many tokens the engine has answered in the context."""
        real, answered = self.engine.serve, 0

        class Counting:
            def __init__(self, inbox: Inbox) -> None:
                self._inbox = inbox

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inbox, name)

            def answer(self, completion: Completion, *given: Any, **named: Any) -> None:
                nonlocal answered
                self._inbox.answer(completion, *given, **named)
                answered += len(completion.token_ids)

        with patch.object(self.engine, "serve", lambda inbox: real(Counting(inbox))):  # type: ignore[arg-type]
            yield lambda: answered


def stage_config(output_dir: str, **changes: Any) -> GRPOConfig:
    """The configuration of a stage, with the defaults of the command line."""
    return GRPOConfig(output_dir=output_dir, **{**SIZES, **changes})


@contextmanager
def open_stage(
    model: str,
    config: GRPOConfig,
    dataset: Any | None = None,
    *,
    plain: bool = False,
    pictures: bool = False,
    engine: Engine | None = None,
    peft_config: Any = None,
) -> Iterator[Stage]:
    """Load both sides, check the handshake, and prove the first push.

    Args:
        dataset: the user's own prompts (the first one is used, together with a long prompt that fills cache blocks),
            or None.
        plain: whether the built-in prompts are text instead of messages.
        pictures: whether to use built-in prompts with two pictures each, instead of all others. The model must read
            pictures.
        engine: a running engine to use. The caller closes it.
        peft_config: the adapter that is trained; None: the whole model is trained.
    """
    import datasets

    own = list(dataset.select(range(1))["prompt"]) if dataset is not None and not pictures else []
    texts = [*_QUESTIONS[len(own) :], "Which is it?"]
    plain = isinstance(own[0], str) if own else plain
    if not plain and load_tokenizer(resolve_model(model)).chat_template is None:
        raise InputError(
            f"the tokenizer of {model} has no chat template; add --plain_prompts to verify it with plain text"
        )
    prompts = [*own, *(texts if plain else [[{"role": "user", "content": text}] for text in texts])]
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    if pictures:
        # Messages show pictures before their text. Plain text must show them itself, with text between them.
        before = 2 * f"{_placeholder(model)} " if plain else ""
        shown = zip(prompts, _pictures(len(prompts)), strict=True)
        rows = [{"prompt": before + own if plain else own, "images": images} for own, images in shown]
    with temporary_folder("lockstep-verify-") as folder:
        config.output_dir, config.reward_weights, config.push_to_hub = str(folder), None, False
        data = datasets.Dataset.from_list(rows)
        trainer = GRPOTrainer(model, _alternating, config, data, engine=engine, peft_config=peft_config)
        # Nobody reads the files of these runs.
        trainer.remove_callback(RunFiles)
        try:
            trainer.begin_training()
            # Foreign ids would move the placeholders.
            stage = Stage(trainer, tuple(trainer._train_prompts) if pictures else _with_foreign_ids(trainer))
            # Real runs on the stage have the same prompts.
            trainer._train_prompts[:] = stage.prompts
            trainer.watch.given_rows.take_as_it_is(stage.prompts[-1])
            stage.scale = _visible_scale(stage)
            yield stage
        finally:
            trainer.close()


def _pictures(prompts: int) -> list[list[Image.Image]]:
    """Two pictures of noise for each prompt, all of one size."""
    drawn = np.random.default_rng(0).integers(0, 256, (prompts, 2, 88, 120, 3), dtype=np.uint8)
    return [[Image.fromarray(pixels) for pixels in own] for own in drawn]


def _placeholder(model: str) -> str:
    """The placeholder of a picture, as the model writes it."""
    path = resolve_model(model)
    config: Any = load_files(AutoConfig, path)
    return str(load_tokenizer(path).convert_ids_to_tokens(config.image_token_id))


def _visible_scale(stage: Stage) -> float:
    """The smallest scale that changes log-probs by more than the tolerance of the engine's dtype, or the largest."""
    limit = tolerance(stage.trainer.proofs.engine_dtype, stage.precision.dtype_of(stage.model)).mean
    prompt = min(stage.prompts, key=lambda p: len(p.ids)).ids
    before = stage.logps_of(prompt)
    for scale in _SCALES:
        with stage.moved(scale):
            if float((stage.logps_of(prompt) - before).abs().mean()) > 3 * limit:
                break
    return scale


def _with_foreign_ids(trainer: GRPOTrainer) -> tuple[Prompt, ...]:
    """The trainer's prompts, the last one encoded letter by letter: its text would give the tokenizer other ids."""
    *first, last = trainer._train_prompts
    encoded = [trainer.processing_class(letter, add_special_tokens=False) for letter in "Which is it?"]
    letters = [i for letter in encoded for i in letter["input_ids"]]
    return (*first, replace(last, ids=whole_numbers((*letters, *last.ids.tolist())[: len(last.ids)])))


def _alternating(prompts: list, **columns: Any) -> list[float]:
    """A reward that differs within every group, so that every group has a gradient, also if it is scored alone."""
    before: Counter[str] = Counter()
    rewards = []
    for prompt in map(repr, prompts):
        rewards.append(float(before[prompt] % 2))
        before[prompt] += 1
    return rewards
