"""Completions that a small sampler draws with filters, and their scores by the book: logits in double, row by row.

The sampler and the scores share one function, which applies vLLM's steps one after the other to one row of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from tiny import make_tokenizer
from transformers import PreTrainedModel

from lockstep.contract.sampling import Grammar, GrammarCompiler, Sampling
from lockstep.learn.filters import IdRules
from lockstep.learn.sequence import TrainingSequence
from lockstep.tokens.arrays import KeptIds

END, VOCABULARY = 0, 384
Allowed = Callable[[Sequence[int]], torch.Tensor]


def rules_of(sampling: Sampling) -> IdRules:
    """The trainer's rules for the tiny models."""
    grammars = GrammarCompiler(make_tokenizer(), VOCABULARY, [END]) if sampling.grammar else None
    return IdRules(sampling, VOCABULARY, (END,), grammars)


def allowed_by(grammar: Grammar | None) -> Allowed:
    """A function that gives (V,) bool: the ids that a grammar allows after some ids. It asks xgrammar id by id."""
    if grammar is None:
        return lambda ids: torch.ones(VOCABULARY, dtype=torch.bool)
    compiler = GrammarCompiler(make_tokenizer(), VOCABULARY, [END])

    def allowed(ids: Sequence[int]) -> torch.Tensor:
        state = compiler.start(grammar)
        for token in ids:
            state.accept(token)
        bits = state.mask()[0]
        return torch.tensor([bool(int(bits[i // 32]) >> (i % 32) & 1) for i in range(VOCABULARY)])

    return allowed


def processed(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int], allowed: Allowed
) -> torch.Tensor:
    """(V,) logits after all steps that depend on ids, over the temperature; −inf for ids that cannot be sampled."""
    banned = ~allowed(sampled)
    if sampling.allowed_token_ids is not None:
        banned |= ~torch.isin(torch.arange(VOCABULARY), torch.tensor(sampling.allowed_token_ids))
    for word in sampling.bad_words:
        if list(word[:-1]) == list(sampled[len(sampled) - len(word) + 1 :]) and len(sampled) >= len(word) - 1:
            banned[word[-1]] = True
    if len(sampled) < sampling.min_tokens:
        before = bool(banned[END])
        banned[END] = True
        if sampling.grammar is not None and bool(banned.all()):
            banned[END] = before
    moved = logits.clone()
    for token, bias in sampling.logit_bias:
        moved[token] = moved[token] + bias
    if sampling.repetition_penalty != 1.0:
        for token in {*prompt, *sampled}:
            up = bool(moved[token] > 0)
            moved[token] = (
                moved[token] / sampling.repetition_penalty
                if up
                else moved[token] * sampling.repetition_penalty
            )
    for token in set(sampled):
        count = list(sampled).count(token)
        moved[token] = moved[token] - sampling.frequency_penalty * count - sampling.presence_penalty
    return moved.masked_fill(banned, -torch.inf) / sampling.temperature


def kept_by(processed: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(V,) bool, the ids that min-p, top-k and top-p keep, in this order."""
    kept = processed > -torch.inf
    if sampling.min_p > 0:
        chances = processed.softmax(-1)
        kept &= chances >= sampling.min_p * chances.max()
    if sampling.top_k > 0:
        among = processed.masked_fill(~kept, -torch.inf)
        kept &= among >= among.sort(descending=True).values[min(sampling.top_k, VOCABULARY) - 1]
    if sampling.top_p < 1:
        among = processed.masked_fill(~kept, -torch.inf)
        chances, order = among.softmax(-1).sort(descending=True)
        more_likely = chances.cumsum(0) - chances
        kept &= torch.zeros_like(kept).scatter(0, order, more_likely < sampling.top_p)
    return kept


@torch.no_grad()
def draw(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> list[TrainingSequence]:
    """One completion per length for each prompt, sampled with the filters. A completion ends early at the end token."""
    generator, allowed, found = torch.Generator().manual_seed(seed), allowed_by(sampling.grammar), []
    for p, prompt in enumerate(prompts):
        for g, length in enumerate(lengths):
            sampled: list[int] = []
            sets: list[torch.Tensor] = []
            while len(sampled) < length and END not in sampled:
                logits = model(input_ids=torch.tensor([[*prompt, *sampled]]), use_cache=False).logits[0, -1]
                scores = processed(logits.double(), sampling, prompt, sampled, allowed)
                kept = kept_by(scores, sampling)
                chances = scores.masked_fill(~kept, -torch.inf).softmax(-1)
                sampled.append(int(torch.multinomial(chances, 1, generator=generator)))
                sets.append(kept.nonzero()[:, 0])
            ends = np.cumsum([len(ids) for ids in sets])
            sequence = TrainingSequence(f"{p}#{g}", prompt, sampled, np.zeros(len(sampled), np.float32))
            kept_ids = KeptIds(torch.cat(sets).numpy(), ends) if sampling.is_filtered else None
            found.append(replace(sequence, kept_ids=kept_ids))
    return found


def by_the_book(
    model: PreTrainedModel, sequences: Sequence[TrainingSequence], sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) log-probs and entropies of all sampled tokens, with gradient. Each sequence is a forward of its own.

    Inserted ids count like sampled ones. Settings for which this is wrong are refused for completions that have
    inserted ids.
    """
    logps, entropies, allowed = [], [], allowed_by(sampling.grammar)
    for s in sequences:
        prompt, ids = s.prompt_ids.tolist(), s.completion_ids.tolist()
        places = range(len(ids)) if s.sampled is None else np.flatnonzero(s.sampled).tolist()
        logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
        for t, place in enumerate(places):
            token, row = ids[place], logits[len(prompt) - 1 + place]
            scores = processed(
                row.to(torch.promote_types(row.dtype, torch.float32)), sampling, prompt, ids[:place], allowed
            )
            kept = scores > -torch.inf
            if s.kept_ids is not None:
                kept &= torch.isin(torch.arange(VOCABULARY), torch.tensor(s.kept_ids.part(t, t + 1).ids))
            among = scores[kept].log_softmax(-1)
            logps.append(among[int(kept[:token].sum())])
            entropies.append(-(among.exp() * among).sum())
    return torch.stack(logps), torch.stack(entropies)
