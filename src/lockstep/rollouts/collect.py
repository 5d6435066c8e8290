"""From prompts to groups of completions: one request a sample, each with its own key and seed.

Comes from: `tokens/chat.py` (ids). Goes to: `rollouts/rewards.py`, then training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from lockstep.engines.answers import check_answers
from lockstep.engines.protocol import (
    Completion,
    Engine,
    GenerationRequest,
    OnAnswer,
    RequestKey,
    Sampling,
    request_seed,
)
from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup


def collect(
    prompts: Sequence[Prompt],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    num_generations: int,
    run_seed: int,
    version: int,
    on_answer: OnAnswer | None = None,
) -> list[RolloutGroup]:
    """Sample `num_generations` completions of every prompt.

    Args:
        version: the version the trainer last pushed; the engine must hold it.
        on_answer: given each completion when it is finished.

    Returns:
        One unscored group a prompt, in the order of `prompts`.

    Raises:
        ProofError: the engine holds another version, or an answer fails its checks.
        InputError: a prompt does not fit the engine's context.
    """
    if engine.version != version:
        raise ProofError(
            "version",
            f"the engine holds version {engine.version}, the trainer last pushed {version}",
            "a sync was skipped or failed, or something else updated the engine",
            "push the weights before collecting rollouts",
        )
    requests = requests_for(prompts, sampling, num_generations=num_generations, run_seed=run_seed, version=version)
    # The engine has checked its own answers; this end checks that they are to what it asked.
    answers = check_answers(requests, engine.generate(requests, on_answer).values(), [version])
    return groups_from(prompts, answers, num_generations, tokenizer)


def requests_for(
    prompts: Sequence[Prompt], sampling: Sampling, *, num_generations: int, run_seed: int, version: int
) -> list[GenerationRequest]:
    """One request a sample.

    Args:
        version: what seeds depend on beside run, prompt and sample: of the weights that learn from these completions first.
    """
    return [
        GenerationRequest(key, prompt.ids, sampling, request_seed(run_seed, version, key))
        for prompt in prompts
        for key in (RequestKey(prompt.prompt_id, sample) for sample in range(num_generations))
    ]


def groups_from(
    prompts: Sequence[Prompt],
    answers: Mapping[RequestKey, Completion],
    num_generations: int,
    tokenizer: PreTrainedTokenizerBase,
) -> list[RolloutGroup]:
    """One unscored group a prompt, in the order of `prompts`, from answers that have been checked."""
    return [
        group_of(prompt, [answers[RequestKey(prompt.prompt_id, i)] for i in range(num_generations)], tokenizer)
        for prompt in prompts
    ]


def group_of(prompt: Prompt, completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> RolloutGroup:
    """An unscored group, its completions in the order of their samples, with their texts."""
    rollouts = tuple(Rollout(c, tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in completions)
    return RolloutGroup(prompt, rollouts)
