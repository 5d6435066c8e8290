"""The user's model, engine and settings, set up as a training run of a few prompts, for the proofs to be played on.

A real `GRPOTrainer` on a real engine: what passes or fails here is the code that trains. Nothing is learned: weights are moved
by small random amounts where a step would move them, and put back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.engines.protocol import Completion, Engine, GenerationRequest, RequestKey, Sampling
from lockstep.errors import InputError
from lockstep.models.resolve import resolve_model
from lockstep.parity.gap import GapStats, measure_gap
from lockstep.parity.module_probe import ProbeRecord
from lockstep.parity.rescoring import Precision, completion_logps
from lockstep.rollouts.collect import collect
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.tokens.tokenizer import load_tokenizer
from lockstep.training.data.prompt_order import MicroBatch
from lockstep.training.methods.grpo_config import GRPOConfig
from lockstep.training.trainers.grpo import GRPOTrainer

# What the command line adds to the user's own words: sizes that finish in a minute, and no files.
SIZES = {
    "num_generations": 4,
    "per_device_train_batch_size": 12,
    "generation_batch_size": 12,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "max_completion_length": 12,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "shuffle_dataset": False,
    "learning_rate": 1e-6,
    # Nothing is learned.
    "router_aux_loss_coef": 0.0,
}
_SCALES = (0.05, 0.1, 0.2, 0.4, 0.8)
_QUESTIONS = (
    "Which number is larger, 38 or 61?",
    "Repeat the following words in reverse order, one by one: " + "red green blue yellow black white " * 6,
)


@dataclass
class StageConfig(GRPOConfig):
    """A run's configuration on a stage, whose completions are too short to be interrupted; each part of one that is interrupted is
    a plain answer of the engine's."""

    def __post_init__(self) -> None:
        self.max_thinking_length = self.min_thinking_length = None
        super().__post_init__()


@dataclass
class Stage:
    """What every check plays on.

    Attributes:
        trainer: a trainer whose engine runs; its `global_step` is the weight version.
        prompts: a short one, one longer than a cache block, and one whose ids no tokenizer would make of its text.
        scale: how far weights move between two steps, relative to their size.
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
        """A new version of the weights as they are, proven as in training."""
        self.trainer.state.global_step += 1
        return self.trainer.proofs.sync(self.version, every_module=every_module)

    def step(self) -> int:
        """One training step up to where the optimizer would move the weights; tokens that it proved.

        Raises:
            ProofError: as training would.
        """
        self.trainer.state.global_step += 1
        self.trainer.training_step(self.trainer.model, MicroBatch(self.prompts, 0))
        self.model.zero_grad(set_to_none=True)
        generation = self.trainer._generation
        return generation.sampled_tokens if generation is not None else 0

    def groups(self, sampling: Sampling, prompts: Sequence[Prompt], samples: int) -> list[RolloutGroup]:
        """Rollout groups by the engine as it is."""
        return collect(
            prompts,
            self.engine,
            self.tokenizer,
            sampling,
            num_generations=samples,
            run_seed=self.config.seed,
            version=self.version,
        )

    def sample(self, sampling: Sampling, prompts: Sequence[Prompt] | None = None, samples: int = 2) -> list[Completion]:
        """Completions by the engine as it is."""
        groups = self.groups(sampling, self.prompts if prompts is None else prompts, samples)
        return [rollout.completion for group in groups for rollout in group.rollouts]

    def encoded_again(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """What becomes of ids that are decoded and encoded."""
        return tuple(self.tokenizer(self.tokenizer.decode(ids), add_special_tokens=False)["input_ids"])

    def gap(
        self, completions: Sequence[Completion], sampling: Sampling, precision: Precision | None = None
    ) -> GapStats:
        """Gap of completions to the trainer's plain forward."""
        stats = GapStats()
        for c in completions:
            own = completion_logps(self.model, c.prompt_ids, c.token_ids, sampling, precision or self.precision)
            stats = stats + measure_gap(torch.tensor(c.logprobs), own, [str(c.key)] * len(own))
        return stats

    def sampling(self, **changes: Any) -> Sampling:
        """The run's distribution, or another one."""
        return replace(Sampling(self.config.max_completion_length, temperature=self.config.temperature), **changes)

    def move(self, scale: float, seed: int | None = None) -> None:
        """Move every weight by `scale` times its tensor's mean size, another way each time."""
        generator = torch.Generator().manual_seed(self.version if seed is None else seed)
        with torch.no_grad():
            for p in self.model.parameters():
                p += scale * p.abs().mean() * torch.randn(p.shape, generator=generator).to(p.device, p.dtype)

    @contextmanager
    def kept_weights(self) -> Iterator[None]:
        """Whatever happens to the weights inside, they are put back bit for bit."""
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
        """Weights that are `move`d inside and put back at the end."""
        with self.kept_weights():
            self.move(scale, seed)
            yield

    @contextmanager
    def counted_tokens(self) -> Iterator[Callable[[], int]]:
        """Gives the number of tokens that the engine has answered since."""
        real, answered = self.engine.generate, 0

        def counting(requests: Sequence[GenerationRequest], *more: Any) -> dict[RequestKey, Completion]:
            nonlocal answered
            answers = real(requests, *more)
            answered += sum(len(c.token_ids) for c in answers.values())
            return answers

        with patch.object(self.engine, "generate", counting):
            yield lambda: answered


def stage_config(output_dir: str, **changes: Any) -> GRPOConfig:
    """The configuration of a stage, as the command line makes it of no words at all."""
    return GRPOConfig(output_dir=output_dir, **{**SIZES, **changes})


@contextmanager
def open_stage(
    model: str, config: GRPOConfig, dataset: Any | None = None, *, plain: bool = False, engine: Engine | None = None
) -> Iterator[Stage]:
    """Load both sides, shake hands, and prove the first push.

    Args:
        dataset: the user's own prompts (the first is used, beside a long one that fills cache blocks), or None.
        plain: whether the built-in prompts are text rather than messages.
        engine: a running engine to use; it stays the caller's to close.

    Raises:
        InputError: model, engine or tokenizer cannot be used.
        ProofError: the handshake, the first push or the canary fails.
    """
    import datasets

    own = list(dataset.select(range(1))["prompt"]) if dataset is not None else []
    texts = [*_QUESTIONS[len(own) :], "Which is it?"]
    plain = isinstance(own[0], str) if own else plain
    if not plain and load_tokenizer(resolve_model(model)).chat_template is None:
        raise InputError(
            f"the tokenizer of {model} has no chat template; add --plain_prompts to verify it with plain text"
        )
    prompts = [*own, *(texts if plain else [[{"role": "user", "content": text}] for text in texts])]
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        config.output_dir, config.reward_weights = folder, None
        trainer = GRPOTrainer(
            model, _alternating, config, datasets.Dataset.from_dict({"prompt": prompts}), engine=engine
        )
        try:
            trainer.begin_training()
            stage = Stage(trainer, _with_foreign_ids(trainer))
            stage.scale = _visible_scale(stage)
            yield stage
        finally:
            trainer.close()


def _visible_scale(stage: Stage) -> float:
    """A move of the weights that changes log-probs by more than the engine's dtype may."""
    prompt = min(stage.prompts, key=lambda p: len(p.ids)).ids

    def scores() -> torch.Tensor:
        return completion_logps(stage.model, prompt[:1], prompt[1:], Sampling(1), stage.precision)

    before = scores()
    for scale in _SCALES:
        with stage.moved(scale):
            if float((scores() - before).abs().mean()) > 3 * stage.trainer.proofs.limit.mean:
                break
    return scale


def _with_foreign_ids(trainer: GRPOTrainer) -> tuple[Prompt, ...]:
    """The trainer's prompts, the last one in ids that its tokenizer would not make of their text: letter by letter."""
    *first, last = trainer._train_prompts
    tokenizer = trainer.processing_class
    letters = [i for letter in "Which is it?" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    return (*first, replace(last, ids=(*letters, *last.ids)[: len(last.ids)]))


def _alternating(completions: list, **columns: Any) -> list[float]:
    """A reward that every group disagrees on, so that every group has a gradient."""
    return [float(i % 2) for i in range(len(completions))]
