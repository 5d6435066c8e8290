"""Computes the log-probs of drawn tokens from the model's own logits and what the user has asked for.

`training/step/update.py` calls it after each forward, and `parity/step/settings.py` compares. The hidden states are those of the
forward itself. The temperature, the penalties and the normalisation are those of `definitions/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.definitions.sampling import logprob
from lockstep.definitions.settings import Wanted
from lockstep.models.adapters import causal_model
from lockstep.models.logits import transformed_logits
from lockstep.models.policy import fp32_head_product
from lockstep.parity.step.settings import SettingsProof
from lockstep.training.batch.pack import Pack
from lockstep.training.batch.sequence import TrainingSequence

# Tokens of a pack that are computed again.
_DRAWN = 8


@contextmanager
def hidden_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A context that collects the last hidden states of each forward of the model."""
    found: list[torch.Tensor] = []
    handle = causal_model(model).base_model.register_forward_hook(
        lambda module, given, output: found.append(output.last_hidden_state.detach())
    )
    try:
        yield found
    finally:
        handle.remove()


@torch.no_grad()
def check_temperature(
    proof: SettingsProof,
    model: PreTrainedModel,
    pack: Pack,
    logps: torch.Tensor,
    hidden: torch.Tensor,
    *,
    fp32_head: bool,
    single: bool,
) -> None:
    """Check the log-probs of a pack at drawn tokens.

    Args:
        logps: (N,) log-probs of the pack's tokens, as the loss uses them.
        hidden: (rows, length, width) last hidden states of the forward.
        fp32_head: whether the output head computes in float32. Otherwise the caller's autocast decides.
        single: whether the output head computes in float32, for whatever reason.

    Raises:
        ProofError: they are not those of the distribution that the user has asked for.
    """
    wanted = proof.wanted
    if _has_bans(wanted) and pack.sequences[0].kept_ids is None:
        # The ids that may be sampled depend on the ids before. The trainer's own filters alone know them.
        return
    # The seed is free: it only must not depend on the values.
    drawn = np.sort(np.random.default_rng(len(logps)).permutation(len(logps))[:_DRAWN])
    places = torch.from_numpy(drawn).to(logps.device)
    head = causal_model(model).get_output_embeddings()
    rows = hidden.flatten(0, 1)[pack.predictors[places]]
    logits = fp32_head_product(head, rows) if fp32_head else head(rows)
    logits = transformed_logits(causal_model(model).config.get_text_config(), logits).float()
    logits[:, list(proof.banned)] = -torch.inf
    found = logps[places].detach().to("cpu", torch.float64).numpy()
    ends = np.cumsum([s.length for s in pack.sequences])
    due = [
        _logprob(wanted, row, pack.sequences[owner], place - (ends[owner] - pack.sequences[owner].length))
        for row, place, owner in zip(
            logits.cpu().numpy(), drawn, np.searchsorted(ends, drawn, side="right"), strict=True
        )
    ]
    proof.check_logps(found, np.array(due), single=single)


def _has_bans(wanted: Wanted) -> bool:
    return bool(wanted.bad_words or wanted.numbers["min_tokens"] or wanted.grammar is not None)


def _logprob(wanted: Wanted, logits: np.ndarray, sequence: TrainingSequence, place: int) -> float:
    """The log-prob of a sequence's sampled token `place`."""
    end = int(sequence.predictors[place]) + 1 - len(sequence.prompt_ids)
    earlier = sequence.completion_ids[:end]
    marks = np.ones(end, np.bool_) if sequence.sampled is None else sequence.sampled[:end]
    kept = sequence.kept_ids
    return logprob(
        logits,
        int(sequence.sampled_ids[place]),
        wanted.temperature,
        kept=None if kept is None else kept.part(place, place + 1).ids.tolist(),
        allowed=wanted.allowed_token_ids,
        bias=wanted.logit_bias,
        repetition=wanted.numbers["repetition_penalty"],
        presence=wanted.numbers["presence_penalty"],
        frequency=wanted.numbers["frequency_penalty"],
        # Inserted ids are context, as a prompt is.
        prompt=[*sequence.prompt_ids.tolist(), *earlier[~marks].tolist()],
        before=earlier[marks].tolist(),
    )
