"""Count the forwards and backwards of real runs; and rewards that make some of them unnecessary.

Used by: `test_work.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from methods import GROUPS, reference_of

from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.update import Policy
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.watch import forward as plain_forward
from lockstep.watch import reference as frozen
from lockstep.watch.model_gradient import Checked

# There are two groups per step: the rewards of the first prompt of `PROMPTS` are equal, those of the second one are
# not.
TWO_GROUPS = {**GROUPS, "max_steps": 1, "shuffle_dataset": False}


def agreeing(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that is equal for all completions of an even prompt, and different for those of an odd prompt."""
    return [float(i) if int(prompt.split()[-1]) % 2 else 1.0 for i, prompt in enumerate(prompts)]


def all_apart(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that is different for each completion, so that all of them have a gradient."""
    return [float(i) for i in range(len(completion_ids))]


def scored_in_part(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that is None for an even prompt, and different for each completion of an odd prompt."""
    return [float(i) if int(prompt.split()[-1]) % 2 else None for i, prompt in enumerate(prompts)]


@dataclass
class Work:
    """The sequences that went through a model in a run.

    Attributes:
        learning: the sequences that were scored with gradient, one entry per forward.
        looking: the sequences that were scored without gradient, one entry per forward.
        adapters: for each forward, whether the adapter was on, if there is one.
        forwards: the number of forwards through policy or reference, from any caller, after the start of the run is
            proven.
        checks: the number of sequences whose reference log-probs were computed a second time, one per pass of the
            reference.
        outputs: the number of forwards that show whether the reference still computes what it computed at first, and
            whether it was right then.
        repeated: the number of sequences whose log-probs were computed a second time by a plain forward: one per
            later step of a generation, if it learns from any.
        backwards: the number of the trainer's backward calls.
    """

    learning: list[tuple[Any, list[str]]] = field(default_factory=list)
    looking: list[tuple[Any, list[str]]] = field(default_factory=list)
    adapters: list[bool] = field(default_factory=list)
    forwards: int = 0
    checks: int = 0
    outputs: int = 0
    repeated: int = 0
    backwards: int = 0

    def learned(self) -> Counter[str]:
        """How often each sequence was scored with gradient."""
        return Counter(name for _, names in self.learning for name in names)

    def looked(self, model: Any = None) -> Counter[str]:
        """How often each sequence was scored without gradient, by this model or by any model."""
        return Counter(name for by, names in self.looking if model in (None, by) for name in names)


@contextmanager
def counted(run: OnlineTrainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Count the work of a run: the passes that score a pack.

    Hooks on the models show that there are no other passes.
    """
    work = Work()
    real_check, real_plain = frozen.check_reference_scores, plain_forward.check_plain
    real_outputs, real_second = run.watch.reference_outputs.check, frozen._second_way
    real_score, real_backward, real_start = Policy.score, run.accelerator.backward, run.source.watch.start

    def start(*args: Any) -> None:
        real_start(*args)
        # Subtract the forwards of the canary.
        work.forwards = 0

    def forward(*_: Any) -> None:
        work.forwards += 1

    def score(policy: Policy, pack: Pack, *args: Any, **kwargs: Any) -> TokenScores:
        seen = work.learning if torch.is_grad_enabled() else work.looking
        seen.append((policy.model, [s.name for s in pack.sequences]))
        work.adapters += [
            not module.disable_adapters
            for module in policy.model.modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        ][:1]
        return real_score(policy, pack, *args, **kwargs)

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        work.backwards += 1
        real_backward(loss, **kwargs)

    def check(*args: Any) -> None:
        work.checks += 1
        real_check(*args)

    def outputs(*args: Any) -> None:
        work.outputs += 1
        real_outputs(*args)

    def second_way(*args: Any) -> torch.Tensor | None:
        found = real_second(*args)
        work.outputs += found is not None
        return found

    def plain(*args: Any) -> None:
        work.repeated += 1
        real_plain(*args)

    monkeypatch.setattr(frozen, "check_reference_scores", check)
    monkeypatch.setattr(run.watch.reference_outputs, "check", outputs)
    monkeypatch.setattr(frozen, "_second_way", second_way)
    monkeypatch.setattr(plain_forward, "check_plain", plain)
    monkeypatch.setattr(Policy, "score", score)
    monkeypatch.setattr(run.accelerator, "backward", backward)
    monkeypatch.setattr(run.source.watch, "start", start)
    # Its own tests count it.
    monkeypatch.setattr(run.watch.model_gradient, "begin", lambda *_: Checked({}))
    reference = reference_of(run)
    with ExitStack() as hooks:
        for model in (run.loop.policy().model, *([reference] if reference is not None else [])):
            hooks.enter_context(model.base_model.register_forward_pre_hook(forward))
        yield work
    passes = len(work.learning) + len(work.looking)
    assert work.forwards == passes + work.checks + work.outputs + work.repeated, f"{work.forwards} forwards"
    assert work.repeated <= run.state.global_step - -(
        -run.state.global_step // run.config.optimizer_steps_per_generation
    )
    assert work.checks == (run.loop.generation_number if run.reference is not None else 0)
    assert work.backwards == len(work.learning)


def logged(run: OnlineTrainer, name: str) -> float:
    return sum(log.get(name, 0.0) for log in run.state.log_history)


def names_of(run: Any) -> tuple[list[str], list[str]]:
    """The requests of the last generation: all of them, and those of odd prompts."""
    groups = [
        (int(g.prompt.source.split()[-1]), [str(r.completion.key) for r in g.rollouts])
        for g in run.loop.generation.groups
    ]
    return [name for _, names in groups for name in names], [
        name for n, names in groups if n % 2 for name in names
    ]


def worked(run: OnlineTrainer, monkeypatch: pytest.MonkeyPatch) -> Work:
    """The work of a whole run; every sampled token is proven, or counted as left aside."""
    sampled: list[int] = []
    real = run.loop.rollout

    def rollout(*args: Any, **kwargs: Any) -> Any:
        groups = real(*args, **kwargs)
        sampled.extend(len(r.completion.token_ids) for group in groups for r in group.rollouts)
        return groups

    monkeypatch.setattr(run.loop, "rollout", rollout)
    with counted(run, monkeypatch) as work:
        run.train()
    steps = run.config.passes
    checked, aside = logged(run, "parity/checked_tokens"), logged(run, "parity/aside_tokens")
    assert checked + aside == steps * sum(sampled) > 0
    return work
