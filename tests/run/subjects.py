"""The models that learn in the comparisons of `drawn.py`: small, with every kind of attention, in two precisions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from tiny import make_model, make_stateful

from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.models.adapters import causal_model

WIDTH = 64


@dataclass
class Subject:
    """A model that learns, with the tolerances of its comparison.

    Attributes:
        model, critic: used by the fast path; only PPO uses the critic.
        exact_model, exact_critic: the same weights in double precision, used by the reference.
        relative: tolerance of a loss and of a gradient's norm, relative; for each parameter and for all parameters
            together.
        floor: tolerance of a parameter's gradient as a share of the largest gradient of the step.
        loss_floor: absolute tolerance of a loss, because the parts of a loss are larger than the loss.
        logp_error: how far a log-prob of the fast path may be from the exact one, in nats.
    """

    model: Any
    critic: torch.nn.Linear
    exact_model: Any
    exact_critic: torch.nn.Linear
    relative: float
    floor: float
    loss_floor: float
    logp_error: float = 0.0

    @property
    def parts(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        return self.model, self.critic

    @property
    def exact_parts(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        return self.exact_model, self.exact_critic


def make_critic() -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(7)
    critic = torch.nn.Linear(WIDTH, 1)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return critic


def adapted(kind: str, scale: float, **more: Any) -> Any:
    """A model of which only an adapter is trained.

    The adapter is not zero, so the model without it gives other results.
    """
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make_model(kind, scale=scale, **more), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter *= scale
    return model


# The models, by the scale of their weights.
ARCHITECTURES: dict[str, Callable[[float], Any]] = {
    "qwen2": lambda scale: make_model("qwen2", scale=scale),
    "llama, tied": lambda scale: make_model("llama", tied=True, scale=scale),
    "adapted": lambda scale: adapted("qwen2", scale),
    "mistral within its window": lambda scale: make_model("mistral", sliding_window=64, scale=scale),
}
# Models that cannot attend within a tree and get one row per completion: every sequence is longer than the window.
ROWS: dict[str, Callable[[float], Any]] = {
    "sliding": lambda scale: make_model("mistral", sliding_window=3, scale=scale),
    "sliding, adapted": lambda scale: adapted("mistral", scale, sliding_window=3),
    "stateful": lambda scale: make_stateful(WIDTH, scale=scale),
}


def in_double(kind: str) -> Subject:
    """In double precision a difference is a mistake; only advantages, values and columns are still in float32."""
    model, critic = (ARCHITECTURES | ROWS)[kind](0.3).double(), make_critic().double()
    adopt_tree_attention(causal_model(model))
    return Subject(model, critic, model, critic, relative=1e-5, floor=1e-7, loss_floor=1e-6)


def in_single(kind: str) -> Subject:
    """A model in the precision of a run, beside a reference in double precision.

    Gradients below the floor would be zero without rounding. An example is the bias of a key: up to the rotary
    embedding it adds the same value to all scores of a query, and softmax removes this value again. Parts of a loss
    may cancel in the same way. The weights
    have a more usual scale: with the weights of the other tests, the rounding of the logits alone changes a log-prob
    by 3e-5 nats, and the ratio of a whole completion by more.
    """
    model, critic = (ARCHITECTURES | ROWS)[kind](0.1), make_critic()
    exact = copy.deepcopy(model).double()
    adopt_tree_attention(causal_model(model))
    exact_critic = copy.deepcopy(critic).double()
    # Four units in the last place of a log-prob between −4 and −8. Measured: 7e-7 (root mean square of 400 tokens).
    return Subject(model, critic, exact, exact_critic, 1e-5, floor=1e-6, loss_floor=5e-6, logp_error=2**-19)
