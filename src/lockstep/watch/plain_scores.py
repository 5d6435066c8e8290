"""Scores of completions by a plain forward: one padded row per completion, no packing, no tree, no recomputation.

Finite differences are taken of them, in float64 or float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.models.adapters import causal_model
from lockstep.models.logits import transformed_logits
from lockstep.to_device import sent
from lockstep.tokens.arrays import Ids
from lockstep.watch.rescoring import sets_of_all

# Rows of logits in memory at a time, on the host and on a GPU, which holds a few copies of them in float64.
_ROWS, _ROWS_ON_GPU = 256, 64


@torch.no_grad()
def plain_scores(
    model: PreTrainedModel,
    critic: torch.nn.Module | None,
    completions: Sequence[Completion],
    distribution: Distribution,
) -> torch.Tensor:
    """(3, N) log-prob, entropy and critic's value of every sampled token, on the model's device. Without a critic the values are 0.

    Padding comes after the scored tokens, so that causal attention hides it.
    """
    inner = causal_model(model)
    paths = [[*c.prompt_ids.tolist(), *c.token_ids.tolist()[:-1]] for c in completions]
    longest = max(len(path) for path in paths)
    rows = sent(torch.tensor([path + [0] * (longest - len(path)) for path in paths]), inner.device)
    hidden = inner.base_model(input_ids=rows, use_cache=False).last_hidden_state
    places = [
        torch.from_numpy(c.sampled_places + len(c.prompt_ids) - 1) + i * longest for i, c in enumerate(completions)
    ]
    chosen = hidden.flatten(0, 1)[sent(torch.cat(places), hidden.device)]
    values = critic(chosen)[:, 0] if critic is not None else torch.zeros(len(chosen), device=hidden.device)
    found, start, size = [], 0, _ROWS if chosen.device.type == "cpu" else _ROWS_ON_GPU
    for c in completions:
        end = start + len(c.sampled_places)
        for first in range(0, end - start, size):
            own = slice(first, min(first + size, end - start))
            logits = inner.get_output_embeddings()(chosen[start:end][own])
            logits = transformed_logits(inner.config.get_text_config(), logits)
            found.append(_of_rows(c, c.sampled_places[own], logits, distribution))
        start = end
    return torch.cat([torch.cat(found, 1), values[None]])


def _of_rows(completion: Completion, places: Ids, logits: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """(2, n) log-probs and entropies of n sampled tokens of a completion, from their (n, V) logits, on the device of these.

    Filters, penalties and grammars are applied on the host.

    Args:
        places: (n,) of the tokens in the completion.
    """
    prompt, tokens = completion.prompt_ids.tolist(), completion.token_ids.tolist()
    if distribution.is_tempered_only and completion.kept_ids is None:
        logps = (logits / distribution.sampling.temperature).log_softmax(-1)
        own = sent(torch.tensor(tokens)[torch.from_numpy(places)], logits.device)
        return torch.stack([logps.gather(1, own[:, None])[:, 0], torch.special.entr(logps.exp()).sum(-1)])
    masks, sets = distribution.masks(tokens), sets_of_all(completion)
    scores = []
    for row, place in zip(logits.cpu(), places.tolist(), strict=True):
        if masks is not None:
            # The library's own operation takes no float64.
            bits = masks[place][:, None].bitwise_right_shift(torch.arange(32, dtype=torch.int32)) & 1
            row = row.masked_fill(bits.flatten()[: len(row)] == 0, -torch.inf)
        logps = distribution.logprobs(row, prompt, tokens[:place], None, sets)
        inside = logps[logps > -torch.inf]
        scores.append(torch.stack([logps[tokens[place]], -(inside.exp() * inside).sum()]))
    return sent(torch.stack(scores, 1), logits.device)
