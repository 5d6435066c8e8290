"""vLLM's Transformers backend changes the class of the model that it runs.

The trainer's model of that class stays as it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import VLLM
from model_families import make_family, save_family
from stages import stage_on
from transformers import PhiModel

pytestmark = VLLM


def what_vllm_changes() -> tuple[object, ...]:
    names = ("__init__", "__call__", "save_aot_compiled_function", "_ignore_compile_vllm")
    return PhiModel.__bases__, *(vars(PhiModel).get(name) for name in names)


def test_a_model_of_the_same_class_is_trained_beside_the_engine(tmp_path: Path) -> None:
    before = what_vllm_changes()
    with stage_on(save_family("phi", tmp_path / "model"), tmp_path, use_vllm=True, bf16=False) as stage:
        served = stage.engine.llm.apply_model(lambda model: type(model.model))[0]  # type: ignore[attr-defined]
        # The engine runs a model of transformers, and its class has what vLLM added.
        assert issubclass(served, PhiModel)
        assert {base.__name__ for base in served.__bases__} == {"PhiModel", "TorchCompileWithNoGuardsWrapper"}
        assert what_vllm_changes() == before
        called: list[torch.nn.Module] = []
        with stage.trainer.watch.hooks.taking():
            stage.model.base_model.register_forward_hook(lambda module, inputs, output: called.append(module))
        assert stage.step() > 0
        assert called
        # Another model of the class can be made while the engine runs.
        make_family("phi")(torch.tensor([[1, 2, 3]]))


@pytest.mark.release
def test_an_embedding_that_transformers_scales_has_the_trainers_weights(tmp_path: Path) -> None:
    with stage_on(
        save_family("vaultgemma", tmp_path / "model"), tmp_path, use_vllm=True, bf16=False
    ) as stage:
        assert stage.push(every_module=True).failed == []
        assert stage.step() > 0
