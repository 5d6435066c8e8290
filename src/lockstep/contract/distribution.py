"""A sampling distribution as a proof scores it, and the distributions that an engine may have used by mistake.

A proof scores completions under a distribution. If a gap fails, the others are tried. The one that makes the gap
vanish says which setting only one side has applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from lockstep.contract.filters import filtered, shaped_logits
from lockstep.contract.grammars import GrammarCompiler
from lockstep.contract.sampling import Sampling
from lockstep.tokens.kept_ids import KeptIds


@dataclass(frozen=True, slots=True)
class Distribution:
    """Sampling settings, and what their steps need.

    Attributes:
        sampling: the settings.
        end_ids: ids that end a completion.
        grammars: compiles the grammar of `sampling`, if there is one.
        penalised: the ids that penalties count. `vllm`: the repetition penalty counts prompt and completion, the others count the
            completion. `completion`: all count the completion alone. `all`: all count prompt and completion.
    """

    sampling: Sampling
    end_ids: tuple[int, ...] = ()
    grammars: GrammarCompiler | None = None
    penalised: Literal["vllm", "completion", "all"] = "vllm"

    @property
    def is_tempered_only(self) -> bool:
        """Whether nothing but the temperature shapes the logits. Then all tokens of a completion can be scored at once."""
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
            kept: the sets of the whole completion. The token is scored among its set, and the filters are not applied again.
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
        """(1, V) logits after all steps that depend on ids, divided by the temperature. The arguments are those of `logprobs`."""
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
        settings = {
            "top_k, top_p and min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
            "the grammar": {"grammar": None},
            "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            "logit_bias": {"logit_bias": ()},
            "bad_words, allowed_token_ids and min_tokens": {
                "bad_words": (),
                "allowed_token_ids": None,
                "min_tokens": 0,
            },
        }
        for name, neutral in settings.items():
            other = replace(sampling, **neutral)  # type: ignore[arg-type]
            if other != sampling:
                found[f"a distribution without {name}"] = replace(self, sampling=other)
        if sampling.repetition_penalty != 1.0:
            found["a distribution whose repetition_penalty does not count the prompt"] = replace(
                self, penalised="completion"
            )
        if sampling.presence_penalty or sampling.frequency_penalty:
            found["a distribution whose penalties count the prompt"] = replace(self, penalised="all")
        if plain != sampling and plain not in [other.sampling for other in found.values()]:
            found["the raw distribution"] = replace(self, sampling=plain)
        return found
