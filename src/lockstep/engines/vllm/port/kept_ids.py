"""Records inside vLLM the ids that its sampler kept for each token. They become the `KeptIds` of our completions.

vLLM 0.32.0 can pass such sets from its model runner to its answers (`return_sampling_mask`), in process and over
HTTP. Its second model runner, which it uses on GPUs, computes the sets for all requests or for none, and demands a
`top_k`. Its first one, which it uses on CPUs, does not compute them. This module lets both compute the sets of the
requests that ask:

- `carry_kept_ids` is called in every process of vLLM. The scheduler then passes the sets on.
- Our engines call `record_kept_ids` in the workers. It installs a recorder around the sampler of either model runner.

A request asks for its sets with a key of `SamplingParams.extra_args`. For a batch without such requests, nothing is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from lockstep.engines.vllm.arguments import BAD_WORDS, MAX_KEPT_IDS
from lockstep.tokens.arrays import KeptIds, small_ids


class KeptIdsRecorder:
    """Wraps the sampler of vLLM's first model runner (a subclass on CPUs), and records each step's kept ids."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample, self._sample_tokens = runner.sampler.sample, runner.sample_tokens
        self._found: Any = None

    def sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Replaces vLLM's `Sampler.sample`. Its log-probs are those after all filters: −inf outside the sets."""
        sampled, logprobs = self._sample(*args, **kwargs)
        limits = self._limits()
        if logprobs is not None and limits.any():
            self._found = kept_rows(logprobs, limits)
        return sampled, logprobs

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces vLLM's `sample_tokens`, one step for all running requests, and adds the sets to its output."""
        self._found = None
        output = self._sample_tokens(*args, **kwargs)
        if self._found is not None:
            from vllm.v1.outputs import SamplingMaskLists

            # With asynchronous scheduling this is a promise of the output, which the output belongs to already.
            getattr(output, "_model_runner_output", output).sampling_masks = SamplingMaskLists(*self._found)
        return output

    def _limits(self) -> np.ndarray:
        """(rows,) largest number of kept ids that each running request asks for; 0 if it does not ask for kept ids."""
        requests = self._runner.requests
        parameters = (requests[name].sampling_params for name in self._runner.input_batch.req_ids)
        return np.array([(p.extra_args or {}).get(MAX_KEPT_IDS, 0) for p in parameters], dtype=np.int64)


class SecondRunnerKeptIds:
    """Lets vLLM's second model runner (`v1.worker.gpu`) compute its sets in the steps with a request for them."""

    def __init__(self, runner: Any) -> None:
        self._sampler = sampler = runner.sampler
        # Largest number of kept ids that the request in each place of the runner asks for; 0 if it does not ask.
        self._limits = np.zeros(runner.max_num_reqs, dtype=np.int64)
        self._add_request, self._sample, self._step = sampler.add_request, sampler.sample, runner.sample
        sampler.add_request, sampler.sample, runner.sample = self.add_request, self.sample, self.step

    def add_request(self, place: int, parameters: Any) -> None:
        """Replaces vLLM's `Sampler.add_request`. The next request in the same place has a limit of its own."""
        self._limits[place] = (parameters.extra_args or {}).get(MAX_KEPT_IDS, 0)
        self._add_request(place, parameters)

    def sample(
        self, logits: Any, expanded: Any, mapping: Any, places: np.ndarray, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces vLLM's `Sampler.sample`, which computes the sets of all its requests or of none."""
        self._sampler.return_sampling_mask = bool(self._limits[places].any())
        return self._sample(logits, expanded, mapping, places, *args, **kwargs)

    def step(self, hidden_states: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces vLLM's `GPUModelRunner.sample`. A set with more ids than its request asks for becomes empty."""
        found = self._step(hidden_states, batch, *args, **kwargs)
        if (sets := found[0].sampling_mask_tensors) is not None:
            limits = torch.from_numpy(self._limits[batch.idx_mapping_np]).to(sets.counts.device)
            sets.counts.masked_fill_(sets.counts > limits, 0)
        return found


def kept_rows(logprobs: torch.Tensor, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids with a finite log-prob, in each row that has a limit.

    Args:
        logprobs: (rows, V) log-probs after all filters.
        limits: (rows,) largest number of ids per row. If a row has more ids, or if its limit is 0, its set is empty.

    Returns:
        (M,) int32 ids of all rows, ascending within each row; and (rows + 1,) int64 offset at which the ids of each
        row begin, with M as the last entry.
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
    """Install a recorder around the sampler of a vLLM worker, if there is none yet."""
    runner = worker.model_runner
    if getattr(runner, "sampler", None) is None or hasattr(runner, "lockstep_recorder"):
        return
    if getattr(worker, "use_v2_model_runner", False):
        # Every worker samples.
        runner.lockstep_recorder = SecondRunnerKeptIds(runner)
    elif worker.is_driver_worker:
        runner.lockstep_recorder = recorder = KeptIdsRecorder(runner)
        runner.sampler.sample, runner.sample_tokens = recorder.sample, recorder.sample_tokens


def carry_kept_ids() -> None:
    """Let vLLM's scheduler pass kept ids on, and requests give bad words as ids. Safe to call again."""
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
        # vLLM makes ids of bad words itself, with and without a space. They may differ from the request's ids.
        if words := (self.extra_args or {}).get(BAD_WORDS):
            self._bad_words_token_ids = [list(word) for word in words]

    Scheduler.__init__, Scheduler.lockstep_carries = init_and_pass_on, True
    SamplingParams.update_from_tokenizer = read_words_and_ids


def kept_ids_from(sets: Sequence[Sequence[int]]) -> KeptIds:
    """`KeptIds` from vLLM's answer: one list of ids per token."""
    ids = list(chain.from_iterable(sets))
    return KeptIds(small_ids(ids), np.cumsum(np.fromiter(map(len, sets), dtype=np.int64, count=len(sets))))
