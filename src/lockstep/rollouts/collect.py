"""From prompts to groups of completions: one request per sample, each with its own key and seed.

`tokens/chat.py` gives the ids. `rollouts/rewards.py` scores the groups, and then training uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.engines.answers import check_answers, check_requests
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
from lockstep.rollouts.interruptions import Decode, Generate, Interruption, generate_interrupted


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
    interruption: Interruption | None = None,
    generate: Generate | None = None,
) -> list[RolloutGroup]:
    """Sample `num_generations` completions of every prompt.

    Args:
        version: the version that the trainer pushed last; the engine must hold it.
        on_answer: called with each completion when it is finished.
        interruption: ends thinking that is too long; None: thinking is never interrupted.
        generate: sends requests to the engine instead of its own `generate`, for example with another time limit.

    Returns:
        One unscored group per prompt, in the order of `prompts`.

    Raises:
        ProofError: the engine holds another version, or an answer fails its checks.
        InputError: a prompt does not fit the engine's context, or no tokens are left for an answer after an interruption.
    """
    if engine.version != version:
        raise ProofError(
            "version",
            f"the engine holds version {engine.version}, the trainer last pushed {version}",
            "a sync was skipped or failed, or another program updated the engine",
            "push the weights before collecting rollouts",
        )
    requests = requests_for(prompts, sampling, num_generations=num_generations, run_seed=run_seed, version=version)
    if interruption is not None:
        check_whole(requests, engine)
    found = answers_to(requests, generate or engine.generate, tokenizer, interruption, on_answer)
    # The engine has checked its own answers. This checks that they match these requests.
    answers = check_answers(requests, found.values(), [version])
    return groups_from(prompts, answers, num_generations, tokenizer)


def requests_for(
    prompts: Sequence[Prompt], sampling: Sampling, *, num_generations: int, run_seed: int, version: int
) -> list[GenerationRequest]:
    """One request per sample.

    Args:
        version: weight version that learns from these completions first. Seeds depend on it, on the run, the prompt and the
            sample.
    """
    return [
        GenerationRequest(key, prompt.ids, sampling, request_seed(run_seed, version, key))
        for prompt in prompts
        for key in (RequestKey(prompt.prompt_id, sample) for sample in range(num_generations))
    ]


def check_whole(requests: Sequence[GenerationRequest], engine: Engine) -> None:
    """`check_requests` for requests that are sent in two halves. The engine itself checks only each half."""
    check_requests(requests, engine.version, engine.settings().max_model_len)


def answers_to(
    requests: Sequence[GenerationRequest],
    generate: Generate,
    tokenizer: PreTrainedTokenizerBase,
    interruption: Interruption | None,
    on_answer: OnAnswer | None = None,
) -> dict[RequestKey, Completion]:
    """Answers by key. The engine is asked once, or twice if thinking may be interrupted.

    Args:
        generate: the engine's `generate`. With an interruption it gets each half of a request: see `check_whole`.
    """
    if interruption is None:
        return generate(requests, on_answer)
    return generate_interrupted(requests, generate, interruption, _decoding(tokenizer), on_answer)


def groups_from(
    prompts: Sequence[Prompt],
    answers: Mapping[RequestKey, Completion],
    num_generations: int,
    tokenizer: PreTrainedTokenizerBase,
) -> list[RolloutGroup]:
    """One unscored group per prompt, in the order of `prompts`, from checked answers."""
    return [
        group_of(prompt, [answers[RequestKey(prompt.prompt_id, i)] for i in range(num_generations)], tokenizer)
        for prompt in prompts
    ]


def group_of(prompt: Prompt, completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> RolloutGroup:
    """An unscored group. Its completions are in the order of their samples, with their texts."""
    decode = _decoding(tokenizer)
    return RolloutGroup(prompt, tuple(Rollout(c, decode(c.token_ids)) for c in completions))


def _decoding(tokenizer: PreTrainedTokenizerBase) -> Decode:
    return lambda ids: tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)
