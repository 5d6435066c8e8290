"""The adapter probe: what an adapter adds in the engine's own layers, compared with what the trainer's adapter adds.

The engine answers with the outputs of its layers with and without the adapter (`contract/adapters.py`).

Proof `adapter_probe`.
Shows: with `vllm_enable_lora`: the difference between a layer's outputs with and without the adapter, in the engine,
is what the trainer's adapter adds. The module probe compares the outputs with the adapter on, where a young adapter
is too small to be seen.
Does not show: in half precision, an adapter whose effect is below the rounding of the outputs.
When: before the first sample: all layers of the adapter. Every push: 6 of them, drawn again each time.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from lockstep.contract.adapters import DOWN, UP, AdapterReceiver
from lockstep.contract.probe import probe_vector
from lockstep.devices import on_host
from lockstep.errors import ProofError
from lockstep.extras.lora_alone.adapter_arguments import adapter_arguments
from lockstep.extras.lora_alone.adapter_push import AdapterPusher
from lockstep.extras.lora_alone.adapter_source import (
    AdapterSource,
    BaseSource,
    EffectiveSource,
    adapter_shape,
    check_alone,
)
from lockstep.watch.push import PushExtension, PushWatch
from lockstep.watch.tolerances import output_rounding

# Layers that a probe asks at a push of a run.
_SAMPLE = 6
# Largest difference ÷ rms of what the adapter adds, beyond the rounding of the outputs with and without it. Tests on
# tiny models stay below 1e-5 in fp32, and below the limit in bf16. `benchmarks/servers/adapter_push.py --alarms`
# counts alarms on the packaged model.
_LIMIT, _HALF_LIMIT = 1e-4, 0.05


def check_adapter_probe(
    model: torch.nn.Module,
    engine: AdapterReceiver,
    dtype: torch.dtype,
    seed: int,
    version: int,
    *,
    every: bool,
) -> dict[str, float]:
    """Errors of what the adapter adds, per layer.

    Args:
        dtype: dtype in which the engine computes.
        every: ask all adapted layers; otherwise a sample.
    """
    limits = engine.limits
    assert limits is not None
    source = AdapterSource(model, limits.dtype)
    layers = list(source.layers)
    if not every:
        layers = random.Random(seed).sample(layers, min(_SAMPLE, len(layers)))
    limit = _LIMIT if dtype in (torch.float32, torch.float64) else _HALF_LIMIT
    errors = {}
    answers, tensors = engine.probe(layers, seed), [layer + end for layer in layers for end in (DOWN, UP)]
    held = dict(zip(tensors, on_host([source.tensor(tensor).float() for tensor in tensors]), strict=True))
    for name, answer in answers.items():
        layer = name.rpartition("/")[2]
        down, up = held[layer + DOWN], held[layer + UP]
        inputs = probe_vector(seed, layer, down.shape[1]).to(dtype).float()
        added = linear(linear(inputs, down), up)
        # A difference of two outputs has the rounding of both.
        rounding = output_rounding(dtype) * (answer[0].abs() + answer[1].abs())
        beyond = float(((answer[2] - added).abs() - rounding).max().clamp(min=0.0))
        error = beyond / (float(added.square().mean().sqrt()) or 1.0)
        # A NaN would pass every comparison with a limit.
        errors[name] = error if error == error else float("inf")
    missing = [layer for layer in layers if not any(name.rpartition("/")[2] == layer for name in errors)]
    wrong = [*missing, *sorted((n for n, e in errors.items() if not e <= limit), key=lambda n: -errors[n])]
    if wrong:
        shown = ", ".join(f"{name} by {errors.get(name, float('inf')):.2g}" for name in wrong[:4])
        raise ProofError(
            "adapter_probe",
            f"at version {version} the adapter adds something else in {len(wrong)} of {len(layers)} layers of "
            f"the engine than in "
            f"the trainer (limit {limit:g} of its size): {shown}{', …' if len(wrong) > 4 else ''}",
            "the engine does not apply the adapter, scales it otherwise, or applies another one",
            "do not train on this engine; name the model, the adapter's config and the engine's version in a report",
        )
    return errors


class AdapterPush(PushExtension):
    """Pushes the adapter alone, and proves it beside the module probe."""

    def __init__(self, watch: PushWatch) -> None:
        super().__init__(watch)
        self._pusher = AdapterPusher(watch.model, watch.engine)
        self.push = self._pusher.push
        self.source, self.held = partial(EffectiveSource, dtype=watch.engine_dtype), BaseSource

    def prove_modules(self, seed: int, version: int, *, every: bool) -> None:
        watch = self.watch
        check_adapter_probe(
            watch.model, self._pusher.receiver, watch.engine_dtype, seed, version, every=every
        )


def engine_arguments(policy: torch.nn.Module) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the adapter of a policy.

    Raises:
        InputError: the adapter cannot be sent alone, or its rank is too large.
    """
    check_alone(policy)
    return adapter_arguments(*adapter_shape(policy))
