"""Random generations, and the comparison of their loss and gradients with `reference_methods.py`.

Used by: `test_methods.py` (double precision, many shapes), `test_methods_in_fp32.py` (the precision of a run) and
`test_methods_in_rows.py` (models that get one row per completion).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import reference_methods as plain
import torch
from blocks import small_blocks
from hypothesis import assume
from hypothesis import strategies as st
from reference import sampled_places
from reference_methods import Drawn
from subjects import Subject

from lockstep import OnlineDPOConfig
from lockstep.engines.protocol import Completion, RequestKey
from lockstep.models.adapters import causal_model
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.scoring import why_plain_rows
from lockstep.training.methods.objective import Objective
from lockstep.training.step.generation import prepare_generation, sequences_of
from lockstep.training.step.update import Policy, UpdateSums, learn, score_all

# Gives the scalar loss of one optimizer step by the reference.
ReferenceLoss = Callable[[Subject, Drawn, slice], torch.Tensor]
# No bound of a ratio, or of a mean of up to nine ratios, is a multiple of this value. At a bound, rounding would decide.
GRID = 0.0613


@contextlib.contextmanager
def attending_by_trees() -> Iterator[None]:
    """Small packs use tree attention too, like long packs."""
    with small_blocks():
        yield


@st.composite
def shapes(draw: st.DrawFn, sizes: tuple[int, ...] = (2, 4, 8)) -> dict[str, Any]:
    """The shape of a generation: steps × micro-batches × groups, lengths, rewards, and where packs are cut."""
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
    return {
        "size": size,
        "steps": steps,
        "micro": micro,
        "rewards": rewards,
        "lengths": draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        # The token of each completion before which text is inserted.
        "holes": draw(st.lists(st.just([]) | st.lists(st.integers(0, 9), max_size=4), min_size=count, max_size=count)),
        "cut": draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        "prompts": draw(st.lists(st.integers(1, 12), min_size=groups, max_size=groups)),
        "moved": draw(st.booleans()),
        # Whether a pass before the first step has computed the log-probs; then tokens without a gradient need no other pass.
        "scored": draw(st.booleans()),
        "budget": draw(st.integers(1, 200)),
        "chunk": draw(st.integers(1, 40)),
        "seed": draw(st.integers(0, 10**6)),
    }


def single(values: torch.Tensor) -> tuple[float, ...]:
    """The values in float32, as the loss gets them."""
    return tuple(values.float().tolist())


def drawn_of(subject: Subject, shape: dict[str, Any], temperature: float) -> Drawn:
    """A generation of a shape. No model has sampled it: its tokens are random.

    Args:
        shape: from `shapes`; may also have a `spread` (below 1, so that policies differ less) and `anew` (see `Drawn`).
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
    with torch.no_grad():
        rows = plain.padded(subject.exact_model, sequences, temperature).logps

    def noise(count: int, scale: float) -> torch.Tensor:
        steps = shape.get("spread", 1.0) * scale / GRID
        return GRID * (steps * torch.randn(count, generator=generator, dtype=torch.float64)).round()

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


def groups_of(drawn: Drawn) -> list[RolloutGroup]:
    """The same generation in the form that engine and reward functions give."""
    sequences, cut = iter(drawn.sequences), iter(drawn.cut)
    groups = []
    for g, rewards in enumerate(drawn.rewards):
        rollouts = []
        for i, reward in enumerate(rewards):
            s = next(sequences)
            n, own = len(s.completion_ids), iter(s.behaviour_logps)
            logps = tuple(next(own) if s.sampled is None or s.sampled[place] else 0.0 for place in range(n))
            reason = "length" if next(cut) else "stop"
            key = RequestKey(f"p{g}", i)
            completion = Completion(key, s.prompt_ids, s.completion_ids, logps, (0,) * n, reason, s.sampled)  # type: ignore[arg-type]
            scores = {"first": reward, "second": plain.second_score(reward)}
            rollouts.append(Rollout(completion, f"text {g} {i}", scores, math.nan if reward is None else reward))
        groups.append(RolloutGroup(Prompt(f"p{g}", s.prompt_ids, "text"), tuple(rollouts)))
    return groups


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


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], subject: Subject) -> None:
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    differences = {name: float((found[name] - gradient).norm()) for name, gradient in expected.items()}
    largest, whole, difference = max(norms.values()), math.hypot(*norms.values()), math.hypot(*differences.values())
    assert difference <= subject.relative * whole + 1e-9, (difference, whole)
    for name, norm in norms.items():
        allowed = subject.relative * norm + subject.floor * largest + 1e-9
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
    assert sequences_of(groups, 0) == [replace(s, **scores) for s in drawn.sequences]
    generation = prepare_generation(groups, objective, 0, drawn.sequences)
    assert generation.sampled_tokens == sum(shape["lengths"])
    if not drawn.moved:
        generation = generation.changed(
            lambda s: s if shape["scored"] and not objective.has_gradient(s) else replace(s, old_logps=None)
        )
    model = causal_model(subject.model)
    rows = why_plain_rows(model, max(len(s.prompt_ids) + len(s.completion_ids) for s in drawn.sequences)) is not None
    policy = Policy(model, contextlib.nullcontext, lambda loss: loss.backward(), subject.critic, rows)
    logged, size = [], run.completions_per_step
    for step in range(len(drawn.sequences) // size):
        expected_loss = reference(subject, drawn, slice(step * size, (step + 1) * size))
        expected_loss.backward()
        expected = gradients(*subject.exact_parts)
        # If all parts cancel, only their rounding is left, and a relative difference has no meaning.
        largest = max(float(gradient.norm()) for gradient in expected.values())
        assume(not drawn.anew or not 0.0 < largest < 1e-3)
        sequences = objective.prepare_step(
            generation.step(step, shape["micro"]), lambda those: score_all(policy, those, run).entropies
        )
        prepared = generation.with_step(step, shape["micro"], sequences)
        sums = UpdateSums()
        for micro in prepared.micro_batches[step * shape["micro"] : (step + 1) * shape["micro"]]:
            learn(policy, micro, objective, PhaseClock(), sums)
        logged.append(sums.tally.figures() | objective.finish_step(sums.tally))
        assert sums.gap.tokens == sum(len(s.behaviour_logps) for s in sequences)
        loss, wanted = sums.loss, expected_loss.item()
        assert abs(loss - wanted) <= subject.relative * abs(wanted) + subject.loss_floor, (loss, wanted)
        assert_same(gradients(*subject.parts), expected, subject)
    return logged
