"""What is learned is what was sampled: packs hold the sealed ids, places and log-probs; changes are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_model

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.learn.generation import sequences_of
from lockstep.learn.methods.objective import TokenBatch
from lockstep.learn.pack import Pack, pack_rows, pack_sequences
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.arithmetic import Precision
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, seal_of
from lockstep.watch.custody import SampledTokens, check_aside, check_entering, sampled_tokens
from lockstep.watch.forward import check_plain, check_repeated
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.plain_forward import completion_logps, sampled_logps
from lockstep.watch.tolerances import tolerance

PACKINGS = {"trees": pack_sequences, "rows": pack_rows}


def groups(seed: int = 0) -> list[RolloutGroup]:
    """Three prompts with common beginnings, and completions of few ids, some inserted or in a second branch."""
    rng = np.random.default_rng(seed)

    def completion(key: RequestKey, prompt: Any, *, inserts: bool) -> Completion:
        ids = rng.integers(4, 7, rng.integers(2, 9))
        mask = rng.random(len(ids)) < 0.6 if inserts else None
        if mask is not None:
            mask[rng.integers(len(ids))] = True
        return Completion(key, prompt, ids, -rng.random(len(ids)), [3] * len(ids), "stop", mask)

    found = []
    for p in range(3):
        prompt = Prompt(f"p{p}", [9, 8, *([7] * p), *rng.integers(4, 6, 2)], "say it", {"answer": p})
        rollouts = []
        for sample in range(4):
            key = RequestKey(prompt.prompt_id, sample)
            first = completion(key, prompt.ids, inserts=bool(sample % 2))
            further = (
                (completion(key._replace(call=2), [*prompt.ids, 4, 5], inserts=True),) if sample == 3 else ()
            )
            rollout = Rollout(first, f"text of {key}", further=further)
            rollouts.append(replace(rollout, seal=seal_of(rollout, prompt)))
        found.append(RolloutGroup(prompt, tuple(rollouts)))
    return found


def scored(made: list[RolloutGroup]) -> list[TrainingSequence]:
    """The sequences with old log-probs, as after a scoring pass."""
    return [replace(s, old_logps=s.behaviour_logps + np.float32(0.01)) for s in sequences_of(made, 3)]


def proof_of(made: list[RolloutGroup], *, own_forward: bool = False, size: int = 12) -> SampledTokens:
    old = {s.name: s.old_logps for s in scored(made)}
    return sampled_tokens(made, old, size, own_forward=own_forward)  # type: ignore[arg-type]


def enter(
    proof: SampledTokens, sequences: list[TrainingSequence], packing: str, budget: int = 10_000
) -> None:
    """Compare sequences as packs."""
    for pack in PACKINGS[packing](sequences, budget):
        check_entering(proof, batch_of(pack))


def batch_of(pack: Pack) -> TokenBatch:
    zeros = torch.zeros(len(pack.targets))
    held = tuple(replace(s, advantages=s.behaviour_logps) for s in pack.sequences)
    return TokenBatch.of(replace(pack, sequences=held), TokenScores(zeros, zeros))


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_pack_of_what_was_sampled_passes(packing: str) -> None:
    for seed in range(12):
        made = groups(seed)
        proof, sequences = proof_of(made), scored(made)
        for budget in (1, 24, 10_000):
            enter(proof, sequences, packing, budget)
        check_aside(proof, sequences)
        proof.check_micro_batch(0, [s.name for s in sequences])


def shifted(s: TrainingSequence) -> TrainingSequence:
    """One inserted id is taken for a sampled one, and a sampled id for an inserted one."""
    if s.sampled is None or s.sampled.all():
        return s
    return replace(s, sampled=np.roll(s.sampled, 1))


# The fields that each change touches.
CHANGES: dict[str, tuple[Callable[[TrainingSequence], TrainingSequence], str]] = {
    "a sampled id": (lambda s: replace(s, completion_ids=[*s.completion_ids[:-1], 60]), "ids"),
    "a prompt": (lambda s: replace(s, prompt_ids=s.prompt_ids[1:]), "ids"),
    "the order of a prompt": (lambda s: replace(s, prompt_ids=s.prompt_ids[::-1]), "ids"),
    "marks": (shifted, "ids"),
    "a log-prob": (
        lambda s: replace(s, behaviour_logps=s.behaviour_logps * np.float32(1.0001)),
        "log-probs of the engine",
    ),
    "an old log-prob": (lambda s: replace(s, old_logps=s.old_logps - np.float32(0.3)), "old log-probs"),
    "forgotten": (lambda s: replace(s, old_logps=None), "old log-probs"),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_sequence_that_was_changed_is_named(change: str, packing: str) -> None:
    made = groups()
    proof, sequences = proof_of(made), scored(made)
    alter, what = CHANGES[change]
    altered = [alter(s) for s in sequences]
    assert altered != sequences
    with pytest.raises(ProofError, match=rf"the {what}.* of rollout \d of prompt p\d") as caught:
        enter(proof, altered, packing)
    assert caught.value.check == "learned"
    with pytest.raises(ProofError, match=what):
        check_aside(proof, altered)


TENSORS: dict[str, Callable[[Pack], Pack]] = {
    "targets": lambda pack: replace(pack, targets=pack.targets.roll(1)),
    "input ids": lambda pack: replace(
        pack, input_ids=pack.input_ids.clone().index_fill_(1, torch.tensor([1]), 50)
    ),
    "positions": lambda pack: replace(pack, position_ids=pack.position_ids + (pack.position_ids > 2)),
    "predictors": lambda pack: replace(pack, predictors=pack.predictors.roll(1)),
    "who sees whom": lambda pack: replace(pack, ends=torch.full_like(pack.ends, len(pack.ends))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_tensor_of_a_pack_that_was_changed_is_refused(tensor: str) -> None:
    made = groups()
    (pack,) = pack_sequences(scored(made), 10_000)
    with pytest.raises(ProofError, match=r"the ids, or the ids before them, of rollout"):
        check_entering(proof_of(made), batch_of(TENSORS[tensor](pack)))


def test_log_probs_of_the_own_forward_are_the_old_ones_where_the_policy_has_not_moved() -> None:
    made = groups()
    proof = proof_of(made, own_forward=True)
    for pack in pack_sequences(sequences_of(made, 3), 10_000):
        check_entering(proof, batch_of(pack))
        with pytest.raises(ProofError, match="old log-probs"):
            check_entering(proof, replace(batch_of(pack), old_logps=torch.full((len(pack.targets),), -0.3)))


def test_a_micro_batch_learns_from_its_own_completions_once() -> None:
    made = groups()
    proof, rollouts = proof_of(made, size=6), [r for group in made for r in group.rollouts]
    parts = [[name for r in own if r.seal for name in r.seal.tokens] for own in (rollouts[:6], rollouts[6:])]
    assert [len(part) for part in parts] == [7, 8]
    for wrong in (parts[1], parts[0][:-1], [*parts[0][:-1], parts[0][0]], [*parts[0], parts[1][0]]):
        with pytest.raises(ProofError, match="micro-batch 0 learns from"):
            proof.check_micro_batch(0, wrong)
    proof.check_micro_batch(0, parts[0][::-1])
    stranger = replace(scored(made)[0], name="p9#0")
    with pytest.raises(ProofError, match="p9#0 enters the loss and was not sampled"):
        check_aside(proof, [stranger])


def test_text_and_row_are_those_of_the_sampling() -> None:
    made = groups()
    first, *others = made
    wrong = {
        "text": replace(first, rollouts=(replace(first.rollouts[0], text="other"), *first.rollouts[1:])),
        "row": replace(first, prompt=replace(first.prompt, columns={"answer": 7})),
        "ids of the row": replace(first, prompt=replace(first.prompt, ids=first.prompt.ids[:-1])),
        "rollouts": replace(
            first, rollouts=(replace(first.rollouts[0], seal=first.rollouts[1].seal), *first.rollouts[1:])
        ),
    }
    for group in wrong.values():
        with pytest.raises(
            ProofError, match="rollout 0 of prompt p0 was scored with another text or row than its own"
        ):
            proof_of([group, *others])
    with pytest.raises(ProofError, match="it has no seal"):
        proof_of(
            [replace(first, rollouts=(replace(first.rollouts[0], seal=None), *first.rollouts[1:])), *others]
        )


def test_the_forward_of_a_first_step_repeats_the_scoring_pass() -> None:
    limit, logps = tolerance(torch.float32, torch.float32), -torch.rand(40)

    def difference(other: torch.Tensor) -> GapStats:
        return measure_gap(logps, other, ["p#0"], [40])

    check_repeated(difference(logps + 1e-5), limit, 4)
    check_repeated(GapStats(), limit, 4)
    for wrong in (logps * 1.01, logps.roll(1)):
        with pytest.raises(
            ProofError, match="generation of version 4, 40 tokens have other log-probs"
        ) as caught:
            check_repeated(difference(wrong), limit, 4)
        assert caught.value.check == "forward"


def test_a_forward_that_differs_from_a_plain_one_is_refused() -> None:
    model, distribution = make_model(), Distribution(Sampling(16, temperature=0.7))
    ids = np.random.default_rng(0).integers(4, 300, 24)
    mask = np.arange(16) % 5 != 1
    completion = Completion(
        RequestKey("p", 0), ids[:8], ids[8:], np.zeros(16), np.zeros(16, int), "stop", mask
    )
    right = sampled_logps(model, completion, distribution, Precision())
    check_plain(model, completion, right, distribution, Precision())
    hotter = completion_logps(model, ids[:8], ids[8:], Sampling(16, temperature=0.8))[torch.from_numpy(mask)]
    other = completion_logps(model, ids[1:8], ids[8:], Sampling(16, temperature=0.7))[torch.from_numpy(mask)]
    for wrong in (hotter, other, right.roll(1), right + float("nan")):
        with pytest.raises(ProofError, match="differ from a plain forward with the same weights") as caught:
            check_plain(model, completion, wrong, distribution, Precision())
        assert caught.value.check == "forward"
