"""From logits to the distribution that a request samples from, one row at a time, in vLLM's order of steps.

Where transformers has a logits processor for a step, this module uses it. The order is that of vLLM's class `Sampler`
(0.32.0):

1. grammar, 2. allowed ids, 3. bad words, 4. minimum length, 5. logit bias, 6. penalties: repetition, then frequency
   and presence,
7. temperature, 8. min-p, 9. top-k, 10. top-p.

Steps 1 to 6 depend on the ids alone (`shaped_logits`). Steps 8 to 10 depend on the logits (`filtered`).

A proof scores completions under a `Distribution`. If a gap fails, the `others`, which an engine may have used by
mistake, are tried. The one that makes the gap vanish says which setting only one side has applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lockstep.contract.sampling import GrammarCompiler, Sampling, apply_mask
from lockstep.tokens.arrays import KeptIds


def processed_logprobs(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    end_ids: Sequence[int] = (),
    grammar_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probs of the sampling distribution.

    Args:
        logits: (V,) raw logits of the next token.
        sampling: the request's settings.
        prompt_ids: ids before the completion. Only the repetition penalty uses them.
        output_ids: ids sampled so far.
        end_ids: ids that end a completion. Only the minimum length uses them.
        grammar_mask: (1, ⌈V / 32⌉) int32 mask of the ids that the request's grammar allows next
            (`contract/sampling.py`).

    Returns:
        (V,) float32 log-probs, −inf outside the support.
    """
    scores = shaped_logits(
        logits, sampling, prompt_ids, output_ids, end_ids=end_ids, grammar_mask=grammar_mask
    )
    if sampling.temperature != 1.0:
        scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    return filtered(scores, sampling)[0].log_softmax(-1)


def shaped_logits(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    end_ids: Sequence[int] = (),
    grammar_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """(1, V) float32 logits after all steps that depend on the ids alone; arguments as in `processed_logprobs`."""
    scores = logits.to(torch.float32, copy=True).unsqueeze(0)
    if grammar_mask is not None:
        apply_mask(scores, grammar_mask)
    if sampling.allowed_token_ids is not None:
        others = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
        others[list(sampling.allowed_token_ids)] = False
        scores[:, others] = -torch.inf
    scores[:, banned_ids(sampling, output_ids)] = -torch.inf
    if len(output_ids) < sampling.min_tokens:
        _forbid_end(scores, end_ids, with_grammar=grammar_mask is not None)
    if sampling.logit_bias:
        places, values = zip(*sampling.logit_bias, strict=True)
        scores[:, list(places)] += torch.tensor(values, dtype=torch.float32, device=scores.device)
    return _penalised(scores, sampling, prompt_ids, output_ids)


def banned_ids(sampling: Sampling, output_ids: Sequence[int]) -> list[int]:
    """Ids that would now complete one of the bad words. Only ids of the completion count."""
    banned = []
    for word in sampling.bad_words:
        prefix_length = len(word) - 1
        if list(output_ids[len(output_ids) - prefix_length :]) == list(word[:-1]):
            banned.append(word[-1])
    return banned


def filtered(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Apply min-p, top-k and top-p to logits.

    Args:
        scores: (rows, V) logits, already divided by the temperature.

    Returns:
        (rows, V) logits, −inf at the ids that a filter removes.
    """
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores


def _forbid_end(scores: torch.Tensor, end_ids: Sequence[int], *, with_grammar: bool) -> None:
    """Exclude the end tokens. If a grammar allows nothing else, they stay allowed, as in vLLM."""
    ids = list(end_ids)
    before = scores[:, ids]
    scores[:, ids] = -torch.inf
    if with_grammar and bool(torch.isneginf(scores).all()):
        scores[:, ids] = before


def _penalised(
    scores: torch.Tensor, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> torch.Tensor:
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor([[*prompt_ids, *output_ids]], dtype=torch.long, device=scores.device)
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    if (sampling.frequency_penalty or sampling.presence_penalty) and len(output_ids):
        output = torch.tensor([*output_ids], dtype=torch.long, device=scores.device)
        counts = torch.bincount(output, minlength=scores.shape[1]).float()
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return scores


@dataclass(frozen=True, slots=True)
class Distribution:
    """Sampling settings, and what their steps need.

    Attributes:
        sampling: the settings.
        end_ids: ids that end a completion.
        grammars: compiles the grammar of `sampling`, if there is one.
        penalised: the ids that penalties count. `vllm`: the repetition penalty counts prompt and completion, the
            others count the completion. `completion`: all count the completion alone. `all`: all count prompt and
            completion.
    """

    sampling: Sampling
    end_ids: tuple[int, ...] = ()
    grammars: GrammarCompiler | None = None
    penalised: Literal["vllm", "completion", "all"] = "vllm"

    @property
    def is_tempered_only(self) -> bool:
        """Whether only the temperature shapes the logits, so that all tokens of a completion can be scored at once."""
        own = self.sampling
        same = {"stop": own.stop, "max_kept_ids": own.max_kept_ids, "end_ids": own.end_ids}
        return own == Sampling(own.max_tokens, own.temperature, **same)  # type: ignore[arg-type]

    def masks(self, token_ids: Sequence[int]) -> torch.Tensor | None:
        """(N, ⌈V / 32⌉) masks of the grammar for a completion; None without a grammar."""
        if self.sampling.grammar is None or self.grammars is None:
            return None
        return self.grammars.masks(self.sampling.grammar, token_ids)

    def logprobs(
        self,
        logits: torch.Tensor,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        masks: torch.Tensor | None = None,
        kept: KeptIds | None = None,
    ) -> torch.Tensor:
        """(V,) log-probs of the next token, −inf outside the support.

        Args:
            logits: (V,) raw logits.
            output_ids: ids sampled so far.
            masks: the masks of the whole completion.
            kept: the sets of the whole completion. The token is scored among its set, and the filters are not applied
                again.
        """
        place = len(output_ids)
        shaped = self.shaped(logits, prompt_ids, output_ids, masks)
        if kept is None:
            return filtered(shaped, self.sampling)[0].log_softmax(-1)
        outside = torch.ones_like(shaped[0], dtype=torch.bool)
        outside[torch.from_numpy(kept.part(place, place + 1).ids.astype(np.int64)).to(outside.device)] = False
        return shaped[0].masked_fill(outside, -torch.inf).log_softmax(-1)

    def shaped(
        self,
        logits: torch.Tensor,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(1, V) logits after all steps that depend on ids, divided by the temperature; arguments as in `logprobs`."""
        place = len(output_ids)
        counted = (prompt_ids, output_ids)
        if self.penalised == "completion":
            counted = ([], output_ids)
        elif self.penalised == "all":
            counted = ([], [*prompt_ids, *output_ids])
        mask = None if masks is None else masks[place : place + 1]
        shaped = shaped_logits(logits, self.sampling, *counted, end_ids=self.end_ids, grammar_mask=mask)
        return shaped / self.sampling.temperature

    def others(self) -> dict[str, Distribution]:
        """The distributions of engines that leave a setting out, or count other ids, by name."""
        sampling = self.sampling
        same = {"stop": sampling.stop, "max_kept_ids": sampling.max_kept_ids, "end_ids": sampling.end_ids}
        plain = Sampling(sampling.max_tokens, **same)  # type: ignore[arg-type]
        found: dict[str, Distribution] = {}
        bans = {"bad_words": (), "allowed_token_ids": None, "min_tokens": 0}
        settings = {
            "top_k, top_p and min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
            "the grammar": {"grammar": None},
            "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            "logit_bias": {"logit_bias": ()},
            "bad_words, allowed_token_ids and min_tokens": bans,
        }
        for name, neutral in settings.items():
            other = replace(sampling, **neutral)  # type: ignore[arg-type]
            if other != sampling:
                found[f"a distribution without {name}"] = replace(self, sampling=other)
        if sampling.repetition_penalty != 1.0:
            without = replace(self, penalised="completion")
            found["a distribution whose repetition_penalty does not count the prompt"] = without
        if sampling.presence_penalty or sampling.frequency_penalty:
            found["a distribution whose penalties count the prompt"] = replace(self, penalised="all")
        if plain != sampling and plain not in [other.sampling for other in found.values()]:
            found["the raw distribution"] = replace(self, sampling=plain)
        return found
