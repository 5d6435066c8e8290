"""Proofs of the forward: what the loss is computed from, and that nothing new stands in its way.

At a generation's first step the policy is the one that scored the tokens before. At later steps it has moved. The plain
forward is under the run's sampling distribution, without packing and shared prefixes.

Proof `forward`.
Shows: at a generation's first step, every log-prob in the loss is that of the scoring pass; at later steps, and in
generations with stale tokens, those of one drawn completion per rank are those of a plain forward with the weights of
that step.
Does not show: at later steps, a fault in completions that are not drawn.
When: every step that the gap does not cover completely.

Proof `hooks`.
Shows: no hook of a module, a parameter or all modules, no forward, no attention function and no backward of the
trainer has appeared or was replaced since training began, and no number or text that a module computes with (the
scaling of an adapter, the epsilon of a norm) has changed. What was there at the beginning, and what a callback has
changed, is taken, and the receipt names it.
Does not show: hooks of Lockstep, transformers, accelerate, peft, DeepSpeed and bitsandbytes; hooks of autograd's
nodes, and code inside a function that stays the same (`model_gradient` shows what they do).
When: every step: before its first forward, and before the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules import module as modules
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.errors import ProofError
from lockstep.learn.methods.objective import TokenBatch
from lockstep.models.arithmetic import Precision
from lockstep.watch.gap import GapStats, over_limits
from lockstep.watch.plain_forward import sampled_logps
from lockstep.watch.tolerances import Tolerance, own_limit

if TYPE_CHECKING:
    from lockstep.learn.update import Policy


_CAUSE = (
    "the forward of the loss computes something else than the forward that scored the tokens: another "
    "temperature, prompt, mask or order of positions, or weights that changed in between"
)
_FIX = (
    "let nothing change the model or the run's sampling settings during training; otherwise report it "
    "with this message"
)


def check_repeated(difference: GapStats, limit: Tolerance, version: int) -> None:
    """Compare the log-probs of a generation's first step with those of the scoring pass, for the same policy."""
    if over := over_limits(difference, limit):
        raise ProofError(
            "forward",
            f"at the first step of the generation of version {version}, {difference.tokens} tokens have other "
            f"log-probs than in "
            f"the scoring pass with the same weights: {', '.join(over)} nats, worst in request {difference.worst}",
            _CAUSE,
            _FIX,
        )


def check_plain(
    model: PreTrainedModel,
    completion: Completion,
    logps: torch.Tensor,
    distribution: Distribution,
    precision: Precision,
) -> None:
    """Compare (S,) log-probs of a completion's sampled tokens, from the forward of the loss, with a plain forward's."""
    limit = own_limit(precision, model)
    gap = (sampled_logps(model, completion, distribution, precision).cpu() - logps.detach().cpu()).abs()
    mean, largest = float(gap.mean()), float(gap.max())
    # Few tokens: the limit on the mean of many would be too narrow.
    if not (mean <= limit.mean_of(len(gap)) and largest <= limit.largest(len(gap))):
        raise ProofError(
            "forward",
            f"the loss uses log-probs of completion {completion.key} that differ from a plain forward with "
            f"the same weights by "
            f"{mean:.2g} nats on average and {largest:.2g} at most, over {len(gap)} tokens",
            _CAUSE,
            _FIX,
        )


@dataclass(frozen=True, slots=True)
class PlainForward:
    """One drawn completion of a step, which is also scored by a plain forward."""

    completion: Completion
    distribution: Distribution
    precision: Precision

    def is_in(self, batch: TokenBatch) -> bool:
        """Whether a pack has the completion."""
        return str(self.completion.key) in [s.name for s in batch.sequences]

    def check(self, model: PreTrainedModel, batch: TokenBatch) -> None:
        """Compare, if the pack has the completion."""
        start = 0
        for s in batch.sequences:
            if s.name == str(self.completion.key):
                own = batch.logps[start : start + s.length]
                check_plain(model, self.completion, own, self.distribution, self.precision)
            start += s.length


def drawn_forward(
    completions: Sequence[Completion],
    names: Sequence[str],
    policy: Policy,
    precision: Precision,
    seed: tuple[int, ...],
) -> PlainForward | None:
    """Draw one of the named completions, which a step learns from; None if it learns from none."""
    if not names or policy.rules is None:
        return None
    name = names[int(np.random.default_rng(seed).integers(len(names)))]
    (found,) = [c for c in completions if str(c.key) == name]
    return PlainForward(found, policy.rules.distribution, precision)


# By place, such as "gradient hook of lm_head.weight": what stands there.
Standing = dict[str, tuple[Any, ...]]
_OF_MODULES = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_OF_TENSORS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "hook after the accumulation",
}
_LIBRARIES = (
    "lockstep",
    "transformers",
    "accelerate",
    "peft",
    "torch.distributed",
    "deepspeed",
    "bitsandbytes",
)
_PLAIN = {bool, int, float, str}
# Attributes that a run may change: modes, names, and what rotary embeddings keep of the longest sequence so far.
_CHANGING = {
    "attention_scaling",
    "gradient_checkpointing",
    "max_seq_len_cached",
    "name_or_path",
    "training",
    "warnings_issued",
}
# Faults that are injected are nobody's own.
_FAULTS = "lockstep.extras.selftest"


def standing(trained: Sequence[torch.nn.Module], backward: Callable[..., Any]) -> Standing:
    """What stands in the way of a forward of the trained modules, and of a backward by this function, now."""
    found: Standing = {
        "backward of the trainer": (_function(backward),),
        "torch.Tensor.backward": (torch.Tensor.backward,),
    }
    for hooks, title in _OF_MODULES.items():
        found[f"global {title} of modules"] = tuple(getattr(modules, f"_global{hooks}").values())
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        found[f"attention function {name!r}"] = (function,)
    for root in trained:
        for name, module in root.named_modules():
            own, whose = vars(module), name or type(module).__name__
            found[f"forward of {whose}"] = (_function(own.get("forward", type(module).forward)),)
            for hooks, title in _OF_MODULES.items():
                if own[hooks]:
                    found[f"{title} of {whose}"] = tuple(own[hooks].values())
            for setting, value in own.items():
                if setting not in _CHANGING and setting[0] != "_" and _is_setting(value):
                    found[f"setting {setting} of {whose}"] = (repr(value),)
            if isinstance(module, PreTrainedModel):
                found[f"attention of {whose}"] = (module.config._attn_implementation,)
        for name, parameter in root.named_parameters():
            for hooks, title in _OF_TENSORS.items():
                if held := getattr(parameter, hooks):
                    found[f"{title} of {name}"] = tuple(held.values())
    return found


class HeldHooks:
    """What stood in the way when training began, and what callbacks have changed since."""

    def __init__(self, now: Callable[[], Standing]) -> None:
        self._now = now
        self._noted: Standing | None = None
        self._taken: list[str] = []

    def note(self) -> None:
        """Take everything that stands there now: training begins."""
        self._noted = found = self._now()
        self._taken = [
            f"{place}: {name_of(one)}"
            for place, held in found.items()
            if "hook" in place
            for one in held
            if not _is_of_a_library(one)
        ]

    def news(self) -> list[str]:
        """What was taken since the last call: the user's hooks from the beginning, and changes of callbacks."""
        found, self._taken = self._taken, []
        return found

    @contextmanager
    def taking(self) -> Iterator[None]:
        """A context in which the user's own code may change everything."""
        before = self._now()
        yield
        after, noted = self._now(), self._noted
        if noted is None:
            return
        for place in before.keys() | after.keys():
            old, new = before.get(place, ()), after.get(place, ())
            if not _same(old, new):
                # What was changed before, and not by a callback, stays to be found.
                own = noted.get(place, ())
                added = [one for one in new if not _among(one, old)]
                noted[place] = (*(one for one in own if _among(one, new)), *added)
                self._taken += [f"{place}: {name_of(one)}" for one in added if not _is_of_a_library(one)]

    def check(self) -> None:
        """Check that everything stood there when training began, or was put there by a callback."""
        if self._noted is None:
            self.note()
        for place, held in self._now().items():
            known = (self._noted or {}).get(place, ())
            # A new name in the registry is nothing that the model uses. Some modules keep numbers of a first forward.
            if not known and place.startswith(("attention function", "setting")):
                continue
            for one in held:
                if not _among(one, known) and not _is_of_a_library(one):
                    was = f" in place of {name_of(known[0])}" if known and "hook" not in place else ""
                    raise ProofError(
                        "hooks",
                        f"{place} is {name_of(one)}{was}; it was not there when training began",
                        "code outside of Lockstep changed what gradients pass through, and not in a callback",
                        "register hooks before train() or in a TrainerCallback, where they are noted and "
                        "taken; do not replace forwards and attention functions while a run goes on",
                    )


def name_of(one: Any) -> str:
    """The full name of a function, or a text."""
    if isinstance(one, str):
        return repr(one)
    function = _function(one)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{_module_of(function)}.{getattr(code, 'co_qualname', None) or name}"


def _function(one: Any) -> Any:
    """The function behind a bound method or a partial."""
    while isinstance(one, functools.partial):
        one = one.func
    return getattr(one, "__func__", one)


def _module_of(function: Any) -> str:
    """The module whose code runs. `functools.wraps` gives a function another one's `__module__`, not its globals."""
    if (own := getattr(function, "__globals__", None)) is not None:
        return str(own.get("__name__", ""))
    other = "torch" if "torch" in repr(function) else type(function).__module__
    return getattr(function, "__module__", None) or other


def _is_of_a_library(one: Any) -> bool:
    if isinstance(one, str):
        return False
    where = _module_of(_function(one))
    is_in = any(where == own or where.startswith(f"{own}.") for own in _LIBRARIES)
    return is_in and not where.startswith(_FAULTS)


def _is_setting(value: Any) -> bool:
    """Whether an attribute of a module is a setting. PEFT keeps the scaling of each adapter in a dict."""
    return type(value) in _PLAIN or (type(value) is dict and {type(v) for v in value.values()} <= _PLAIN)


def _among(one: Any, others: Sequence[Any]) -> bool:
    return any(
        one is other or _function(one) is _function(other) or (isinstance(one, str) and one == other)
        for other in others
    )


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(_among(one, others) for one in some)
