"""What TRL's users read from a trainer, under TRL's names, and TRL's arguments of the model card.

`training/trainers/online.py` extends the class. Everything here is read from the trainer's own parts.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from transformers import GenerationConfig, PreTrainedModel, Trainer

from lockstep.errors import InputError
from lockstep.models.policy import first_line
from lockstep.models.reward_model import RewardModel
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.scores.rewards import Scorer, reward_name
from lockstep.training.forward.reference import Reference
from lockstep.training.generate.engine import vllm_installed
from lockstep.training.generate.source import RolloutSource
from lockstep.training.run_files.step_log import StepLog

# The base class of all errors of a call to the hub. Which HTTP library has it depends on the version of huggingface_hub.
_HTTP_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


@contextmanager
def _hub_errors(folder: str | None) -> Iterator[None]:
    try:
        yield
    except (OfflineModeIsEnabled, LocalTokenNotFoundError, _HTTP_ERROR) as error:
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise InputError(
            f"push_to_hub: {hub} cannot be used ({first_line(error)}). Check the network, HF_HUB_OFFLINE and 'hf auth login'. "
            f"Nothing on disk is lost: call push_to_hub() later, or upload what is in {folder} with 'hf upload'"
        ) from error


class TRLNames(Trainer):
    """The public attributes of TRL's trainers."""

    config: Any
    method: ClassVar[str]
    reference: Reference | None
    step_log: StepLog
    ranks: Ranks
    source: RolloutSource
    _scorer: Scorer
    # Figures that a callback or a reward function adds to the next evaluation.
    _eval_notes: dict[str, list[float]]

    @property
    def reward_funcs(self) -> list[Any]:
        """The reward functions; a reward model stands for itself. Empty with a judge."""
        return [f.model if isinstance(f, RewardModel) else f for f in self._functions]

    @property
    def reward_func_names(self) -> list[str]:
        """The names of the reward functions in metrics."""
        return [reward_name(f) for f in self._functions]

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizer of each reward model; None for a function."""
        return [f.tokenizer if isinstance(f, RewardModel) else None for f in self._functions]

    @property
    def reward_weights(self) -> torch.Tensor:
        """(K,) weights of the K reward functions."""
        return torch.tensor(list(getattr(self._scorer, "weights", ())), dtype=torch.float32)

    @property
    def _functions(self) -> list[Any]:
        return list(getattr(self._scorer, "functions", ()))

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The reference model; None if there is none, or if it is the policy without its adapter."""
        return None if self.reference is None else self.reference.own

    @property
    def num_generations(self) -> int:
        """Completions per prompt in training."""
        return self.config.group_size

    @property
    def num_generations_eval(self) -> int:
        """Completions per prompt in an evaluation."""
        return self.config.group_size_eval

    @property
    def max_completion_length(self) -> int:
        """Largest number of tokens of a completion."""
        return self.config.completion_limit

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.config.temperature

    @property
    def top_p(self) -> float:
        """The filter of this name."""
        return self.config.top_p

    @property
    def top_k(self) -> int:
        """The filter of this name."""
        return self.config.top_k

    @property
    def min_p(self) -> float | None:
        """The filter of this name."""
        return self.config.min_p

    @property
    def repetition_penalty(self) -> float:
        """The penalty of this name."""
        return self.config.repetition_penalty

    @property
    def use_vllm(self) -> bool:
        """Whether vLLM samples, in this process or on servers."""
        if self.ranks.owner:
            return self.source.engine.settings().engine != "transformers"
        return vllm_installed() if self.config.use_vllm is None else self.config.use_vllm

    @property
    def vllm_mode(self) -> str:
        """`colocate` or `server`."""
        return self.config.vllm_mode

    @property
    def generation_config(self) -> GenerationConfig:
        """What the run samples with, in transformers' form. It is made again at each use: a change of it changes nothing."""
        return GenerationConfig(
            max_new_tokens=self.max_completion_length,
            do_sample=not self.config.is_greedy,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    @property
    def beta(self) -> float:
        """Weight of the reference model; Online DPO: the value of the current epoch."""
        by_epoch = getattr(self.config, "beta_of", None)
        return self.config.beta if by_epoch is None else by_epoch(int(self.state.epoch or 0))

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
        """Make the repository on the hub, as the base class does: at the start of a run that pushes, or at the first push.

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
