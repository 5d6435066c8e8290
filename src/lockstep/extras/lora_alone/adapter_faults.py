"""Faults of adapters alone in vLLM's own LoRA: D1 to D5. They need a stage with `vllm_enable_lora`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch

import lockstep.extras.lora_alone.adapter_push as pushes
import lockstep.extras.lora_alone.adapter_source as sources
import lockstep.extras.lora_alone.engine_adapters as in_process
from lockstep.contract.adapters import UP
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.vllm.port.engine import lora_of_linear
from lockstep.extras.selftest.seams import REACH, Fault, Named, Patch, is_vllm, vllm_worker
from lockstep.extras.verify.stage import Stage
from lockstep.weights.push import SyncRecord


def _kept_instead(stage: Stage, change: Callable[[list[Named]], Named]) -> Patch:
    """The engine acknowledges the adapter that has arrived, and keeps another one, made from all that have arrived."""
    memory = _memory(stage)
    real, arrived = memory.keep, list[Named]()

    def keep(name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        found = real(name, tensors)
        arrived.append(memory.tensors[name])
        memory.tensors[name] = change(arrived)
        return found

    return patch.object(memory, "keep", keep)


def _old_kept(stage: Stage) -> Patch:
    return _kept_instead(stage, lambda arrived: arrived[max(len(arrived) - 2, 0)])


def _of_another_run(stage: Stage) -> Patch:
    return _kept_instead(stage, lambda arrived: [(name, tensor.flip(0)) for name, tensor in arrived[-1]])


def _scaled(stage: Stage) -> Patch:
    return _kept_instead(
        stage, lambda arrived: [(n, t * 1.01 if n.endswith(UP) else t) for n, t in arrived[-1]]
    )


def _scaled_by_the_kernel(stage: Stage) -> Patch:
    (kernel, *_) = _memory(stage).slots.punica_wrapper_mapping.values()
    real, wrong = kernel.add_lora_linear, _scale(stage)
    return patch.object(
        kernel, "add_lora_linear", lambda y, x, a, b, scale, slices: real(y, x, a, b, wrong, slices)
    )


def _scaled_by_the_source(stage: Stage) -> Patch:
    real, wrong = sources.full_factors, _scale(stage)

    def factors(layer: Any, shards: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
        down, up, scaling = real(layer, shards)
        return down, up, scaling * wrong

    return patch.object(sources, "full_factors", factors)


def _stale_source(stage: Stage) -> Patch:
    """Push and probe read an adapter that is one push old. Both agree with the engine; only the trainer moves on."""
    held: list[dict[str, torch.Tensor]] = []

    class Old(sources.AdapterSource):
        def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
            super().__init__(model, dtype)
            held.append({name: tensor.clone() for name, tensor in sources.AdapterSource.__iter__(self)})

        def tensor(self, name: str) -> torch.Tensor:
            return held[0][name] if held else super().tensor(name)

    return patch.object(pushes, "AdapterSource", Old)


def _left_out_of_requests(stage: Stage) -> Patch:
    engine = stage.engine.llm.llm_engine  # type: ignore[attr-defined]
    real = engine.add_request
    return patch.object(
        engine, "add_request", lambda name, prompt, params, lora_request=None: real(name, prompt, params)
    )


def _not_applied(stage: Stage) -> Patch:
    def without(self: Any, x: Any, output: Any) -> Any:
        counted()
        return output

    counted = REACH.of(lambda: None)
    return patch.object(*lora_of_linear(), without)


def _slot_overwritten(stage: Stage) -> Patch:
    """After the proofs of a push, another adapter is written into the place of this run's."""
    watch, memory = stage.trainer.source.watch, _memory(stage)
    real = watch.pushed

    def pushed(record: SyncRecord) -> None:
        real(record)
        for module in memory.slots.modules.values():
            for up in module.lora_b_stacked:
                up.copy_(up.flip(2))

    return patch.object(watch, "pushed", pushed)


def _one_name(stage: Stage) -> Patch:
    return patch.object(in_process, "adapter_name", lambda version, pushes: "adapter")


def _scale(stage: Stage) -> float:
    """A scale whose effect on a layer's outputs is above their limit: 0.05 to 0.08 of their size in half precision."""
    return 1.1 if stage.trainer.proofs.limit.is_coarse else 1.01


def _memory(stage: Stage) -> Any:
    # Imported here, because `lockstep verify --engine transformers` runs without vLLM.
    from lockstep.engines.vllm.port.lora import load_from_memory

    return load_from_memory(vllm_worker(stage))


def _alone(stage: Stage) -> str:
    is_alone = is_vllm(stage) and stage.config.vllm_enable_lora
    return "" if is_alone else "the engine gets no adapter alone (vllm_enable_lora)"


ADAPTER_FAULTS = tuple(
    Fault(name, what, inject, needs=_alone)
    for name, what, inject in (
        ("D1", "an older adapter is kept under a new version", _old_kept),
        ("D1b", "the source of a push gives an older adapter", _stale_source),
        ("D2", "requests reach the engine without their adapter", _left_out_of_requests),
        ("D2b", "the engine's layers do not apply the adapter", _not_applied),
        ("D3", "the engine scales an adapter when it loads it (by 1 %)", _scaled),
        ("D3b", "the engine's kernel scales it (by 1 %, in half precision by 10 %)", _scaled_by_the_kernel),
        ("D3c", "the source of a push scales it (by 1 %, in half precision by 10 %)", _scaled_by_the_source),
        ("D4", "another run's adapter is loaded under this run's name", _of_another_run),
        ("D4b", "another adapter is written into its place after the proofs of the push", _slot_overwritten),
        (
            "D5",
            "every push has the same name, so that the prefix cache finds keys and values of an older one",
            _one_name,
        ),
    )
)
