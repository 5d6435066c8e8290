"""Random generations, and the comparison of their loss and gradients with `reference_methods.py`.

Used by: `test_methods.py` (double precision, many shapes), `test_methods_in_fp32.py` (the precision of a run) and
`test_methods_in_rows.py` (models that get one row per completion).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import reference_methods as plain
import torch
from blocks import small_blocks
from hypothesis import assume
from hypothesis import strategies as st
from reference import Tree, branches_of, sampled_places
from reference_methods import Drawn
from subjects import Subject

from lockstep import OnlineDPOConfig
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.extras.verify.logprob_checks import Unwatched
from lockstep.learn import recomputation
from lockstep.learn.generation import prepare_generation, score_all, sequences_of
from lockstep.learn.methods.objective import Objective
from lockstep.learn.scoring import why_plain_rows
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy, StepSums, learn
from lockstep.models.adapters import causal_model
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.watch.evidence import TokenEvidence

# Gives the scalar loss of one optimizer step by the reference.
ReferenceLoss = Callable[[Subject, Drawn, slice], torch.Tensor]
# No bound of a ratio, or of a mean of up to nine ratios, is a multiple of this value. At a bound, rounding would
# decide.
GRID = 0.0613
# The values per token of a drawn sequence.
COLUMNS = ("old_logps", "behaviour_logps", "ref_logps", "values", "entropies")


@contextlib.contextmanager
def attending_by_trees() -> Iterator[None]:
    """Small packs use tree attention too, like long packs."""
    with small_blocks():
        yield


@st.composite
def shapes(draw: st.DrawFn, sizes: tuple[int, ...] = (2, 4, 8), *, trees: bool = False) -> dict[str, Any]:
    """The shape of a generation: steps × micro-batches × groups, lengths, rewards, and where packs are cut.

    Args:
        trees: whether some rollouts have two branches.
    """
    size = draw(st.sampled_from(sizes))
    steps, micro = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    groups = steps * micro * draw(st.integers(1, 2))
    count = groups * size
    rewards = [
        # There are few values, so that some groups have equal rewards and some pairs are ties.
        draw(st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5, None]), min_size=size, max_size=size))
        for _ in range(groups)
    ]
    if all(reward is None for group in rewards for reward in group):
        rewards[0][0] = 1.0
    # Which of its sampled tokens is the first of a rollout's second branch, and how many ids the two branches share
    # then.
    forks = st.none() | st.tuples(st.integers(1, 8), st.integers(0, 9))
    return {
        "forks": draw(st.lists(forks if trees else st.none(), min_size=count, max_size=count)),
        "size": size,
        "steps": steps,
        "micro": micro,
        "rewards": rewards,
        "lengths": draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        # The token of each completion before which text is inserted.
        "holes": draw(
            st.lists(st.just([]) | st.lists(st.integers(0, 9), max_size=4), min_size=count, max_size=count)
        ),
        "cut": draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        "prompts": draw(st.lists(st.integers(1, 12), min_size=groups, max_size=groups)),
        "moved": draw(st.booleans()),
        # Whether a pass before the first step has computed the log-probs; then tokens without a gradient need no
        # other pass.
        "scored": draw(st.booleans()),
        "budget": draw(st.integers(1, 200)),
        "chunk": draw(st.integers(1, 40)),
        # Recomputation doubles the time of a small step, and no method knows of it (`test_recomputation.py`).
        "recomputed": draw(st.sampled_from((False, False, False, True))),
        "seed": draw(st.integers(0, 10**6)),
    }


@contextlib.contextmanager
def everything_kept() -> Iterator[None]:
    """Without selective recomputation: forwards keep everything for the backward."""
    with mock.patch.object(recomputation, "outermost", return_value=()):
        yield


def single(values: torch.Tensor) -> tuple[float, ...]:
    """The values in float32, as the loss gets them."""
    return tuple(values.float().tolist())


def drawn_of(subject: Subject, shape: dict[str, Any], temperature: float) -> Drawn:
    """A generation of a shape. No model has sampled it: its tokens are random.

    Args:
        shape: from `shapes`; may also have `anew` (see `Drawn`).
    """
    generator = torch.Generator().manual_seed(shape["seed"])

    def ids(count: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, high, (count,), generator=generator).tolist())

    sequences, lengths, holes = [], iter(shape["lengths"]), iter(shape["holes"])
    for g, length in enumerate(shape["prompts"]):
        prompt = (5, 6, *ids(length, 60))
        for i in range(shape["size"]):
            # There are few distinct tokens, so that branches share beginnings.
            sampled = [True] * next(lengths)
            for place in next(holes):
                sampled.insert(place, False)
            mask = None if all(sampled) else tuple(sampled)
            sequences.append(TrainingSequence(f"p{g}#{i}", prompt, ids(len(sampled), 9), (), sampled=mask))
    for i, fork in enumerate(shape.get("forks", ())):
        sequences[i] = forked(sequences[i], fork, ids(3, 60))
    with torch.no_grad():
        rows = plain.padded(subject.exact_model, sequences, temperature).logps

    def noise(count: int, scale: float) -> torch.Tensor:
        return GRID * (scale / GRID * torch.randn(count, generator=generator, dtype=torch.float64)).round()

    known = []
    for s, row in zip(sequences, rows, strict=True):
        count = len(sampled_places(s))
        old = row[:count] + (noise(count, 0.25) if shape["moved"] else 0.0)
        known.append(
            replace(
                s,
                old_logps=single(old),
                behaviour_logps=single(old + noise(count, 0.4)),
                ref_logps=single(row[:count] + noise(count, 0.5)),
                values=single(noise(count, 1.0)),
                entropies=single(noise(count, 1.0)) if shape["scored"] else None,
            )
        )
    return Drawn(known, shape["rewards"], shape["cut"], shape["moved"], shape.get("anew", False))


def forked(
    sequence: TrainingSequence, fork: tuple[int, int] | None, other: tuple[int, ...]
) -> TrainingSequence:
    """The rollout as a tree of two branches, if it has a token for each.

    The second branch has the tokens from a place on.

    Args:
        fork: that place among the sampled tokens, and the largest number of completion ids that both branches have.
        other: ids that stand between the shared ids and the second branch's first token.
    """
    places = sampled_places(sequence)
    if fork is None or fork[0] >= len(places):
        return sequence
    cut, ids = places[fork[0]], sequence.completion_ids.tolist()
    mask = (True,) * len(ids) if sequence.sampled is None else tuple(sequence.sampled.tolist())
    prompt, name = sequence.prompt_ids.tolist(), sequence.name
    parts = (
        (name, prompt, slice(0, cut)),
        (f"{name}.1", [*prompt, *ids[: min(fork[1], cut)], *other], slice(cut, None)),
    )
    branches = tuple(
        TrainingSequence(
            own, before, ids[part], (), sampled=None if all(mask[part]) else mask[part], rollout=name
        )
        for own, before, part in parts
    )
    return Tree(name, (), [ids[place] for place in places], (), branches=branches)


def flat(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The sequences that the fast path gets: one per branch, with the columns of its own tokens."""
    found = []
    for s in sequences:
        start = 0
        for branch in branches_of(s):
            own = slice(start, start + branch.length)
            columns = {n: v[own] for n in COLUMNS if (v := getattr(s, n)) is not None}
            found.append(replace(branch, **columns) if isinstance(s, Tree) else s)
            start += branch.length
    return found


def groups_of(drawn: Drawn) -> list[RolloutGroup]:
    """The same generation in the form that engine and reward functions give."""
    sequences, cut = iter(drawn.sequences), iter(drawn.cut)
    groups = []
    for g, rewards in enumerate(drawn.rewards):
        rollouts = []
        for i, reward in enumerate(rewards):
            branches = flat([next(sequences)])
            reason = "length" if next(cut) else "stop"
            key = RequestKey(f"p{g}", i)
            found = [completion_of(branch, key._replace(call=n), reason) for n, branch in enumerate(branches)]
            scores = {"first": reward, "second": plain.second_score(reward)}
            given = math.nan if reward is None else reward
            rollouts.append(Rollout(found[0], f"text {g} {i}", scores, given, further=tuple(found[1:])))
        groups.append(RolloutGroup(Prompt(f"p{g}", found[0].prompt_ids, "text"), tuple(rollouts)))
    return groups


def completion_of(s: TrainingSequence, key: RequestKey, reason: str) -> Completion:
    n, own = len(s.completion_ids), iter(s.behaviour_logps)
    logps = tuple(next(own) if s.sampled is None or s.sampled[place] else 0.0 for place in range(n))
    return Completion(key, s.prompt_ids, s.completion_ids, logps, (0,) * n, reason, s.sampled)  # type: ignore[arg-type]


def config(kind: type, shape: dict[str, Any], **fields: Any) -> Any:
    """A method's configuration for a shape."""
    completions = len(shape["lengths"])
    parts = shape["steps"] * shape["micro"]
    base: dict[str, Any] = {"output_dir": "unused", "bf16": False, "report_to": []}
    base |= {"token_budget": shape["budget"], "logits_chunk_size": shape["chunk"], "temperature": 0.8}
    base |= {"gradient_accumulation_steps": shape["micro"], "save_strategy": "no"}
    if kind is OnlineDPOConfig:
        base |= {"per_device_train_batch_size": completions // shape["micro"] // 2}
    else:
        base |= {"per_device_train_batch_size": completions // parts, "num_generations": shape["size"]}
        base |= {"steps_per_generation": parts, "max_completion_length": max(9, *shape["lengths"])}
    return kind(**{**base, **fields})


def gradients(*parts: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by parameter in double precision; the parameters' own gradients are then deleted."""
    found = {}
    for i, part in enumerate(parts):
        for name, p in part.named_parameters():
            found[f"{i}.{name}"] = (p.grad.clone() if p.grad is not None else torch.zeros_like(p)).double()
        part.zero_grad()
    return found


def learned_by(
    reference: ReferenceLoss, subject: Subject, drawn: Drawn, step: slice
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step by the reference, and its gradients."""
    loss = reference(subject, drawn, step)
    loss.backward()
    return loss.item(), gradients(*subject.exact_parts)


def assert_same(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    subject: Subject,
    leeway: dict[str, float],
) -> None:
    """Assert that gradients are equal within the subject's tolerances plus the leeway of each."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    differences = {name: float((found[name] - gradient).norm()) for name, gradient in expected.items()}
    largest, whole, difference = (
        max(norms.values()),
        math.hypot(*norms.values()),
        math.hypot(*differences.values()),
    )
    assert difference <= subject.relative * whole + math.hypot(*leeway.values()) + 1e-9, (difference, whole)
    for name, norm in norms.items():
        allowed = subject.relative * norm + subject.floor * largest + leeway[name] + 1e-9
        assert differences[name] <= allowed, (name, differences[name], norm, largest)


def check(
    subject: Subject,
    objective: Objective[Any],
    shape: dict[str, Any],
    reference: ReferenceLoss,
    *,
    drawn: Drawn | None = None,
    groups: list[RolloutGroup] | None = None,
) -> list[dict[str, float]]:
    """Compare loss and gradients of each optimizer step; return the logs of the steps."""
    run = objective.config
    # Delete gradients that an earlier, failed comparison may have left.
    gradients(*subject.parts, *subject.exact_parts)
    drawn = drawn or drawn_of(subject, shape, run.temperature)
    groups = groups or groups_of(drawn)
    scores = dict.fromkeys(("old_logps", "ref_logps", "values", "entropies"))
    given = flat(drawn.sequences)
    assert sequences_of(groups, 0) == [replace(s, **scores) for s in given]
    generation = prepare_generation(groups, objective, 0, given)
    assert generation.sampled_tokens == sum(shape["lengths"])
    if not drawn.moved:
        generation = generation.changed(
            lambda s: s if shape["scored"] and not objective.has_gradient(s) else replace(s, old_logps=None)
        )
    model = causal_model(subject.model)
    rows = why_plain_rows(model, max(len(s.prompt_ids) + len(s.completion_ids) for s in given)) is not None
    policy = Policy(model, contextlib.nullcontext, lambda loss: loss.backward(), subject.critic, rows)
    kept = contextlib.nullcontext if shape.get("recomputed", True) else everything_kept
    logged, size = [], run.completions_per_step
    for step in range(len(drawn.sequences) // size):
        part = slice(step * size, (step + 1) * size)
        expected_loss, expected = learned_by(reference, subject, drawn, part)
        leeway, loss_leeway = dict.fromkeys(expected, 0.0), 0.0
        if getattr(run, "loss_type", None) == "vespo" and subject.logp_error:
            # φ = w^k e^(λ(1 − w)) makes |k − λw| times its relative error of the error of log w, a sum of log-probs.
            inexact = replace(drawn, logp_error=subject.logp_error)
            other_loss, others = learned_by(reference, subject, inexact, part)
            leeway = {name: float((others[name] - gradient).norm()) for name, gradient in expected.items()}
            loss_leeway = abs(other_loss - expected_loss)
        # If all parts cancel, only their rounding is left, and a relative difference has no meaning.
        largest = max(float(gradient.norm()) for gradient in expected.values())
        assume(not drawn.anew or not 0.0 < largest < 1e-3)
        sequences = objective.prepare_step(
            generation.step(step, shape["micro"]),
            lambda those: score_all(policy, those, run, TokenEvidence()).entropies,
        )
        prepared = generation.with_step(step, shape["micro"], sequences)
        evidence = TokenEvidence()
        sums = StepSums(evidence)
        for micro in prepared.micro_batches[step * shape["micro"] : (step + 1) * shape["micro"]]:
            with kept():
                learn(policy, micro, objective, PhaseClock(), sums, Unwatched())
        logged.append(sums.tally.figures() | objective.finish_step(sums.tally))
        assert evidence.gap.tokens == sum(len(s.behaviour_logps) for s in sequences)
        loss, wanted = sums.loss, expected_loss
        allowed = subject.relative * abs(wanted) + subject.loss_floor + loss_leeway
        assert abs(loss - wanted) <= allowed, (loss, wanted)
        assert_same(gradients(*subject.parts), expected, subject, leeway)
    return logged
