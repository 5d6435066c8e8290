"""Faults of the model's own backward. Every score of the forward stays right.

B1 to B4 and B8 to B10 are there when a run begins. A stage has passed its first step, so each of them makes its next
step a first one. B5 to B7 appear later, when only a part of every tenth step is checked. Here a part of every step is.

B8 to B10 act only on long sequences: whatever has no more than 60 positions has right gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import lockstep.learn.token_logps as scoring
from lockstep.extras.selftest.seams import Fault, Patch
from lockstep.extras.verify.stage import Stage
from lockstep.models.adapters import causal_model
from lockstep.watch import model_gradient

Handle = torch.utils.hooks.RemovableHandle


def _modules(stage: Stage, *names: str) -> list[torch.nn.Module]:
    return [m for name, m in stage.model.named_modules() if name.rpartition(".")[2] in names]


def _needs(*names: str) -> Callable[[Stage], str]:
    why = f"no module of the model is called {' or '.join(names)}"
    return lambda stage: "" if _modules(stage, *names) else why


@contextmanager
def _hooked(handles: list[Handle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keys_detached(stage: Stage) -> Patch:
    modules = _modules(stage, "k_proj", "v_proj")
    return _hooked([m.register_forward_hook(lambda m, given, made: made.detach()) for m in modules])


def _without_normaliser(stage: Stage) -> Patch:
    """The gradient of the chosen logit is right; that of the softmax's sum is left out."""

    def backward(ctx: Any, of_chosen: torch.Tensor | None, of_entropy: Any) -> tuple[Any, ...]:
        probabilities, _, rows, targets = ctx.saved_tensors
        gradient = torch.zeros_like(probabilities)
        if of_chosen is not None:
            gradient.index_put_((rows, targets), of_chosen / ctx.temperature, accumulate=True)
        return gradient.to(ctx.dtype), None, None, None, None, None

    return patch.object(scoring._ChosenLogps, "backward", staticmethod(backward))


def _attention_halved(stage: Stage) -> Patch:
    def halved(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return ((given[0] + given[0].detach()) / 2, *given[1:])

    return _hooked([m.register_forward_pre_hook(halved) for m in _modules(stage, "o_proj")])


def _layer_zeroed(stage: Stage) -> Patch:
    layer = stage.model.get_decoder().layers[0]
    return _hooked([p.register_hook(torch.zeros_like) for p in layer.parameters() if p.requires_grad])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *flows: torch.Tensor) -> torch.Tensor:
        return -flows[0]


def _trunk_reversed(stage: Stage) -> Patch:
    def reversed_flow(module: torch.nn.Module, given: Any, made: Any) -> Any:
        made.last_hidden_state = Reversed.apply(made.last_hidden_state)
        return made

    return _hooked([causal_model(stage.model).base_model.register_forward_hook(reversed_flow)])


def _parameters_reversed(stage: Stage) -> Patch:
    return _hooked([p.register_hook(torch.neg) for p in stage.model.parameters() if p.requires_grad])


def _gradients_reversed(stage: Stage) -> Patch:
    accelerator = stage.trainer.accelerator
    real = accelerator.backward

    def backward(loss: torch.Tensor, **more: Any) -> None:
        real(loss, **more)
        for parameter in stage.model.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()

    return patch.object(accelerator, "backward", backward)


# Positions of a pack up to which the long faults leave every gradient.
_SHORT = 60


def _detached(rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives some positions of a (rows, T, width) tensor no gradient."""

    def change(made: torch.Tensor) -> torch.Tensor:
        found = made.clone()
        found[:, rows] = made[:, rows].detach()
        return found

    return change


def _long(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Callable[[Stage], Patch]:
    """A change of what all modules of these names give."""

    def inject(stage: Stage) -> Patch:
        modules = _modules(stage, *names)
        return _hooked([m.register_forward_hook(lambda m, given, made: change(made)) for m in modules])

    return inject


def _scaled_late(made: torch.Tensor) -> torch.Tensor:
    """Late positions give twice the gradient."""
    found = made.clone()
    found[:, _SHORT:] = 2 * made[:, _SHORT:] - made[:, _SHORT:].detach()
    return found


_LATE, _EARLY = slice(_SHORT, None), slice(None, -_SHORT)


def _needs_logits(stage: Stage) -> str:
    filtered = stage.trainer.proofs.distribution.sampling.is_filtered
    return "the run's filters leave no row of logits whose sum has a gradient" if filtered else ""


def _fault(id: str, what: str, inject: Callable[[Stage], Patch], needs: Callable[[Stage], str]) -> Fault:
    """A fault that is there when a run begins, so that its hooks are taken for the user's."""

    @contextmanager
    def at_the_first_step(stage: Stage) -> Iterator[None]:
        # A check sees a drawn direction, in which a fault may by chance be small. Here every step has one.
        stage.trainer.watch.model_gradient.forget()
        with patch.object(model_gradient, "EVERY_SUM", 1), _taken(inject)(stage):
            yield

    return Fault(id, what, at_the_first_step, needs)


def _taken(inject: Callable[[Stage], Patch]) -> Callable[[Stage], Patch]:
    """The fault, with its hooks and functions noted, so that no other proof stops the run for them."""

    @contextmanager
    def noted(stage: Stage) -> Iterator[None]:
        hooks = stage.trainer.watch.hooks
        try:
            with patch.object(model_gradient, "EVERY", 1), inject(stage):
                hooks.note()
                yield
        finally:
            hooks.note()

    return noted


BACKWARD_FAULTS = (
    _fault("B1", "keys and values have no gradient", _keys_detached, _needs("k_proj", "v_proj")),
    _fault("B2", "log-softmax without its sum in the backward", _without_normaliser, _needs_logits),
    _fault("B3", "half of the gradient of attention", _attention_halved, _needs("o_proj")),
    _fault("B4", "no gradient in the weights of one layer", _layer_zeroed, lambda stage: ""),
    _fault(
        "B8",
        "no gradient of queries and keys after position 60",
        _long(_detached(_LATE), "q_proj", "k_proj"),
        _needs("q_proj", "k_proj"),
    ),
    _fault(
        "B9",
        "no gradient of values before the last 60 positions",
        _long(_detached(_EARLY), "v_proj"),
        _needs("v_proj"),
    ),
    _fault(
        "B10",
        "twice the gradient of attention after position 60",
        _long(_scaled_late, "o_proj"),
        _needs("o_proj"),
    ),
    Fault("B5", "a hook reverses all gradients, from a later step on", _parameters_reversed),
    Fault("B6", "the gradient of all layers is reversed, from a later step on", _taken(_trunk_reversed)),
    Fault("B7", "a backward reverses .grad, from a later step on", _taken(_gradients_reversed)),
)
