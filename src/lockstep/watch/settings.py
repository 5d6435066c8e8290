"""Proofs of settings: the engine has those that training assumes, and all have those that the user asked for.

The trainer and the engine read one config. If the config, or the code that reads it, loses a setting, both sides agree
and no other proof sees it. So this module compares all of these with the user's fields as `definitions/sampling.py`
reads them.

Proof `settings`.
Shows: every request, and the distribution that the trainer scores, have the temperature, filters, penalties, stop
strings and grammar that the user has asked for; each request has them when it goes to vLLM, in process or over HTTP.
What the user has asked for is read from the config a second time, before anything else uses it
(docs/internals/proof.md#settings-that-both-sides-share).
Does not show: what the config itself made of its arguments before a trainer got it; the ids of bad words and the text
of a grammar in vLLM; the requests of a `rollout_func`.
When: start; every request.

Proof `limits`.
Shows: no request allows more tokens than the user; a completion of one turn that ended with `length` has as many
tokens as the user's limit or the context allows.
Does not show: which limit a turn of a conversation should have; answers that a `rollout_func` made.
When: every request; every completion of one turn.

Proof `interruption`.
Shows: a completion that did not end its thinking within the user's limit has the ids of the interruption, exactly
once and at a place between the two limits; no other completion has inserted ids.
Does not show: which place between `min_thinking_length` and `max_thinking_length` the seed draws.
When: every completion of one turn.

Proof `rewards`.
Shows: the reward of every completion is the sum of its scores with the weights that the user has asked for.
Does not show: that a reward function scored the right text (`scores` shows this).
When: every completion, after the rewards of its generation or evaluation.

Proof `temperature`.
Shows: the log-probs that the loss uses are those of the model's own logits at the user's temperature, with the user's
bias and penalties, among the engine's kept ids.
Does not show: tokens that are not drawn; a run with bad words, `min_tokens` or a grammar and without top-k, top-p or
min-p; the hidden states (the gap shows them).
When: every micro-batch: 8 tokens, of every pack its share (64 with filters).

The handshake compares the settings that training assumes with those of `Engine.settings()`.

Proof `handshake`.
Shows: the engine's *effective* model, architecture, dtype, head dtype, vocabulary, context, log-probs mode,
scheduling, quantisation and sampling defaults are what training assumes; two spellings of one setting are one (a
window of 0 and none, a rotary factor of 1.0 and none).
Does not show: that the engine obeys its own settings.
When: start, before the first push; after every reconnect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.inbox import check_limits
from lockstep.contract.probe import fields_of_parts, one_spelling
from lockstep.contract.protocol import Completion, EngineSettings, GenerationRequest
from lockstep.contract.sampling import Sampling
from lockstep.definitions.sampling import UserSettings, broken_rule, weighted_sum
from lockstep.devices import rounds_products
from lockstep.engines.vllm.arguments import GRAMMAR_BACKEND
from lockstep.errors import ProofError
from lockstep.models.adapters import causal_model
from lockstep.tokens.arrays import Ids
from lockstep.tokens.chat import embedding_rows

_CHANGED = (
    "the config was changed after the trainer was made, or the code that passes it on lost the setting",
    "set the fields when the config is made and leave them; otherwise this is a defect of Lockstep: report it",
)
# Limits on the difference between a log-prob of the loss and its definition, in nats: mean and largest of the drawn
# tokens. Both use the same hidden states and the same output head; only the number of rows in the head's product
# differs. A head in half precision rounds a logit of 16 to a multiple of 0.125, and may round it the other way when
# it computes other rows beside it.
_LIMITS = {True: (1e-4, 1e-3), False: (0.15, 1.0)}
# A head in float32 whose product CUDA rounds to 11 bits (TF32).
_ROUNDED = (0.02, 0.15)


class SettingsProof:
    """Compares requests, answers, rewards and the loss with the user's settings.

    `encode` gives the ids of a text, without special tokens. The ids in `banned`, placeholders of pictures, are never
    sampled, whatever the user has asked for.
    """

    def __init__(
        self, wanted: UserSettings, encode: Callable[[str], Sequence[int]], banned: Sequence[int] = ()
    ) -> None:
        self.wanted, self._encode, self.banned = wanted, encode, banned
        self._encoded: dict[str, Ids] = {}

    # ---- requests ---------------------------------------------------------------------------------------------------

    def check_sampling(self, sampling: Sampling, who: str) -> None:
        """Check a sampling distribution, without its length limit. `who` has it, in the words of an error."""
        wanted = self.wanted
        due = {"temperature": wanted.temperature, **wanted.numbers, "stop": wanted.stop}
        due |= {"logit_bias": wanted.logit_bias, "allowed_token_ids": wanted.allowed_token_ids}
        for name, value in due.items():
            found = getattr(sampling, name)
            if (dict(found) if isinstance(value, Mapping) else found) != value:
                raise _unlike(f"{who} has {name}={found!r:.80}; the user has asked for {value!r:.80}")
        if len(sampling.bad_words) < len(wanted.bad_words):
            raise _unlike(
                f"{who} has {len(sampling.bad_words)} bad words; the user has named {len(wanted.bad_words)}"
            )
        grammar = None if sampling.grammar is None else sampling.grammar.spec
        if not _same_grammar(grammar, wanted.grammar):
            raise _unlike(
                f"{who} follows the grammar {grammar!r:.80}; the user has asked for {wanted.grammar!r:.80}"
            )

    def check_request(self, request: GenerationRequest) -> None:
        """Check the settings of a request, as it waits for the engine, and that it may not exceed a completion."""
        stop, own = request.sampling.stop, request.own_stop
        # An agent may end its turns at further strings. The run's own must all be there.
        of_run = stop[: -len(own)] if own and stop[-len(own) :] == own else stop
        self.check_sampling(replace(request.sampling, stop=of_run), f"request {request.key}")
        if request.sampling.max_tokens > self.wanted.max_tokens:
            raise _wrong_limit(
                f"request {request.key} allows {request.sampling.max_tokens} tokens; the user's limit is "
                f"{self.wanted.max_tokens}"
            )

    # ---- answers ----------------------------------------------------------------------------------------------------

    def check_completion(self, completion: Completion, context: int) -> None:
        """Check that a completion of one turn was not cut before the user's limit, and interrupted only as asked.

        `context` is the number of ids that the engine's context holds.
        """
        count, wanted = len(completion.token_ids), self.wanted
        most = min(wanted.max_tokens, context - len(completion.prompt_ids))
        if count > most or (
            completion.finish_reason == "length" and count < most and not self._inserted_too_long(most)
        ):
            raise _wrong_limit(
                f"completion {completion.key} has {count} tokens and ended for the reason "
                f"{completion.finish_reason!r}; the user's limit and the engine's context leave {most}"
            )
        sampled = np.ones(count, np.bool_) if completion.sampled is None else completion.sampled
        if wanted.thinking is None:
            broken = "has inserted ids, and thinking is never interrupted" if not sampled.all() else None
        else:
            inserted, end = self._ids(wanted.interruption), self._ids(wanted.end_of_thinking)
            broken = broken_rule(completion.token_ids, sampled, *wanted.thinking, inserted, end)
        if broken is not None:
            raise ProofError(
                "interruption",
                f"completion {completion.key} {broken}",
                "the run interrupts thinking at another place, with other ids, or not at all",
                _CHANGED[1],
            )

    def _inserted_too_long(self, most: int) -> bool:
        """Whether an interruption does not fit into the room that the engine's context leaves."""
        thinking = self.wanted.thinking
        return thinking is not None and thinking[0] + len(self._ids(self.wanted.interruption)) > most

    def _ids(self, text: str) -> Ids:
        if text not in self._encoded:
            self._encoded[text] = np.array(self._encode(text), np.int64)
        return self._encoded[text]

    # ---- rewards ----------------------------------------------------------------------------------------------------

    def check_reward(self, name: str, reward: float, scores: Sequence[float | None]) -> None:
        """Check that a reward (NaN: none) is the sum of the reward functions' scores with the user's weights."""
        weights = self.wanted.reward_weights
        due = weighted_sum(list(scores), weights)
        largest = weighted_sum([None if s is None else abs(s) for s in scores], tuple(map(abs, weights)))
        agrees = math.isnan(reward) if due is None else abs(reward - due) <= 1e-9 * (largest or 0.0)
        if not agrees:
            raise ProofError(
                "rewards",
                f"the reward of {name} is {reward:.6g}; its scores {list(scores)} give {due} with the user's weights "
                f"{list(weights) or 'of 1'}",
                "scores were weighted with other weights, or a missing score was taken for a number",
                "let rewards be made by the scorer alone, and set reward_weights when the config is made; "
                "otherwise this is a defect of Lockstep: report it",
            )

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def check_logps(self, found: np.ndarray, due: np.ndarray, *, single: bool) -> None:
        """Compare (n,) float64 log-probs of the loss with their definition. `single`: the head computes in float32."""
        off = np.abs(found - due)
        mean, largest = _ROUNDED if single and rounds_products(torch.float32) else _LIMITS[single]
        if len(off) and not (off.mean() <= mean and off.max() <= largest):
            at = int(np.nan_to_num(off, nan=np.inf).argmax())
            raise ProofError(
                "temperature",
                f"a drawn token has the log-prob {found[at]:.5g} in the loss; the model's own logits give "
                f"{due[at]:.5g} at the temperature {self.wanted.temperature:g} that the user has asked for "
                f"(mean difference {off.mean():.2g} nats over {len(off)} tokens)",
                "the trainer scores at another temperature or with other filters than the user has asked "
                "for. If there is no parity gap, the engine samples like this too",
                _CHANGED[1],
            )


def _same_grammar(found: str | None, wanted: Any) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return found == wanted if isinstance(wanted, str) else json.loads(found) == wanted


def _unlike(found: str) -> ProofError:
    return ProofError("settings", found, *_CHANGED)


def _wrong_limit(found: str) -> ProofError:
    return ProofError("limits", found, *_CHANGED)


@dataclass(frozen=True, slots=True)
class ExpectedSettings:
    """The settings that the trainer assumes of the engine.

    Attributes:
        model: the path or id that both programs loaded; None if the engine's machine may use another name.
        model_config: fields of the trained model's config (`contract/probe.py`).
        sampling: the distribution that the engine must sample from; None if any engine can.
        pictures: whether requests will have pictures, whose pixels the trainer has normalised.
        quantization: vLLM's name of the scheme in which the engine must hold weights in 8 bits; None: no weights.
    """

    model: str | None
    architecture: str
    dtype: torch.dtype
    head_dtype: torch.dtype
    vocab_size: int
    min_model_len: int
    model_config: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling | None = None
    pictures: bool = False
    quantization: str | None = None


def expected_settings(
    model: PreTrainedModel,
    model_path: str | None,
    dtype: torch.dtype,
    min_model_len: int,
    head_dtype: torch.dtype | None = None,
    sampling: Sampling | None = None,
    *,
    pictures: bool = False,
    quantization: str | None = None,
) -> ExpectedSettings:
    """The settings of an engine for `model` that computes in `dtype`, and its output head in `head_dtype`, if given."""
    return ExpectedSettings(
        model=model_path,
        architecture=type(causal_model(model)).__name__,
        dtype=dtype,
        head_dtype=head_dtype or dtype,
        vocab_size=embedding_rows(model),
        min_model_len=min_model_len,
        model_config=fields_of_parts(model.config.get_text_config(), model.config),
        sampling=sampling,
        pictures=pictures,
        quantization=quantization,
    )


def check_settings(expected: ExpectedSettings, actual: EngineSettings) -> None:
    """Compare both sides, and report all differences together.

    Raises:
        ProofError: a setting differs in a way that changes tokens or log-probs.
        InputError: the sampling settings name more ids than the engine can take.
    """
    if expected.sampling is not None:
        check_limits(expected.sampling, actual.request_limits)
    wrong: list[str] = []

    def must(name: str, found: object, wanted: object) -> None:
        if found != wanted:
            wrong.append(f"{name} is {found!r} in the engine, training assumes {wanted!r}")

    if expected.model is not None:
        must("model", actual.model, expected.model)
    must("architecture", actual.architecture, expected.architecture)
    must("dtype", actual.dtype, expected.dtype)
    must("head_dtype", actual.head_dtype, expected.head_dtype)
    must("vocab_size", actual.vocab_size, expected.vocab_size)
    must("logprobs_mode", actual.logprobs_mode, "processed_logprobs")
    must("quantization", actual.quantization, expected.quantization)
    if expected.pictures:
        must("mm_device_do_normalize", actual.normalises_pixels, False)
    ours, theirs = one_spelling(expected.model_config), one_spelling(actual.model_config)
    for name in sorted(expected.model_config.keys() & actual.model_config.keys()):
        if ours.get(name) != theirs.get(name):
            must(f"{name} of the model's config", actual.model_config[name], expected.model_config[name])
    must("sampling defaults", dict(actual.sampling_defaults), {})
    if expected.sampling is not None and expected.sampling.is_filtered:
        must("kept_ids (the report of what top-k, top-p and min-p keep)", actual.kept_ids, True)
    if expected.sampling is not None and expected.sampling.grammar is not None:
        must("structured_outputs", actual.structured_outputs, GRAMMAR_BACKEND)
    if actual.max_model_len < expected.min_model_len:
        wrong.append(
            f"max_model_len is {actual.max_model_len} in the engine, training needs "
            f"{expected.min_model_len} (a server: --max_model_len {expected.min_model_len})"
        )
    if wrong:
        raise ProofError(
            "handshake",
            "; ".join(wrong),
            "the engine was started with other settings, or a default of its model or version applies",
            "remove the settings named from vllm_engine_kwargs, or from the server's command line "
            "('lockstep serve' sets all of them), or give trainer and engine the same model",
        )
