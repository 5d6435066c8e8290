"""Calls a user's `rollout_func(prompts, trainer)`, and samples for it exactly as the run samples.

`RolloutFunction` takes the place of the driver. The function itself may call `generate_rollout_completions`, or sample
with `trainer.engine`. `rollouts/programs/rollout_func.py` checks what it returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.contract.protocol import GenerationRequest, RequestKey, request_seed
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.images.pictures import PromptPictures
from lockstep.images.prompts import ImagePrompts
from lockstep.images.reading import with_images
from lockstep.rollouts.call_fits import not_callable_as
from lockstep.rollouts.driver import decoding
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.programs.rollout_func import Bounds, groups_of_columns
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import render_prompt
from lockstep.training.config.sampling import sampling_of

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]


class RolloutFunction:
    """A user's function that makes rollouts.

    Args:
        function: gets the prompts (text or messages), each once per rollout, and the trainer.
        trainer: the trainer that it gets.
        bounds: what its ids must keep to.
        images: reads the images of prompts; None: the run shows none.
    """

    def __init__(
        self,
        function: RolloutFunc,
        trainer: Any,
        tokenizer: PreTrainedTokenizerBase,
        bounds: Bounds,
        images: ImagePrompts | None = None,
    ) -> None:
        if not callable(function):
            raise InputError(
                f"rollout_func is a {type(function).__name__}; it must be a function of (prompts, trainer)"
            )
        self._function, self._trainer, self._bounds = function, trainer, bounds
        self._decode, self.images, self.end_ids = decoding(tokenizer), images, tuple(bounds.end_ids)
        # Number of calls of the helper below within one generation. Seeds depend on it.
        self.calls = 0

    def groups(self, prompts: Sequence[Prompt], num_generations: int, version: int) -> list[RolloutGroup]:
        """One unscored group per prompt.

        Raises:
            InputError: the function raised an error, or returned something that is not a rollout.
        """
        self.calls = 0
        given = [_given(prompt) for prompt in prompts for _ in range(num_generations)]
        try:
            columns = self._function(given, self._trainer)
        except (KeyboardInterrupt, LockstepError):
            raise
        except BaseException as error:
            advice = ""
            if isinstance(error, TypeError):
                advice = not_callable_as(self._function, "rollout_func(prompts, trainer)", given, self._trainer)
            raise InputError(f"rollout_func raised {type(error).__name__}: {str(error)[:600]}{advice}") from error
        return groups_of_columns(columns, prompts, num_generations, version, self._bounds, self._decode, self.images)


def _given(prompt: Prompt) -> Any:
    """A prompt as the function gets it: messages contain their images, as in TRL."""
    if prompt.pictures is None or not isinstance(prompt.source, list):
        return copy.deepcopy(prompt.source)
    return with_images({**prompt.columns, "prompt": prompt.source})


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    max_tokens: int | None = None,
    images: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Sample one completion per prompt, for use inside a `rollout_func`: with the run's sampling settings, by key, with own seeds.

    Args:
        trainer: the trainer that the function got.
        prompts: text, messages, or lists of token ids; for further turns give ids, so that nothing is tokenized again.
        max_tokens: largest number of new tokens; None: the run's limit, as far as the engine's context has room.
        images: for each prompt, the images whose ids are in it, in order. None: there are none but those in messages.

    Returns:
        One dict per prompt, in their order: `prompt_ids`, `completion_ids`, `logprobs` (lists), `text` and `finish_reason`.

    Raises:
        InputError: a prompt does not fit into the engine's context, or this is not called from a `rollout_func`.
        ProofError: an answer does not match its request.
    """
    own, config, engine = trainer.source.rollout_function, trainer.config, trainer.engine
    if own is None or engine.version is None:
        raise InputError("generate_rollout_completions samples for a rollout_func; call it from there")
    number, own.calls = own.calls, own.calls + 1
    tokenizer, context = trainer.processing_class, engine.settings().max_model_len
    banned = own.images.banned_ids if own.images is not None else ()
    sampling = sampling_of(config, tokenizer, own.end_ids, banned)
    requests = []
    for place, prompt in enumerate(prompts):
        key = RequestKey(f"rollout_func/{number}", place)
        if own.images is not None:
            ids, shown = _seen(prompt, images[place] if images is not None else (), own.images)
        else:
            ids, shown = _ids_of(prompt, tokenizer, config), None
        room = min(sampling.max_tokens if max_tokens is None else max_tokens, context - len(ids))
        if room < 1:
            raise InputError(
                f"prompt {place} has {len(ids)} tokens; the engine's context of {context} has no room for another"
            )
        seed = request_seed(config.seed, engine.version, key)
        requests.append(GenerationRequest(key, ids, replace(sampling, max_tokens=room), seed, shown))
    answers = engine.generate(requests) if requests else {}
    decode = decoding(tokenizer)
    found = [answers[request.key] for request in requests]
    return [
        {
            "prompt_ids": answer.prompt_ids.tolist(),
            "completion_ids": answer.token_ids.tolist(),
            "logprobs": answer.logprobs.tolist(),
            "text": decode(answer.token_ids),
            "finish_reason": answer.finish_reason,
        }
        for answer in found
    ]


def _ids_of(prompt: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> Ids:
    if (ids := _as_ids(prompt)) is not None:
        return ids
    arguments, special = config.template_arguments, config.add_special_tokens
    return whole_numbers(render_prompt(prompt, tokenizer, arguments, add_special_tokens=special))


def _seen(prompt: Any, given: Sequence[Any], images: ImagePrompts) -> tuple[Ids, PromptPictures | None]:
    """The ids and the pictures of a prompt in a run with images.

    Args:
        given: images beside the prompt.
    """
    ids = _as_ids(prompt)
    if ids is None:
        return images.read({"prompt": prompt, "images": list(given)})
    images.check_count(len(given))
    try:
        return ids, images.placed(ids, images.pictures(given))
    except ProofError as error:
        raise InputError(f"{error.found}; give the images of each prompt of ids in `images`") from error


def _as_ids(prompt: Any) -> Ids | None:
    """A list or an array of token ids; None: the prompt is something else."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(plain, list | tuple) and plain and all(isinstance(i, int) for i in plain):
        return whole_numbers(plain)
    return None
