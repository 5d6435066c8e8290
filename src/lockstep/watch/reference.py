"""Proofs of what must stay: the reference model, the frozen weights, and what the reference computes.

Proof `reference`.
Shows: the reference model and the frozen weights under an adapter have the bytes with which training began (64 MiB of
drawn tensors per generation, all of them at the start; up to 32 drawn elements of every tensor after each step); they
share no memory with trained weights; the reference's log-probs of one drawn completion are those of a plain forward.
Does not show: tensors that were not drawn yet; the other completions.
When: start; every generation; every step.

The proof `reference` reads weights. It does not see which weights the forward of the reference uses: an adapter that
is left on, or a module of the policy in the reference's place, gives a KL divergence near 0 and changes no frozen
weight.

Proof `reference_outputs`.
Shows: at the first generation of a start, the reference gives a sequence of the canary the log-probs, bit for bit, that
its weights give by a second way: the policy's modules with the weights of the reference, or an adapted policy whose
layers compute as the layers that they wrap. Later it gives the same ones again. A reference that follows the policy
(`sync_ref_model`) does so at the right steps and by the right share, in up to 32 drawn elements of every tensor.
Does not show: a policy in its place that has not moved yet. It begins anew when the reference follows, and when the
number of threads changes. Where a forward does not repeat its own bits, a difference below the limits on a gap is not
seen. There is no second way for a reference of another kind than the policy, for a frozen adapter, and for a sharded
reference model.
When: every generation that the reference scores: a plain forward of 24 tokens; every step of a reference that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.probe import model_fields
from lockstep.contract.protocol import Completion
from lockstep.contract.sampling import Sampling
from lockstep.contract.tensors import digests_of, key_for
from lockstep.errors import ProofError
from lockstep.learn.generation import branches_of
from lockstep.learn.policy_and_reference import OF_REFERENCE
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.models.adapters import base_alone, has_frozen_adapter
from lockstep.models.arithmetic import Precision
from lockstep.rollouts.group import RolloutGroup
from lockstep.shards.model import local_part, sharded
from lockstep.tokens.arrays import Reals
from lockstep.tokens.chat import embedding_rows
from lockstep.watch.elements import DrawnElements
from lockstep.watch.plain_forward import completion_logps, sampled_logps
from lockstep.watch.push import canary_sequences
from lockstep.watch.tolerances import Tolerance, own_limit

# Bytes that are read again in each generation, so that large models are covered over several generations.
_BYTES = 64 * 2**20


def check_reference_scores(
    model: PreTrainedModel,
    completion: Completion,
    logps: Reals,
    distribution: Distribution,
    precision: Precision,
    limit: Tolerance,
) -> None:
    """Score one completion again with the reference model, as a plain row, and compare with the loss's (T,) `logps`."""
    gap = (sampled_logps(model, completion, distribution, precision) - torch.tensor(logps)).abs()
    mean, largest = float(gap.mean()), float(gap.max())
    if not (mean <= limit.mean_of(len(gap)) and largest <= limit.largest(len(gap))):
        raise ProofError(
            "reference",
            f"the reference's log-probs of completion {completion.key} differ from a plain forward of the reference by "
            f"{mean:.2g} nats on average and {largest:.2g} at most, over {len(gap)} tokens",
            "the log-probs belong to other tokens or another model, or were changed after they were computed",
            "report it with the run's configuration; leave beta at 0 until it is solved",
        )


class FrozenWeights:
    """Tensors that training must not change. Raises `ProofError` if one shares its memory with a trained tensor.

    Args:
        tensors: the frozen tensors by name. Of sharded tensors, this rank proves its part.
        trained: the tensors that the optimizer changes.
        seed: draws which tensors are read again.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], trained: Iterable[torch.Tensor], seed: int
    ) -> None:
        tensors = {name: local_part(t) for name, t in tensors.items()}
        self._tensors, self._seed = dict(tensors), seed
        moving = {t.untyped_storage().data_ptr() for t in map(local_part, trained) if t.numel()}
        places = {name: t.untyped_storage().data_ptr() for name, t in tensors.items() if t.numel()}
        shared = sorted(name for name, place in places.items() if place in moving)
        if shared:
            raise ProofError(
                "reference",
                f"{len(shared)} tensors of the reference are the trained tensors themselves, {shared[0]} among them",
                "the reference model and the policy are one model, so that the KL divergence is 0 whatever is learned",
                "give ref_model as a model of its own, or leave it out",
            )
        self._key = key_for(tensors.values())
        self._digests = digests_of(tensors, self._key)
        self._filled = {name: t for name, t in tensors.items() if t.numel()}
        self._drawn = DrawnElements.of(list(self._filled.values()), (seed, 0))
        self._values = self._drawn.read(list(self._filled.values()))

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each tensor, as it must stay."""
        return self._digests

    def of_reference(self) -> dict[str, torch.Tensor]:
        """The weights of a separate reference model, by their names in it; empty if there is none."""
        return {
            n.removeprefix(OF_REFERENCE): t for n, t in self._tensors.items() if n.startswith(OF_REFERENCE)
        }

    def check_elements(self) -> None:
        """Read a few elements of every tensor again, after an optimizer step."""
        values = self._drawn.read(list(self._filled.values()))
        same = (values == self._values) | (values.isnan() & self._values.isnan())
        if not bool(same.all()):
            name = list(self._filled)[int(self._drawn.owners[int((~same).nonzero()[0])])]
            raise ProofError(
                "reference",
                f"{name} is frozen and has changed since training began",
                "the optimizer or a callback changes weights that are not trained, or an adapter was merged into them",
                "let nothing write to frozen weights; call requires_grad_(True) before the trainer is made to "
                "train them",
            )

    def check(self, version: int) -> None:
        """Read drawn tensors again."""
        left, drawn = _BYTES, {}
        for name in np.random.default_rng((self._seed, version)).permutation(sorted(self._tensors)).tolist():
            if left <= 0:
                break
            left -= self._tensors[name].nbytes
            drawn[name] = self._tensors[name]
        now = digests_of(drawn, self._key)
        changed = [name for name, digest in now.items() if digest != self._digests[name]]
        if changed:
            raise ProofError(
                "reference",
                f"{len(changed)} frozen tensors have changed before version {version}, {changed[0]} among them",
                "something trains the reference or the base of an adapter, or merges the adapter into it",
                "look for code outside Lockstep that writes to the model, such as a callback or merge_adapter",
            )


def check_drawn_scores(
    scorer: Policy,
    scores: Mapping[str, Reals],
    sequences: Sequence[TrainingSequence],
    groups: Sequence[RolloutGroup],
    precision: Precision,
    seed: tuple[int, ...],
) -> None:
    """Compute the reference's log-probs of one drawn completion of this rank a second time."""
    if not sequences:
        return
    assert scorer.rules is not None
    name = sequences[int(np.random.default_rng(seed).integers(len(sequences)))].name
    for completion in (c for c in branches_of(groups) if str(c.key) == name):
        limit = own_limit(precision, scorer.model)
        distribution = scorer.rules.distribution
        check_reference_scores(scorer.model, completion, scores[name], distribution, precision, limit)


# A number of ids for which every model has room.
_CONTEXT = 32
# Further forwards that say whether a forward repeats its own bits. They are made only after a difference.
_AGAIN = 3


class ReferenceOutputs:
    """The proof. It keeps the log-probs of the first generation."""

    def __init__(self) -> None:
        self._kept: tuple[FrozenWeights, int, torch.Tensor] | None = None

    def check(
        self, scorer: Policy, policy: PreTrainedModel, frozen: FrozenWeights | None, precision: Precision
    ) -> None:
        """Score the sequence with the reference, and compare with a second way, or with the first generation.

        Nothing is compared without `frozen`, before training. If it is another object, the reference may be new.
        """
        if frozen is None:
            return
        now, threads = _logps(scorer.model, precision), torch.get_num_threads()
        if self._kept is None or self._kept[0] is not frozen or self._kept[1] != threads:
            self._kept = (frozen, threads, now)
            second = _second_way(scorer.model, policy, frozen, precision)
            if second is not None:
                self._compare(scorer, now, second, "than its weights give by a second way", precision)
            return
        self._compare(scorer, now, self._kept[2], "than at the first generation", precision)

    @staticmethod
    def _compare(
        scorer: Policy, now: torch.Tensor, due: torch.Tensor, other: str, precision: Precision
    ) -> None:
        if torch.equal(now, due):
            return
        gap = (now - due).abs()
        mean, largest = float(gap.mean()), float(gap.max())
        if not all(torch.equal(_logps(scorer.model, precision), now) for _ in range(_AGAIN)):
            # Some kernels add in another order each time.
            limit = own_limit(precision, scorer.model)
            if mean <= limit.mean_of(len(gap)) and largest <= limit.largest(len(gap)):
                return
        raise ProofError(
            "reference_outputs",
            f"the reference model gives {len(gap)} fixed tokens other log-probs {other}: by {mean:.2g} nats on "
            f"average and {largest:.2g} at most",
            "the reference computes with trained weights: its adapter is not switched off, or a module of "
            "the policy stands in its place. The KL divergence is then too small, whatever is learned",
            "let nothing replace the reference, its modules, or how peft switches adapters off; otherwise "
            "this is a defect of Lockstep: report it",
        )


def _logps(scorer: PreTrainedModel, precision: Precision) -> torch.Tensor:
    """(N,) log-probs of the first sequence of the canary, without its first token."""
    # One sequence, because a forward of a large model over few tokens is as slow as reading its weights.
    ids, *_ = canary_sequences(embedding_rows(scorer), _CONTEXT).values()
    return completion_logps(scorer, ids[:1], ids[1:], Sampling(1), precision)


class _Scored(torch.nn.Module):
    """A model whose forward gives what `_logps` gives."""

    def __init__(self, model: PreTrainedModel, precision: Precision) -> None:
        super().__init__()
        self.model, self._precision = model, precision

    def forward(self) -> torch.Tensor:
        return _logps(self.model, self._precision)


def _second_way(
    scorer: PreTrainedModel, policy: PreTrainedModel, frozen: FrozenWeights, precision: Precision
) -> torch.Tensor | None:
    """What `_logps` of the reference must be; None: there is no second way."""
    weights = frozen.of_reference()
    if not weights:
        if has_frozen_adapter(policy):
            return None
        with base_alone(policy):
            return _logps(policy, precision)
    others = dict(policy.named_parameters())
    alike = weights.keys() == others.keys() and all(
        w.shape == others[name].shape and w.dtype == others[name].dtype for name, w in weights.items()
    )
    if not alike or _is_special(policy) or model_fields(scorer.config) != model_fields(policy.config):
        return None
    given = {f"model.{name}": tensor for name, tensor in weights.items()}
    return torch.func.functional_call(_Scored(policy, precision), given, ())


def _is_special(policy: PreTrainedModel) -> bool:
    """Whether the policy computes in a way that the reference does not: by hooks, or in parts."""
    return sharded(policy) is not None or any(
        m._forward_hooks or m._forward_pre_hooks for m in policy.modules()
    )


@contextmanager
def check_follows(
    reference: Mapping[str, torch.Tensor],
    policy: Mapping[str, torch.Tensor],
    share: float,
    seed: tuple[int, ...],
) -> Iterator[None]:
    """Within the context, the reference must move to `share` × policy + (1 − share) × reference: 0, it stays."""
    own = list(reference.values())
    drawn = DrawnElements.of(own, seed)
    before, towards = drawn.read(own), drawn.read([policy[name] for name in reference])
    yield
    now, due = drawn.read(own), before + share * (towards - before)
    slack = 2 * drawn.epsilons(own) * torch.maximum(before.abs(), towards.abs()) * bool(share)
    wrong = ~((now - due).abs() <= slack)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ProofError(
            "reference_outputs",
            f"an element of {list(reference)[int(drawn.owners[at])]} of the reference went from {before[at]:.6g} to "
            f"{now[at]:.6g}, where {due[at]:.6g} is right: the policy has {towards[at]:.6g}, and a share of {share:g}",
            "the reference was moved by another share than ref_model_mixup_alpha, or at other steps than those of "
            "ref_model_sync_steps",
            "let nothing write to the reference; otherwise this is a defect of Lockstep: report it",
        )
