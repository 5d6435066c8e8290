"""Records inside vLLM the ids that its sampler kept for each token. They become the `KeptIds` of our completions.

vLLM 0.32.0 can pass such sets from its model runner to its answers (`return_sampling_mask`), in process and over HTTP. But only its
second model runner computes the sets, and this runner does not exist for CPUs. This module lets the first model runner compute
them:

- `sync/vllm/plugin.py` calls `carry_kept_ids` in every process of vLLM. The scheduler then passes the sets on.
- Our engines call `record_kept_ids` in the workers. It installs a recorder around the sampler.

A request asks for its sets with a key of `SamplingParams.extra_args`. For a batch without such requests, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from lockstep.engines.vllm.arguments import BAD_WORDS, MAX_KEPT_IDS
from lockstep.tokens.arrays import small_ids
from lockstep.tokens.kept_ids import KeptIds


class KeptIdsRecorder:
    """Wraps the sampler of a model runner and records the kept ids of each step.

    Args:
        runner: vLLM's first model runner (`GPUModelRunner`; the runner for CPUs is a subclass).
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample, self._sample_tokens = runner.sampler.sample, runner.sample_tokens
        self._found: Any = None

    def sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Replaces vLLM's `Sampler.sample`. The log-probs that it returns are after all filters: −inf outside the sets."""
        sampled, logprobs = self._sample(*args, **kwargs)
        limits = self._limits()
        if logprobs is not None and limits.any():
            self._found = kept_rows(logprobs, limits)
        return sampled, logprobs

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces vLLM's `sample_tokens`, which makes one step for all running requests. Adds the sets to its output."""
        self._found = None
        output = self._sample_tokens(*args, **kwargs)
        if self._found is not None:
            from vllm.v1.outputs import SamplingMaskLists

            output.sampling_masks = SamplingMaskLists(*self._found)
        return output

    def _limits(self) -> np.ndarray:
        """(rows,) largest number of kept ids that each running request asks for; 0 if it does not ask for kept ids."""
        requests = self._runner.requests
        parameters = (requests[name].sampling_params for name in self._runner.input_batch.req_ids)
        return np.array([(p.extra_args or {}).get(MAX_KEPT_IDS, 0) for p in parameters], dtype=np.int64)


def kept_rows(logprobs: torch.Tensor, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids with a finite log-prob, in each row that has a limit.

    Args:
        logprobs: (rows, V) log-probs after all filters.
        limits: (rows,) largest number of ids per row. If a row has more ids, or if its limit is 0, its set is empty.

    Returns:
        (M,) int32 ids of all rows, ascending within each row; and (rows + 1,) int64 offset at which the ids of each row begin, with
        M as the last entry.
    """
    asked = np.flatnonzero(limits)
    part = logprobs if len(asked) == len(limits) else logprobs[torch.from_numpy(asked).to(logprobs.device)]
    rows, ids = np.divmod(_finite_places(part), part.shape[1])
    rows = asked[rows]
    sizes = np.bincount(rows, minlength=len(limits))
    too_large = sizes > limits
    if too_large.any():
        ids = ids[~too_large[rows]]
        sizes[too_large] = 0
    return ids.astype(np.int32), np.concatenate([[0], np.cumsum(sizes)])


def _finite_places(values: torch.Tensor) -> np.ndarray:
    """Indices of the values above −inf in the flattened tensor, ascending."""
    if values.is_cpu:
        # NumPy is twice as fast as torch: a step of 64 requests with a vocabulary of 49,152 takes 1 ms.
        return np.flatnonzero(values.numpy() > -np.inf)
    return (values > -torch.inf).flatten().nonzero()[:, 0].cpu().numpy()


def record_kept_ids(worker: Any) -> None:
    """Install a recorder around the sampler of a vLLM worker, if there is none yet. A worker with the second model runner is not
    changed."""
    runner = worker.model_runner
    if worker.is_driver_worker and hasattr(runner, "sampler") and not hasattr(runner, "lockstep_recorder"):
        runner.lockstep_recorder = recorder = KeptIdsRecorder(runner)
        runner.sampler.sample, runner.sample_tokens = recorder.sample, recorder.sample_tokens


def carry_kept_ids() -> None:
    """Change vLLM in two ways: its scheduler passes kept ids on, and requests may give bad words as ids. Safe to call again."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "lockstep_carries"):
        return
    make, read_words = Scheduler.__init__, SamplingParams.update_from_tokenizer

    def init_and_pass_on(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        # vLLM's own argument for this would demand a top_k from every request, even from requests that only score.
        self.return_sampling_mask = True

    def read_words_and_ids(self: Any, tokenizer: Any) -> None:
        read_words(self, tokenizer)
        # vLLM takes bad words as text, and its tokenizer makes ids of them, with and without a space before them. These ids may
        # differ from the ids of the request.
        if words := (self.extra_args or {}).get(BAD_WORDS):
            self._bad_words_token_ids = [list(word) for word in words]

    Scheduler.__init__, Scheduler.lockstep_carries = init_and_pass_on, True
    SamplingParams.update_from_tokenizer = read_words_and_ids


def kept_ids_from(sets: Sequence[Sequence[int]]) -> KeptIds:
    """`KeptIds` from vLLM's answer: one list of ids per token.

    Raises:
        BadValues: an id is not an integer.
    """
    ids = list(chain.from_iterable(sets))
    return KeptIds(small_ids(ids), np.cumsum(np.fromiter(map(len, sets), dtype=np.int64, count=len(sets))))
