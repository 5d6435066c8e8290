"""Who learns in the comparisons of `drawn.py`: small models of every kind of attention, in double and in single precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from tiny import make_model, make_stateful

from lockstep.models.adapters import causal_model
from lockstep.training.forward.tree_attention import adopt_tree_attention

WIDTH = 64


@dataclass
class Subject:
    """Who learns.

    Attributes:
        model, critic: what the fast path goes through; the critic is used by PPO alone.
        exact_model, exact_critic: the same weights in double precision, which the reference goes through.
        relative: by how much a loss, or a gradient in norm, may differ: that of each parameter, and that of all together.
        floor: the same of a parameter's gradient, as a part of the step's largest.
        loss_floor: the same of a loss, as it is: its parts are larger.
    """

    model: Any
    critic: torch.nn.Linear
    exact_model: Any
    exact_critic: torch.nn.Linear
    relative: float
    floor: float
    loss_floor: float

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
    """A model of which an adapter alone is trained; one that has moved, so that the model without it would be another."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make_model(kind, scale=scale, **more), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter *= scale
    return model


# Models by the spread of their weights.
ARCHITECTURES: dict[str, Callable[[float], Any]] = {
    "qwen2": lambda scale: make_model("qwen2", scale=scale),
    "llama, tied": lambda scale: make_model("llama", tied=True, scale=scale),
    "adapted": lambda scale: adapted("qwen2", scale),
    "mistral within its window": lambda scale: make_model("mistral", sliding_window=64, scale=scale),
}
# Those that cannot attend within a tree, and get a row a completion: every sequence is longer than the window.
ROWS: dict[str, Callable[[float], Any]] = {
    "sliding": lambda scale: make_model("mistral", sliding_window=3, scale=scale),
    "sliding, adapted": lambda scale: adapted("mistral", scale, sliding_window=3),
    "stateful": lambda scale: make_stateful(WIDTH, scale=scale),
}


def in_double(kind: str) -> Subject:
    """In double precision a difference is a mistake; what is left is the float32 of advantages, values and columns."""
    model, critic = (ARCHITECTURES | ROWS)[kind](0.3).double(), make_critic().double()
    adopt_tree_attention(causal_model(model))
    return Subject(model, critic, model, critic, relative=1e-5, floor=1e-7, loss_floor=1e-6)


def in_single(kind: str) -> Subject:
    """As a run computes, beside a reference that does not round.

    Below the floor: gradients that would be zero but for rounding. A key's bias adds the same to all scores of a query, up to the
    rotary embedding, and softmax takes that off again; parts of a loss may cancel likewise. Weights of a more usual spread: those
    of the other tests give logits whose rounding alone moves a log-prob by 3e-5 nats, and the ratio of a whole completion by more.
    """
    model, critic = (ARCHITECTURES | ROWS)[kind](0.1), make_critic()
    exact = copy.deepcopy(model).double()
    adopt_tree_attention(causal_model(model))
    exact_critic = copy.deepcopy(critic).double()
    return Subject(model, critic, exact, exact_critic, relative=1e-5, floor=1e-6, loss_floor=5e-6)
