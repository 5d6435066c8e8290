"""Print how many tokens the draws proof needs for each fault of sampling, and how often it stops clean samples.

    make draws                                     (the packaged 135M model; a quarter of an hour on two busy cores)
    make draws ARGS="--model DIR --completions 8 --length 16"

The model samples completions of open text in fp32, with a fault in the sampler. The reported log-probs are right. Open
text does not end, so the full stop stands for the end token: completions go on after it. The evidence is then added up
token by token, in random orders of the completions. The table gives the number of tokens after which the proof has
stopped half and 90 % of the orders. It does so for two rules: the rule of the proof (evidence of 1e6, at any time), and
a test whose number of tokens is fixed beforehand (|Z| above 4.89, with the same chance of a false alarm). "more" means
that there are too few samples. For the fault "best of two completions", pairs are made of completions without a fault,
and the likelier one is used.
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

from lockstep.learn.id_classes import Classes, ClassValues, TokenClasses
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import DrawSums
from lockstep.watch.draws import BETS, FALSE_ALARM, SHARES, SLACK, TokenDraws, Values

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
# Draws a token from (B, V) probabilities, given the (B, t) ids so far.
Choice = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _draw(p: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    return torch.multinomial(p, 1)[:, 0]


def _with_temperature(temperature: float) -> Choice:
    return lambda p, ids: _draw(p.log().div(temperature).softmax(-1))


def _top_k(k: int) -> Choice:
    return lambda p, ids: _draw(p * (p >= p.topk(min(k, p.shape[1])).values[:, -1:]))


def _min_p(share: float) -> Choice:
    return lambda p, ids: _draw(p * (p >= share * p.amax(-1, keepdim=True)))


def _top_p(mass: float) -> Choice:
    def choose(p: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        values, ids = p.sort(descending=True)
        values = values * (values.cumsum(-1) - values < mass)
        return ids.gather(1, _draw(values)[:, None])[:, 0]

    return choose


def _best_token(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    two = torch.multinomial(p, 2, replacement=True)
    return two.gather(1, p.gather(1, two).argmax(-1, keepdim=True))[:, 0]


def _times(factor: float, chosen: Callable[[int], Any]) -> Choice:
    """The odds of some ids are multiplied; `chosen` gives them for a size of the vocabulary."""

    def choose(p: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        changed = p.clone()
        changed[:, chosen(p.shape[1])] *= factor
        return _draw(changed)

    return choose


def _seen_times(factor: float) -> Choice:
    """The odds of the ids that the completion has already are multiplied."""

    def choose(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros_like(p, dtype=torch.bool).scatter_(1, ids[:, _PROMPT:], True)
        return _draw(torch.where(seen, factor * p, p))

    return choose


def _never_again(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return _draw(p.scatter(1, ids[:, -1:], 0.0))


def _first_is_greedy(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return p.argmax(-1) if ids.shape[1] == _PROMPT else _draw(p)


_NO_FAULT, _END = "nothing", 30
# Number of completions that are sampled together, number that are scored together, number of tokens per prompt, and the
# limit of |Z| for a false alarm in 1e6 tests.
_BATCH, _SCORED, _PROMPT, _Z_LIMIT = 128, 4, 9, 4.89
# Number of pairs of completions per completion without a fault.
_PAIRS_PER_COMPLETION = 3
# Each fault: how a token is drawn, and which share of the completions is sampled with it.
FAULTS: dict[str, tuple[Choice, float]] = {
    _NO_FAULT: (_draw, 1.0),
    "greedy": (lambda p, ids: p.argmax(-1), 0.2),
    "best of two tokens": (_best_token, 0.2),
    "min-p 0.01": (_min_p(0.01), 0.2),
    "top-k 50": (_top_k(50), 0.2),
    "T = 1.2": (_with_temperature(1.2), 0.3),
    "top-p 0.99": (_top_p(0.99), 1.0),
    "T = 0.95": (_with_temperature(0.95), 1.0),
    "T = 1.05": (_with_temperature(1.05), 1.0),
    "the end, never": (_times(0.0, lambda count: [_END]), 0.6),
    "the end, odds × 3": (_times(3.0, lambda count: [_END]), 0.4),
    "the end, odds × 1.5": (_times(1.5, lambda count: [_END]), 1.0),
    "no id twice": (_seen_times(0.0), 0.2),
    "seen ids, odds × 0.5": (_seen_times(0.5), 0.5),
    "seen ids, odds × 0.8": (_seen_times(0.8), 1.0),
    "no id twice in a row": (_never_again, 0.6),
    "without the 3rd eighth": (_times(0.0, lambda count: slice(count // 4, count * 3 // 8)), 0.5),
    "without id % 8 = 3": (_times(0.0, lambda count: slice(3, None, 8)), 0.5),
    "without id % 7 = 3": (_times(0.0, lambda count: slice(3, None, 7)), 0.5),
    "id % 8 = 3, odds × 0.5": (_times(0.5, lambda count: slice(3, None, 8)), 1.0),
    "greedy first token": (_first_is_greedy, 0.5),
}


@torch.no_grad()
def sampled(model: Any, prompts: list[list[int]], choose: Choice, length: int) -> TokenDraws:
    """Sample completions with a fault. All prompts have the same length. Every array is (completions, length)."""
    ids, cache = torch.tensor(prompts), None
    for place in range(length):
        new = ids if not place else ids[:, -1:]
        out = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        ids = torch.cat([ids, choose(out.logits[:, -1].float().softmax(-1), ids)[:, None]], 1)
    parts = [_scored(model, few) for few in ids.split(_SCORED)]
    found = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(TokenDraws)[:-1]}
    return TokenDraws(**found, classes=_joined([p.classes for p in parts if p.classes is not None]))


def _joined(parts: list[ClassValues]) -> ClassValues:
    return ClassValues(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(ClassValues)))


def _scored(model: Any, ids: torch.Tensor) -> TokenDraws:
    """What a forward says of the tokens of a few completions."""
    count, length = len(ids), ids.shape[1] - _PROMPT
    logits = model(input_ids=ids[:, :-1]).logits[:, _PROMPT - 1 :].float().flatten(0, 1)
    own = [
        TrainingSequence("", row[:_PROMPT].numpy(), row[_PROMPT:].numpy(), np.zeros(length)) for row in ids
    ]
    rows, tokens, logps = torch.arange(count * length), ids[:, _PROMPT:].flatten(), logits.log_softmax(-1)
    p = logps.exp()
    sums = DrawSums(torch.ones(len(rows), dtype=torch.bool), classes=TokenClasses(Classes((_END,)), own))
    sums.of_rows(0, rows, rows, tokens, p, logits, (p * logits).sum(-1))
    columns = logps[rows, tokens], torch.special.entr(p).sum(-1), sums.variances, sums.below, sums.upto
    assert sums.classes is not None
    values = sums.classes.values(sums.classes.masses)
    classes = ClassValues(*(a.reshape(count, length, *a.shape[1:]) for a in vars_of(values)))
    return TokenDraws(*torch.stack(columns).view(-1, count, length).double().numpy(), classes=classes)


def vars_of(values: ClassValues) -> list[Any]:
    """The arrays of some classes."""
    return [getattr(values, f.name) for f in fields(ClassValues)]


def samples_of(name: str, model: Any, prompts: list[list[int]], completions: int, length: int) -> TokenDraws:
    """Samples with one fault, or without a fault. Every array is (completions, length)."""
    choose, share = FAULTS[name]
    count, parts = max(round(completions * share), 2), []
    for start in range(0, count, _BATCH):
        batch = [prompts[i % len(prompts)] for i in range(start, min(start + _BATCH, count))]
        parts.append(sampled(model, batch, choose, length))
    found = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(TokenDraws)[:-1]}
    return TokenDraws(**found, classes=_joined([p.classes for p in parts if p.classes is not None]))


def better_of_two(clean: TokenDraws, generator: np.random.Generator) -> TokenDraws:
    """The likelier completion of each pair. Pairs are drawn at random from completions without a fault."""
    scores = clean.logps.sum(1)
    one, other = generator.integers(0, len(scores), (2, _PAIRS_PER_COMPLETION * len(scores)))
    chosen = np.where(scores[one] >= scores[other], one, other)
    found = {f.name: getattr(clean, f.name)[chosen] for f in fields(TokenDraws)[:-1]}
    return TokenDraws(**found, classes=None if clean.classes is None else clean.classes.part(chosen))


def log_payoffs(draws: TokenDraws) -> Values:
    """(bets, completions, length) logarithm of what each bet pays at each token, in fp32 on both sides, no gap."""
    return np.stack([bet.log_ratios(draws) for bet in BETS.values()]) - SLACK


def evidence_along(pays: Values) -> Values:
    """(tokens,) log evidence after each token. The tokens are the first generation of a run.

    Args:
        pays: (bets, tokens).
    """
    held = pays.cumsum(1) + np.array([SHARES[name] for name in BETS])[:, None]
    return np.logaddexp(np.logaddexp.reduce(held, axis=0), 0.0) - math.log(2)


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
        "--only", nargs="*", default=[""], help="only the faults whose name contains one of these"
    )
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
    for name in (name for name in FAULTS if name == _NO_FAULT or any(w in name for w in args.only)):
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
            classes = ClassValues(*(values[f.name] for f in fields(ClassValues)))
            return TokenDraws(*(values[f.name] for f in fields(TokenDraws)[:-1]), classes=classes)
    made = make()
    assert made.classes is not None
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f.name: getattr(made, f.name) for f in fields(TokenDraws)[:-1]}
    np.savez(file, **arrays, **{f.name: getattr(made.classes, f.name) for f in fields(ClassValues)})
    return made


if __name__ == "__main__":
    main()
