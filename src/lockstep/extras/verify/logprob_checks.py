"""Proofs about log-probs: their distribution, a small gap in each dtype, gradients that no split changes, and draws."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from lockstep.config.run import OnlineConfig
from lockstep.config.sampling import sampling_of
from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.contract.sampling import Sampling
from lockstep.contract.tensors import dtype_name
from lockstep.errors import ProofError
from lockstep.extras.fp8.quantised_proof import whole_inputs
from lockstep.extras.fp8.quantised_push import QuantisedPush
from lockstep.extras.verify.rows import Row, gap_row
from lockstep.extras.verify.stage import Stage
from lockstep.learn.events import Evidence
from lockstep.learn.generation import prepare_generation, score_all, sequences_of
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy, StepSums, learn
from lockstep.models.arithmetic import Precision
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.driver import collect
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.tokens.chat import end_ids
from lockstep.watch.custody import Record
from lockstep.watch.draws import FALSE_ALARM, DrawEvidence
from lockstep.watch.evidence import TokenEvidence
from lockstep.watch.gap import GapStats, PooledGap, measure_gap
from lockstep.watch.kept_sets import KeptSetProof, KeptToken
from lockstep.watch.plain_forward import completion_logps, logit_chunks
from lockstep.watch.tolerances import Tolerance, tolerance


class Unwatched:
    """The events of `learn/events.py` that a loss and its backward have. Nobody judges the sums."""

    def evidence(self) -> TokenEvidence:
        return TokenEvidence()

    def micro_batch(
        self, index: int, sequences: Sequence[TrainingSequence], moving: Sequence[TrainingSequence]
    ) -> list[list[TrainingSequence]]:
        return [list(moving)]

    def backward(self, *given: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _pass(self, *given: Any, **named: Any) -> None:
        pass

    referenced = forward = learned = aside = compared = summing = summed = accumulated = _pass


# Largest relative distance of two gradients of the same log-probs.
_ACCOUNTING_LIMIT = 1e-4


def semantics(stage: Stage) -> list[Row]:
    """The engine's log-probs belong to the distribution that was sampled, for several settings and the run's own."""
    tokens = stage.config.max_completion_length
    cases = {
        "T = 1": Sampling(tokens),
        "T = 0.7": Sampling(tokens, temperature=0.7),
        "T = 0.7, top-k 20": Sampling(tokens, temperature=0.7, top_k=20),
        "T = 1, top-p 0.9": Sampling(tokens, top_p=0.9),
        "T = 1, min-p 0.05": Sampling(tokens, min_p=0.05),
    }
    with _as_exact_as_possible(stage) as is_exact:
        rows = [semantics_row(stage, name, Distribution(case), is_exact) for name, case in cases.items()]
        own = stage.trainer.proofs.distribution
        if replace(own.sampling, stop=(), max_kept_ids=Sampling(1).max_kept_ids) != stage.sampling():
            rows.append(semantics_row(stage, "the run's own settings", own, is_exact))
    return rows


@contextmanager
def _as_exact_as_possible(stage: Stage) -> Iterator[bool]:
    """In this context, an engine in 8 bits and the trainer's forward in 8 bits do not quantise their inputs.

    Yields:
        Whether the limits of the dtypes hold. They do not if the engine goes on to quantise its inputs
        (`extras/fp8/quantised_proof.py`).
    """
    extension = stage.trainer.proofs.push.extension
    if not isinstance(extension, QuantisedPush):
        yield True
        return
    with whole_inputs(stage.engine, stage.version) as are_whole:
        if not are_whole:
            yield False
            return
        with extension.error.in_8_bits(inputs_too=False):
            yield True


def _limit(stage: Stage, trainer: torch.dtype, *, is_exact: bool) -> Tolerance:
    """The limits on the gap to a trainer that computes in a dtype."""
    return tolerance(stage.trainer.proofs.engine_dtype, trainer) if is_exact else stage.trainer.proofs.limit


def semantics_row(stage: Stage, name: str, distribution: Distribution, is_exact: bool) -> Row:
    """The row of one distribution. Tokens are scored among the engine's kept ids, and each set is compared."""
    completions = stage.sample(distribution.sampling, samples=2)
    limit = _limit(stage, stage.precision.dtype_of(stage.model), is_exact=is_exact)
    gap, proof = GapStats(), f"log-probs, {name}"
    model, precision = stage.model, stage.precision
    for c in completions:
        own = completion_logps(model, c.prompt_ids, c.token_ids, distribution, precision, c.kept_ids)
        gap = gap + measure_gap(torch.tensor(c.logprobs), own, [str(c.key)], [len(c.token_ids)])
    note, sampling = "" if is_exact else "; inputs in 8 bits, wider limits", distribution.sampling
    if sampling.is_filtered:
        sets = KeptSetProof(distribution, limit, stage.engine.settings().searches_top_p)
        try:
            found = sets.check(token for c in completions for token in _kept_tokens(stage, c, distribution))
            found.check_mean(sampling, limit)
        except ProofError as error:
            return Row(proof, error.found, "the ids that the filters keep", False, error.fix)
        others = f", {found.differences} other ids" if found.differences else ""
        note += f"; {found.tokens} sets of kept ids{others}"
    fix = "the engine reports log-probs of another distribution than it samples; set logprobs_mode=processed_logprobs"
    return gap_row(proof, gap, limit, fix, note)


@torch.no_grad()
def _kept_tokens(stage: Stage, completion: Completion, distribution: Distribution) -> Iterator[KeptToken]:
    """Every token of a completion, with the ids that the engine kept and the trainer's own logits."""
    prompt, ids = completion.prompt_ids.tolist(), completion.token_ids.tolist()
    assert completion.kept_ids is not None
    masks, place = distribution.masks(ids), 0
    for logits in logit_chunks(stage.model, [*prompt, *ids[:-1]], len(prompt) - 1, stage.precision):
        for row in logits.cpu():
            kept = completion.kept_ids.part(place, place + 1).ids
            yield KeptToken(str(completion.key), place, row, prompt, ids[:place], masks, kept)
            place += 1


def parity_by_dtype(stage: Stage) -> list[Row]:
    """The same tokens, scored by the trainer in each dtype in which it can compute."""
    sampling, engine = stage.sampling(), stage.trainer.proofs.engine_dtype
    rows: list[Row] = []
    with _as_exact_as_possible(stage) as is_exact:
        completions = stage.sample(sampling)
        half = Precision(autocast=torch.bfloat16)
        for trainer, precision in ((torch.float32, Precision()), (torch.bfloat16, half)):
            limit = _limit(stage, trainer, is_exact=is_exact)
            gap = stage.gap(completions, sampling, precision)
            name = f"parity gap, engine {dtype_name(engine)}, trainer {dtype_name(trainer)}"
            ours = " (this run)" if precision == stage.precision else ""
            row = gap_row(name + ours, gap, limit, "see which proof above failed first")
            if not row.passed and not ours and trainer == torch.bfloat16 and rows[0].passed:
                # The engine agrees with the same forward in float32. What is left is the rounding of the model itself.
                figure = f"{row.figure}; this model's own forward rounds that much in bfloat16"
                allowed = f"{row.limit} for a run with bf16: this model needs float32"
                row = replace(row, figure=figure, limit=allowed, passed=True, fix="")
            rows.append(row)
    return rows


def training_step(stage: Stage) -> list[Row]:
    """One step of the real trainer: every sampled token goes through the packed forward."""
    tokens = stage.step()
    noted = stage.trainer.step_log
    mean, largest = noted.values("parity/mean_abs_gap")[-1], noted.values("parity/max_abs_gap")[-1]
    limit = stage.trainer.proofs.limit
    figure = f"mean {mean:.1e}, max {largest:.1e}, {tokens} tokens, all of them checked"
    allowed = f"{limit.mean:.2g}, {limit.largest(tokens):.2g}"
    if limit.is_coarse and tokens < PooledGap.enough:
        allowed = f"max {limit.largest(tokens):.2g}; a mean is judged from {PooledGap.enough} tokens on"
    return [Row("training step", figure, allowed, True)]


def accounting(stage: Stage) -> list[Row]:
    """Every token has the same weight in the loss, whether a step is one micro-batch or several.

    The model scores the tokens once. Each cut then learns from these numbers, through the trainer's own loss and
    backward. So the cuts differ in their accounting alone, and rounding of a forward in half precision is not a part
    of the figure.
    """
    groups = _uneven_groups(stage)
    scores = _scored(stage, groups)
    whole = _token_gradients(stage, groups, scores, 1)
    apart = max(_distance(whole, _token_gradients(stage, groups, scores, parts)) for parts in (2, 4))
    figure = f"gradients of the tokens in 1, 2 and 4 micro-batches differ by {apart:.1e} of their size"
    fix = "the loss depends on how a step is cut into micro-batches: a mean is taken over a part instead of the step"
    return [Row("exact accounting", figure, f"{_ACCOUNTING_LIMIT:g}", apart <= _ACCOUNTING_LIMIT, fix)]


def _uneven_groups(stage: Stage) -> list[RolloutGroup]:
    """One group per prompt with mixed rewards, each of another length: equal lengths would hide a mean over a part."""
    # The trainer scores them under the run's own distribution.
    own, made = stage.trainer.proofs.distribution.sampling, []
    for i, prompt in enumerate(stage.prompts):
        most = max(stage.config.max_completion_length * (i + 1) // len(stage.prompts), 1)
        sampling = replace(own, max_tokens=most, min_tokens=min(own.min_tokens, most))
        completions = stage.sample(sampling, [prompt], samples=stage.config.num_generations)
        rollouts = tuple(Rollout(c, "", {}, float(j % 2)) for j, c in enumerate(completions))
        made.append(RolloutGroup(prompt, rollouts))
    return made


@dataclass(frozen=True, slots=True)
class _ScoredPolicy(Policy):
    """A policy whose log-probs were scored before: by sequence, scores that are leaves and gather gradients."""

    scores: Mapping[str, TokenScores] = field(default_factory=dict)

    def score(
        self, pack: Pack, config: OnlineConfig, evidence: Evidence | None = None, **how: bool
    ) -> TokenScores:
        own = [self.scores[s.name] for s in pack.sequences]
        given = [s.support for s in own if s.support is not None]
        logps, entropies = torch.cat([s.logps for s in own]), torch.cat([s.entropies for s in own])
        return TokenScores(logps, entropies, support=torch.cat(given) if given else None)


def _scored(stage: Stage, groups: Sequence[RolloutGroup]) -> dict[str, TokenScores]:
    """The scores of every sequence, computed once by the policy, by name."""
    objective = GRPOObjective(_cut(stage, 1))
    policy, found = stage.trainer._policy(), dict[str, TokenScores]()
    generation = prepare_generation(groups, objective, stage.version)
    sequences = [s for batch in generation.micro_batches for s in batch]
    with torch.no_grad(), policy.casts_kept():
        for pack in policy.packs(sequences, objective.config):
            scores = policy.score(pack, objective.config)
            lengths = [s.length for s in pack.sequences]
            columns = zip(scores.logps.split(lengths), scores.entropies.split(lengths), strict=True)
            supports = scores.support.split(lengths) if scores.support is not None else [None] * len(lengths)
            for s, (logps, entropies), support in zip(pack.sequences, columns, supports, strict=True):
                found[s.name] = TokenScores(logps.clone(), entropies.clone(), support=support)
    return found


def _token_gradients(
    stage: Stage, groups: Sequence[RolloutGroup], scores: Mapping[str, TokenScores], parts: int
) -> dict[str, torch.Tensor]:
    """The gradient of the step's loss by every token's log-prob, and by its entropy, in a number of micro-batches."""
    objective = GRPOObjective(_cut(stage, parts))

    def leaf_of(own: TokenScores) -> TokenScores:
        entropies = own.entropies.clone().requires_grad_(objective.entropy_gradient)
        return replace(own, logps=own.logps.clone().requires_grad_(), entropies=entropies)

    leaves = {name: leaf_of(own) for name, own in scores.items()}
    known = {f.name: getattr(stage.trainer._policy(), f.name) for f in fields(Policy)}
    policy, sums = _ScoredPolicy(**known, scores=leaves), StepSums(TokenEvidence())
    for batch in prepare_generation(groups, objective, stage.version).micro_batches:
        learn(policy, batch, objective, PhaseClock(), sums, Unwatched())
    found = {f"{name}, log-probs": own.logps.grad for name, own in leaves.items()}
    found |= {f"{name}, entropies": own.entropies.grad for name, own in leaves.items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def _cut(stage: Stage, parts: int) -> GRPOConfig:
    """The run's configuration with a number of micro-batches per step."""
    config = copy.copy(stage.config)
    config.per_device_train_batch_size = stage.config.per_device_train_batch_size // parts
    config.gradient_accumulation_steps = config.steps_per_generation = parts
    # Without this nothing would be left to compare: short completions are all truncated, and at a low temperature all
    # equal.
    config.mask_truncated_completions, config.temperature = False, 1.0
    return config


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The distance of two sets of gradients, in sizes of the first; infinite if they are not of the same tokens."""
    size = sum(float(gradient.double().square().sum()) for gradient in one.values())
    if not size or one.keys() != other.keys():
        return math.inf
    return (sum(float((one[name] - other[name]).double().square().sum()) for name in one) / size) ** 0.5


# Tokens of `lockstep verify`: enough for coarse faults. Tokens of the self-test: enough for a temperature of 1.05,
# even if the model prefers few tokens.
_TOKENS, _SELF_TEST_TOKENS = 512, 65_536
_SAMPLES = 32


def draws(stage: Stage) -> list[Row]:
    """Some hundred sampled tokens are draws from the distributions that the trainer computes for them."""
    return [_row(stage, _TOKENS)]


def many_draws(stage: Stage) -> list[Row]:
    """The same with the tokens of a small run, or fewer if the proof stops before."""
    return [_row(stage, _SELF_TEST_TOKENS)]


def _row(stage: Stage, most: int) -> Row:
    evidence, tokens, alarm = DrawEvidence(), 0, ""
    sampling = sampling_of(stage.config, stage.tokenizer, end_ids(stage.model, stage.tokenizer))
    for turn in itertools.count():
        if tokens >= most or alarm:
            break
        asked: dict[str, Any] = {"num_generations": _SAMPLES, "run_seed": turn, "version": stage.version}
        groups = collect(stage.prompts, stage.engine, stage.tokenizer, sampling, Record, **asked)
        of_turn, sequences = stage.trainer.watch.evidence(), sequences_of(groups, stage.version)
        score_all(stage.trainer.loop.policy(), sequences, stage.config, of_turn)
        stats = of_turn.draws
        tokens += stats.tokens
        evidence.add(stats)
        try:
            evidence.check(stage.version, stats)
        except ProofError as error:
            alarm = error.cause
    figure = f"evidence against fair draws {math.exp(evidence.log_evidence):.1e}, {tokens} tokens"
    return Row("draws", figure, f"{1 / FALSE_ALARM:.0e}", not alarm, alarm)
