"""Compare forward and backward over kept ids with the whole vocabulary, for the head and for the whole model.

    make filtered-head                       (two minutes)
    make filtered-head ARGS="--rows 2048"

The packaged 135M model samples 8 completions at temperature 1. Its hidden states before the sampled tokens are the
input: 512 rows. Each filter keeps the ids that it would keep in an engine. Both ways run in turn, and the smallest of
`--repeats` times counts. Both compute the gradient of the whole weight matrix of the head. "learning" is the forward
and backward of the whole model over the same completions, in one pack, as a training step computes it.
(docs/internals/methods-measured.md)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.contract.distribution import filtered
from lockstep.contract.sampling import Sampling
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.filters import IdRules
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import KeptSets, kept_logits, kept_logps, token_logps
from lockstep.model_files import load_files
from lockstep.models.resolve import resolve_model
from lockstep.tokens.arrays import KeptIds, reals

FILTERS = {
    "top_k 50": Sampling(1, top_k=50),
    "top_p 0.9": Sampling(1, top_p=0.9),
    "top_p 0.95": Sampling(1, top_p=0.95),
    "min_p 0.05": Sampling(1, min_p=0.05),
}
PROMPT = "Write a short story about a ship that is lost in a storm."
COMPLETIONS, CHUNK = 8, 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512, help="sampled tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--entropy", action="store_true", help="compute a gradient of the entropy, too")
    args = parser.parse_args()
    model, sampled, start, hidden, logits = states(args.rows)
    head = model.get_output_embeddings()
    adopt_tree_attention(model)
    print(f"{args.rows} rows, head {tuple(head.weight.shape)}, {torch.get_num_threads()} threads")
    for name, sampling in FILTERS.items():
        torch.manual_seed(0)
        kept, targets = sets(logits, sampling)
        ways = among_kept(head, hidden, kept, args.entropy), whole(head, hidden, targets, args.entropy)
        ours, theirs = fastest(ways, head, args.repeats)
        size = len(kept.ids) / args.rows
        print(
            f"{name}: {size:.0f} ids per token, {1e3 * ours:.0f} ms, whole head {1e3 * theirs:.0f} ms, "
            f"{theirs / ours:.1f} times",
            flush=True,
        )
        both = learning(model, sampled, start, kept, targets), learning(model, sampled, start, None, targets)
        ours, theirs = fastest(both, head, args.repeats)
        print(
            f"    learning: {ours:.2f} s, over the whole vocabulary {theirs:.2f} s, ratio {ours / theirs:.2f}",
            flush=True,
        )


@torch.no_grad()
def states(rows: int) -> tuple[Any, torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """The model, its completions, their start; per sampled token, hidden state (rows, width), logits (rows, V)."""
    path = resolve_model("smollm2-135m-instruct")
    model, tokenizer = (
        load_files(AutoModelForCausalLM, path, dtype=torch.float32),
        load_files(AutoTokenizer, path),
    )
    messages = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt = ids["input_ids"]
    torch.manual_seed(0)
    count = rows // COMPLETIONS
    sampled = model.generate(
        prompt.repeat(COMPLETIONS, 1),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        min_new_tokens=count,
        max_new_tokens=count,
    )
    hidden = model.base_model(input_ids=sampled).last_hidden_state[:, prompt.shape[1] - 1 : -1].flatten(0, 1)
    return model, sampled, prompt.shape[1], hidden.clone(), model.get_output_embeddings()(hidden)


def sets(logits: torch.Tensor, sampling: Sampling) -> tuple[KeptSets, torch.Tensor]:
    """The kept ids of each row, and (rows,) ids that are drawn from them."""
    scores = filtered(logits.clone(), sampling)
    targets = torch.multinomial(scores.softmax(-1), 1)[:, 0]
    kept = scores > -torch.inf
    found = KeptIds(kept.nonzero()[:, 1].numpy(), np.cumsum(kept.sum(1).numpy()))
    return KeptSets.of(found, targets.numpy(), torch.device("cpu")), targets


Way = Callable[[], torch.Tensor]


def among_kept(head: torch.nn.Linear, hidden: torch.Tensor, kept: KeptSets, entropy: bool) -> Way:
    def loss() -> torch.Tensor:
        logits = kept_logits(head, head, hidden.requires_grad_(), kept, chunk_size=CHUNK, fp32_head=False)
        logps, entropies = kept_logps(logits, kept, 1.0, entropy_gradient=entropy)
        return logps.sum() + (entropies.sum() if entropy else 0.0)

    return loss


def whole(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, entropy: bool) -> Way:
    def loss() -> torch.Tensor:
        logps, entropies = token_logps(
            head,
            hidden.requires_grad_(),
            torch.arange(len(hidden)),
            targets,
            temperature=1.0,
            chunk_size=CHUNK,
            entropy_gradient=entropy,
        )
        return logps.sum() + (entropies.sum() if entropy else 0.0)

    return loss


def learning(
    model: Any, sampled: torch.Tensor, start: int, kept: KeptSets | None, targets: torch.Tensor
) -> Way:
    """Learning with the whole model: over the sampled ids, or with kept sets over ids drawn from these sets."""
    length, sequences = sampled.shape[1] - start, []
    for i, row in enumerate(sampled.numpy()):
        own = slice(i * length, (i + 1) * length)
        ids, sets = row[start:], None
        if kept is not None:
            ids, sets = targets[own].numpy(), kept.host.part(own.start, own.stop)
        sequences.append(TrainingSequence(str(i), row[:start], ids, reals([0.0] * length), kept_ids=sets))
    (pack,) = pack_sequences(sequences, 10**6)
    rules = None if kept is None else IdRules(Sampling(1, top_k=1), len(model.get_output_embeddings().weight))

    def loss() -> torch.Tensor:
        return score_pack(model, pack, 1.0, CHUNK, rules=rules).logps.sum()

    return loss


def fastest(ways: tuple[Way, Way], head: torch.nn.Linear, repeats: int) -> list[float]:
    """The smallest number of seconds that forward and backward take, for each way."""
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for place, loss in enumerate(ways):
            head.weight.grad = None
            begun = time.perf_counter()
            loss().backward()
            best[place] = min(best[place], time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    main()
