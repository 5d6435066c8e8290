"""A reward model: a sequence classifier with one output, called like a reward function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.model_files import load_files
from lockstep.models.policy import (
    BAD_FILES,
    check_finite,
    first_line,
    refuse_adapter,
    refuse_incomplete,
    switch_off_dropout,
)

# Largest number of tokens in one forward pass, with padding. A longer text is a batch alone.
_TOKENS_PER_BATCH = 16384


class RewardModel:
    """Scores prompt and completion together. It is called like a reward function.

    Args:
        model: a sequence classifier with one output. It stays on its device, and runs in evaluation mode without
            dropout.
        tokenizer: the model's own. If it has no pad token, its end-of-sequence token becomes the pad token. The pad
            id is written into the model's config, because the model uses it to find a text's last token (TRL's
            convention).
        chat_template_kwargs: passed to the chat template, for prompts that are messages.
        tokens_per_batch: limit of rows × longest row in one forward pass.

    Raises:
        InputError: the model has several outputs, weights that are NaN or infinite, or a tokenizer with neither a pad
            nor an end-of-sequence token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokens_per_batch: int = _TOKENS_PER_BATCH,
    ) -> None:
        self.__name__ = str(model.config._name_or_path).rstrip("/").split("/")[-1] or type(model).__name__
        outputs = getattr(model.config, "num_labels", None)
        if outputs != 1:
            raise InputError(
                f"reward model {self.__name__} is a {type(model).__name__} with {outputs} outputs; a reward "
                "model is a sequence classifier with one output (AutoModelForSequenceClassification, "
                "num_labels=1)"
            )
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise InputError(
                    f"the tokenizer of reward model {self.__name__} has neither a pad nor an end token"
                )
            tokenizer.pad_token = tokenizer.eos_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        check_finite(f"reward model {self.__name__}", model.named_parameters())
        switch_off_dropout(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._template_kwargs = chat_template_kwargs or {}
        self._tokens_per_batch = tokens_per_batch

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """One score per completion: the model's only logit, in the order of the completions.

        Args:
            prompts: text, or messages; of the same kind as `completions`.
            completions: text that follows the prompt, or messages.

        Raises:
            InputError: there is no chat template for messages or it refuses them, or a text is empty or longer than the
                model's limit.
        """
        texts = [
            self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if not texts:
            return []
        rows: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._check_lengths(rows)
        scores = [0.0] * len(rows)
        for batch in _batches([len(row) for row in rows], self._tokens_per_batch):
            for position, score in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[position] = score
        return scores

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        # Set before each pass, because the user may have called train() on the model.
        self.model.eval()
        width = max(map(len, rows))
        padding = self.tokenizer.pad_token_id
        ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows], device=self.model.device)
        mask = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.model.device
        )
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        if tuple(logits.shape) != (len(rows), 1):
            raise InputError(
                f"reward model {self.__name__} ({type(self.model).__name__}) returned logits of shape "
                f"{tuple(logits.shape)}, not ({len(rows)}, 1): give a sequence classifier with one output"
            )
        return logits[:, 0].float().tolist()

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, str) or isinstance(completion, str):
            raise InputError(
                f"reward model {self.__name__}: a prompt of messages needs a completion of messages"
            )
        if self.tokenizer.chat_template is None:
            raise InputError(
                f"prompts are messages but the tokenizer of reward model {self.__name__} has no chat "
                "template; give prompts as text"
            )
        try:
            return self.tokenizer.apply_chat_template(
                _joined(prompt, completion), tokenize=False, **self._template_kwargs
            )
        except TemplateError as error:
            raise InputError(
                f"the chat template of reward model {self.__name__} refuses these messages: {error}"
            ) from error

    def _check_lengths(self, rows: list[list[int]]) -> None:
        longest, shortest = max(map(len, rows)), min(map(len, rows))
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise InputError(
                f"reward model {self.__name__} reads {limit} tokens; prompt and completion have {longest} "
                "of its tokens: lower max_completion_length or leave out long prompts"
            )
        if not shortest:
            raise InputError(
                f"reward model {self.__name__}: a prompt and its completion have no tokens together"
            )


def load_reward_model(path: str) -> PreTrainedModel:
    """A sequence classifier with one output, in the precision in which it was saved.

    Args:
        path: a result of `resolve_model`.

    Raises:
        InputError: there is no such model, or a tensor is missing from its files (for example the head, if it is a
            language model).
    """
    try:
        model, report = load_files(
            AutoModelForSequenceClassification,
            path,
            num_labels=1,
            dtype="auto",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except BAD_FILES as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"cannot load a reward model with one output from {path}: {first_line(error)}"
        ) from error
    refuse_adapter(f"reward model {path}", model)
    # The files of a classifier that was made from a language model may still have that model's output head.
    refuse_incomplete(f"reward model {path} (with one output)", report, unused=("lm_head.",))
    return model


def _joined(prompt: list[dict[str, Any]], completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole conversation. A completion that continues the prompt's last message is joined with that message."""
    if prompt[-1]["role"] == "assistant" and completion and completion[0]["role"] == "assistant":
        text = (prompt[-1].get("content") or "") + (completion[0].get("content") or "")
        return [*prompt[:-1], {**completion[0], "content": text}, *completion[1:]]
    return [*prompt, *completion]


def _batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Positions of the rows of each batch of similar lengths. Rows × longest row is at most `budget`."""
    batch: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[position] > budget:
            yield batch
            batch = []
        batch.append(position)
    if batch:
        yield batch
