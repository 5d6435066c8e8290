"""Print how many tokens the draws proof needs for each fault of sampling, and how often it stops clean samples.

    make draws                                     (the packaged 135M model; a quarter of an hour on two busy cores)
    make draws ARGS="--model DIR --completions 8 --length 16"

The model samples completions of open text in fp32, with a fault in the sampler. The reported log-probs are right. The
evidence is then added up token by token, in random orders of the completions. The table gives the number of tokens
after which the proof has stopped half and 90 % of the orders. It does so for two rules: the rule of the proof
(evidence of 1e6, at any time), and a test whose number of tokens is fixed beforehand (|Z| above 4.89, with the same
chance of a false alarm). "more" means that there are too few samples. For the fault "best of two completions", pairs
are made of completions without a fault, and the likelier one is used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from lockstep.learn.token_logps import DrawSums
from lockstep.watch.draws import BETS, FALSE_ALARM, SLACK, TokenDraws, Values

_PROMPTS = (
    "The old lighthouse keeper looked out over the sea and",
    "Once there was a village at the edge of a forest where",
    "In this letter I want to tell you about the journey that",
    "The committee met on Tuesday evening to discuss how",
    "My grandmother used to say that the best bread",
    "Several explanations have been proposed for the decline of",
    "She opened the box slowly, and inside there was",
    "The first thing a visitor notices in the city is",
)
Choice = Callable[[torch.Tensor], torch.Tensor]


def _draw(p: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(p, 1)[:, 0]


def _with_temperature(temperature: float) -> Choice:
    return lambda p: _draw(p.log().div(temperature).softmax(-1))


def _top_k(k: int) -> Choice:
    return lambda p: _draw(p * (p >= p.topk(min(k, p.shape[1])).values[:, -1:]))


def _min_p(share: float) -> Choice:
    return lambda p: _draw(p * (p >= share * p.amax(-1, keepdim=True)))


def _top_p(mass: float) -> Choice:
    def choose(p: torch.Tensor) -> torch.Tensor:
        values, ids = p.sort(descending=True)
        values = values * (values.cumsum(-1) - values < mass)
        return ids.gather(1, _draw(values)[:, None])[:, 0]

    return choose


def _best_token(p: torch.Tensor) -> torch.Tensor:
    two = torch.multinomial(p, 2, replacement=True)
    return two.gather(1, p.gather(1, two).argmax(-1, keepdim=True))[:, 0]


_NO_FAULT = "nothing"
# Number of completions that are sampled together, number of tokens per prompt, and the limit of |Z| for a false alarm
# in 1e6 tests.
_BATCH, _PROMPT, _Z_LIMIT = 128, 9, 4.89
# Number of pairs of completions per completion without a fault.
_PAIRS_PER_COMPLETION = 3
# Each fault: how a token is drawn, and which share of the completions is sampled with it.
FAULTS: dict[str, tuple[Choice, float]] = {
    _NO_FAULT: (_draw, 1.0),
    "greedy": (lambda p: p.argmax(-1), 0.2),
    "best of two tokens": (_best_token, 0.2),
    "min-p 0.01": (_min_p(0.01), 0.2),
    "top-k 50": (_top_k(50), 0.2),
    "T = 1.2": (_with_temperature(1.2), 0.3),
    "top-p 0.99": (_top_p(0.99), 1.0),
    "T = 0.95": (_with_temperature(0.95), 1.0),
    "T = 1.05": (_with_temperature(1.05), 1.0),
}


@torch.no_grad()
def sampled(model: Any, prompts: list[list[int]], choose: Choice, length: int) -> TokenDraws:
    """Sample completions with a fault. All prompts have the same length. Every array is (completions, length)."""
    ids, cache = torch.tensor(prompts), None
    found = []
    for _ in range(length):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        logps = logits.log_softmax(-1)
        p = logps.exp()
        tokens = choose(p)
        means, rows = (p * logits).sum(-1), torch.arange(len(p))
        sums = DrawSums(torch.ones(len(p), dtype=torch.bool, device=p.device))
        sums.of_rows(0, rows, rows, tokens, p, logits, means)
        entropies = torch.special.entr(p).sum(-1)
        found.append(torch.stack([logps[rows, tokens], entropies, sums.variances, sums.below, sums.upto]))
        ids = tokens[:, None]
    return TokenDraws(*torch.stack(found, -1).double().numpy())


def samples_of(name: str, model: Any, prompts: list[list[int]], completions: int, length: int) -> TokenDraws:
    """Samples with one fault, or without a fault. Every array is (completions, length)."""
    choose, share = FAULTS[name]
    count, parts = max(round(completions * share), 2), []
    for start in range(0, count, _BATCH):
        batch = [prompts[i % len(prompts)] for i in range(start, min(start + _BATCH, count))]
        parts.append(sampled(model, batch, choose, length))
    return TokenDraws(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(TokenDraws)))


def better_of_two(clean: TokenDraws, generator: np.random.Generator) -> TokenDraws:
    """The likelier completion of each pair. Pairs are drawn at random from completions without a fault."""
    scores = clean.logps.sum(1)
    one, other = generator.integers(0, len(scores), (2, _PAIRS_PER_COMPLETION * len(scores)))
    chosen = np.where(scores[one] >= scores[other], one, other)
    return TokenDraws(*(getattr(clean, f.name)[chosen] for f in fields(TokenDraws)))


def log_payoffs(draws: TokenDraws) -> Values:
    """(bets, completions, length) logarithm of what each bet pays at each token, in fp32 on both sides, no gap."""
    return np.stack([bet.log_ratios(draws) for bet in BETS.values()]) - SLACK


def evidence_along(pays: Values) -> Values:
    """(tokens,) log evidence after each token. The tokens are the first generation of a run.

    Args:
        pays: (bets, tokens).
    """
    sums = pays.cumsum(1)
    return np.logaddexp(np.logaddexp.reduce(sums, axis=0) - math.log(len(sums)), 0.0) - math.log(2)


def stopping_points(
    draws: TokenDraws, orders: int, generator: np.random.Generator, *, again: bool
) -> tuple[list[float], Values]:
    """The token at which the proof stops each order of completions (inf: never), and the (orders, tokens) values of Z.

    Args:
        again: whether a completion may occur several times in one order.
    """
    pays, found, zs = log_payoffs(draws), [], []
    surprises = draws.logps + draws.entropies
    for _ in range(orders):
        count = len(draws.logps)
        order = generator.integers(0, count, count) if again else generator.permutation(count)
        over = np.flatnonzero(evidence_along(pays[:, order].reshape(len(pays), -1)) >= -math.log(FALSE_ALARM))
        found.append(float(over[0] + 1) if len(over) else math.inf)
        zs.append(surprises[order].ravel().cumsum() / np.sqrt(draws.variances[order].ravel().cumsum()))
    return found, np.array(zs)


def row(name: str, draws: TokenDraws, orders: int) -> dict[str, Any]:
    """One row of the table."""
    found, zs = stopping_points(draws, orders, np.random.default_rng(0), again=True)
    seen = np.flatnonzero((np.abs(zs) > _Z_LIMIT).mean(0) >= 0.9)
    half, most = (float(np.quantile(found, share, method="higher")) for share in (0.5, 0.9))
    fixed = float(seen[0] + 1) if len(seen) else math.inf
    print(f"{name:26}{_count(half):>9}{_count(most):>9}{_count(fixed):>12}{zs.shape[1]:>10}", flush=True)
    return {"half": half, "most": most, "fixed": fixed, "tokens": zs.shape[1]}


def _count(tokens: float) -> str:
    return "more" if math.isinf(tokens) else f"{tokens:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--completions", type=int, default=160, help="completions without a fault; obvious faults get fewer"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument(
        "--keep", type=Path, help="folder for the samples; samples that it already has are used again"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/draws.json"))
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lockstep.model_files import load_files
    from lockstep.models.resolve import resolve_model

    path = resolve_model(args.model)
    tokenizer = load_files(AutoTokenizer, path)
    model = load_files(AutoModelForCausalLM, path, dtype=torch.float32).eval()
    prompts = [tokenizer(text)["input_ids"][:_PROMPT] for text in _PROMPTS]
    torch.manual_seed(0)
    rows, clean = {}, None
    print(f"{'fault':26}{'half':>9}{'90 %':>9}{'fixed, 90 %':>12}{'sampled':>10}")
    for name in FAULTS:
        draws = _cached(
            args.keep, name, lambda n=name: samples_of(n, model, prompts, args.completions, args.length)
        )
        if name == _NO_FAULT:
            clean = draws
            continue
        rows[name] = row(name, draws, args.orders)
    assert clean is not None
    better = better_of_two(clean, np.random.default_rng(0))
    rows["best of two completions"] = row("best of two completions", better, args.orders)
    found, zs = stopping_points(clean, args.orders, np.random.default_rng(0), again=False)
    alarms = sum(not math.isinf(value) for value in found)
    print(
        f"nothing: {alarms} alarms in {args.orders} orders of {zs.shape[1]} clean tokens; Z at the end {zs[0, -1]:+.1f}"
    )
    rows[_NO_FAULT] = {"alarms": alarms, "orders": args.orders, "tokens": zs.shape[1]}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _cached(folder: Path | None, name: str, make: Callable[[], TokenDraws]) -> TokenDraws:
    if folder is None:
        return make()
    file = folder / f"{name.replace(' ', '_')}.npz"
    if file.exists():
        with np.load(file) as values:
            return TokenDraws(*(values[f.name] for f in fields(TokenDraws)))
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(file, **{f.name: getattr(made, f.name) for f in fields(TokenDraws)})
    return made


if __name__ == "__main__":
    main()
