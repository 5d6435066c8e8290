"""The protocol of every engine: its requests, its answers, and how it receives weights.

Requests go into an inbox, and engines put the completions back, by key. A push calls the methods of `WeightReceiver`
in the same order for all engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from lockstep.contract.probe import EngineModules, HeldPart
from lockstep.contract.sampling import Sampling
from lockstep.contract.tensors import LoadedWeights
from lockstep.images.pictures import NO_PICTURES, PromptPictures
from lockstep.tokens.arrays import (
    ArrayFields,
    Flags,
    Ids,
    KeptIds,
    Reals,
    chosen,
    flags,
    places_of,
    reals,
    whole_numbers,
)

if TYPE_CHECKING:
    from lockstep.contract.inbox import Inbox

FinishReason = Literal["stop", "length"]


class RequestKey(NamedTuple):
    """Identity of one request and of its completion. Answers are matched by key, never by position.

    Attributes:
        prompt_id: the prompt of the rollout.
        sample: which rollout of that prompt.
        call: which request of that rollout, from 0. A completion that consists of several answers has the key of the
            first request.
    """

    prompt_id: str
    sample: int
    call: int = 0

    def __str__(self) -> str:
        return f"{self.prompt_id}#{self.sample}" + (f".{self.call}" if self.call else "")


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest(ArrayFields):
    """A request for one completion. `seed` is used for this request only.

    Attributes:
        prompt_ids: (P,) int64. The constructor accepts any sequence of integers.
        pictures: the pictures whose placeholders are in the prompt.
        own_stop: stop strings that only this request has. They are also in `sampling.stop`, after the stop strings of
            the run.

    Raises:
        BadValues: a prompt id is not an integer.
    """

    key: RequestKey
    prompt_ids: Ids
    sampling: Sampling
    seed: int
    pictures: PromptPictures = NO_PICTURES
    own_stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._set("prompt_ids", whole_numbers(self.prompt_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Completion(ArrayFields):
    """One completion of N tokens as the engine produced it.

    Its arrays are read-only. The constructor accepts any sequence of values of the right kind.

    Attributes:
        key: the key of the request.
        prompt_ids: (P,) int64, the prompt as the engine used it.
        token_ids: (N,) int64 sampled ids. If an end-of-sequence token was sampled, it is included.
        logprobs: (N,) float32 log-prob of each sampled token under the sampling distribution (natural logarithm).
        weight_versions: (N,) int64 version of the weights that sampled each token.
        finish_reason: why the engine ended the completion: `stop` for an end token or stop string, `length` for the
            token limit.
        sampled: (N,) bool, whether each id was sampled. The other ids were inserted. Their
            probability is 1, and their log-prob is 0. None: all ids were sampled.
        kept_ids: one set of ids for each sampled token, in order: the ids whose probability was above 0 when the
            engine sampled the token. None: the request has no filter that depends on the logits
            (`Sampling.is_filtered`).
        pictures: the pictures that the engine has put into the prompt. If the completion consists of several answers,
            these are all pictures before the last answer.

    Raises:
        BadValues: an id or a version is not an integer, a log-prob is not a number, or a value of `sampled` is not a
            boolean.
    """

    key: RequestKey
    prompt_ids: Ids
    token_ids: Ids
    logprobs: Reals
    weight_versions: Ids
    finish_reason: FinishReason
    sampled: Flags | None = None
    kept_ids: KeptIds | None = None
    pictures: PromptPictures = NO_PICTURES

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "token_ids", "weight_versions"):
            self._set(name, whole_numbers(getattr(self, name)))
        self._set("logprobs", reals(self.logprobs))
        if self.sampled is not None:
            self._set("sampled", flags(self.sampled))

    @property
    def sampled_places(self) -> Ids:
        """(S,) positions of the sampled ids in `token_ids`, in order."""
        return places_of(self.sampled, len(self.token_ids))

    @property
    def sampled_versions(self) -> Ids:
        """(S,) version of the weights that sampled each sampled id."""
        return chosen(self.weight_versions, self.sampled)

    @property
    def sampled_logprobs(self) -> Reals:
        """(S,) log-prob of each sampled id."""
        return chosen(self.logprobs, self.sampled)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that are in force, read back from the engine. They may differ from the settings that were requested.

    Attributes:
        sampling_defaults: sampling values that the engine would use for settings that a request leaves out; must be
            empty.
        model_config: the fields of the engine's model config that describe its computation, as JSON types.
        kept_ids: whether the engine reports the ids that filters keep (`Completion.kept_ids`).
        structured_outputs: the library that makes the masks of grammars, and those of its settings that are not the
            defaults.
        normalises_pixels: whether the engine normalises pixels itself. Pixels that are already normalised would then
            be wrong.
        second_runner: whether vLLM computes with its second model runner, which it uses on GPUs.
        searches_top_p: whether the engine searches the edge of top-p instead of sorting, so that it comes only near
            to it.
        request_limits: the largest number of ids that one request may name, per setting.
    """

    engine: str
    model: str
    architecture: str
    dtype: torch.dtype
    head_dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    logprobs_mode: str
    prefix_caching: bool
    async_scheduling: bool
    quantization: str | None
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    kept_ids: bool = False
    structured_outputs: str = ""
    normalises_pixels: bool = False
    second_runner: bool = False
    searches_top_p: bool = False
    request_limits: Mapping[str, int] = field(default_factory=dict)


OnAnswer = Callable[[Completion], None]


class WeightReceiver(Protocol):
    """The part of an engine that receives weights."""

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Dtype to which wider floating-point tensors are cast before they are sent; None: they are sent unchanged."""

    def begin_update(self) -> None:
        """Stop serving: until `commit_version` the engine refuses to generate."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        """Write named tensors (checkpoint names and shapes), and report all tensors that the engine now holds.

        Args:
            base: digest of the weights that the engine must already hold. `tensors` are then the tensors that changed
                since. Empty: `tensors` are all weights of the model.
        """

    def reset_caches(self) -> bool:
        """Drop everything that was computed with older weights. Returns True only if the engine confirms it."""

    def commit_version(self, version: int) -> None:
        """Serve again. Every new token is stamped with `version`."""


class ProbedEngine(Protocol):
    """The part of an engine that the module probe and the canary use."""

    def modules(self, checkpoint_names: tuple[str, ...]) -> EngineModules:
        """The modules that the engine runs, with the checkpoint names of their weights.

        Args:
            checkpoint_names: the trainer's names of all weights. A tied weight occurs under each of its names.
        """

    def probe(self, names: Sequence[str], seed: int, *, every: bool) -> dict[str, torch.Tensor]:
        """Output of each named module for its probe input (`contract/probe.py`): 1-D float32 tensors on CPU.

        Args:
            every: whether to use all rows of each embedding and all experts of each layer, instead of a sample.
        """

    def held(self, parts: Sequence[HeldPart], dtype: torch.dtype, key: int | None) -> dict[str, str]:
        """Digests of what modules hold (`held_digests`), as they compute with it, by the part as text.

        Args:
            dtype: dtype to which the numbers are cast.
            key: key of the digests; None: they are xxh3.
        """

    def ask_workers(
        self, question: str, arguments: Callable[[str], Sequence[Any] | None]
    ) -> dict[str, Sequence[Any]]:
        """Ask every worker what an extra wants to know of it.

        Args:
            question: a name of `WORKERS` (`lockstep.extensions`).
            arguments: gives the arguments, in JSON's types, for the name of a server (the prefix of its modules'
                names; empty if there is only one). None: this server is not asked.

        Returns:
            The answers of each server's workers, by the server's name. Empty: the engine has no workers.
        """

    def score(self, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        """Log-probs at temperature 1 of every id of each sequence, except the first id.

        The engine computes them without any cache.

        Raises:
            InputError: a sequence has fewer than two ids, or fills the engine's whole context.
            ProofError: no version is committed, or a log-prob is missing or not finite.
        """


class Engine(WeightReceiver, ProbedEngine, Protocol):
    """An inference engine. It does not serve before the first version is committed."""

    @property
    def version(self) -> int | None:
        """The committed weight version. None before the first commit and during an update."""

    def settings(self) -> EngineSettings:
        """The effective settings, for the handshake."""

    def serve(self, inbox: Inbox) -> None:
        """Answer the requests of an inbox until it is closed.

        Requests may arrive at any time. The engine gives each completion back as soon as it is finished. If it raises
        an error, it has dropped all requests of the inbox.

        Raises:
            InputError: a prompt is empty, or a request does not fit into the engine's context.
            ProofError: no version is committed, or an answer does not match its request.
            LockstepError: a request exceeded the time limit.
        """

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        """Answer every request (`serve` with an inbox that contains them from the start).

        Returns the completions by key.

        Args:
            on_answer: called with each completion as soon as it is finished, before all answers are checked together.
                The calls come from one thread, which may differ from the caller's. The function must not block.

        Raises:
            InputError: a prompt is empty, or a request does not fit the engine's context. No request has then been
                started.
            ProofError: no version is committed, or the answers do not match the requests.
            LockstepError: a request exceeded the time limit.
        """

    def close(self) -> None:
        """Release the engine's memory and processes."""


def request_seed(run_seed: int, version: int, key: RequestKey) -> int:
    """Seed of one request: a 62-bit hash of run seed, weight version, prompt id and sample index."""
    return _seed(f"{run_seed}\x1f{version}\x1f{key.prompt_id}\x1f{key.sample}")


def derived_seed(seed: int, use: str) -> int:
    """A second seed of a request, for another use: a 62-bit hash of the seed and the name of the use."""
    return _seed(f"{seed}\x1f{use}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
