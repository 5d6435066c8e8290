"""Adapters and frozen towers with pictures, on the transformers engine: proven steps, gradients of plain rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from looking import adapter, gaps, look, tower_of
from seeing import IN_VLLM, make_seeing, make_seeing_tokenizer, save_seeing
from test_packs_with_pictures import plain_logps, scored, sequences_of
from transformers import BitsAndBytesConfig

from lockstep.errors import InputError, ProofError
from lockstep.images.prompts import ImagePrompts
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_sequences
from lockstep.models.adapters import add_adapter
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.weights.push import weights_of

LIMIT = 1e-3


# One family with patches, and one with tiles. The others have the same kinds of layers.
@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", family)


def train(folder: str, tmp_path: Path, **given: Any) -> tuple[GRPOTrainer, set[str]]:
    """A run of two steps, and the names of the parameters that it changed."""
    trainer = look(folder, tmp_path, use_vllm=False, **given)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    return trainer, {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("where", ["language", "all"])
def test_an_adapter_learns_alone_and_its_merged_weights_are_what_the_engine_samples_with(
    where: str, family: str, folder: str, tmp_path: Path
) -> None:
    trainer, moved = train(folder, tmp_path, peft_config=adapter(family, where), beta=0.1)
    assert moved == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in moved)
    assert any(tower_of(family, name) for name in moved) == (where == "all")
    # Sampling pushes the weights of the last step.
    trainer.rollouts()
    theirs: Any = trainer.engine
    held = dict(theirs.model.named_parameters())
    base = dict(make_seeing(family).named_parameters())
    sent = dict(weights_of(trainer.model))
    assert all(torch.equal(tensor, held[name]) for name, tensor in sent.items())
    changed = {name for name, tensor in sent.items() if not torch.equal(tensor.cpu(), base[name])}
    assert any(tower_of(family, name) for name in changed) == (where == "all")


def test_a_frozen_tower_stays_and_the_language_part_learns(family: str, folder: str, tmp_path: Path) -> None:
    trainer, moved = train(folder, tmp_path, freeze_vision_tower=True)
    assert moved == {name for name, _ in trainer.model.named_parameters() if not tower_of(family, name)}


def test_an_adapter_in_a_frozen_tower_stays_too(family: str, folder: str, tmp_path: Path) -> None:
    _, moved = train(folder, tmp_path, freeze_vision_tower=True, peft_config=adapter(family, "all"))
    assert moved
    assert not any(tower_of(family, name) for name in moved)


def test_a_frozen_tower_that_changes_all_the_same_is_found(folder: str, tmp_path: Path) -> None:
    trainer = look(folder, tmp_path, use_vllm=False, freeze_vision_tower=True, max_steps=3)
    step = trainer.training_step

    def writing(*given: Any, **more: Any) -> Any:
        with torch.no_grad():
            next(p for p in trainer.model.parameters() if not p.requires_grad).add_(1e-3)
        return step(*given, **more)

    trainer.training_step = writing  # type: ignore[method-assign]
    with pytest.raises(ProofError, match="frozen tensors have changed") as found:
        trainer.train()
    assert found.value.check == "reference"


def test_what_leaves_nothing_to_freeze_or_to_train_is_refused(
    untied_dir: str, family: str, folder: str, tmp_path: Path
) -> None:
    text = Dataset.from_dict({"prompt": ["what is"] * 4}).to_list()
    with pytest.raises(InputError, match="no vision tower"):
        look(untied_dir, tmp_path, text, use_vllm=False, freeze_vision_tower=True)
    in_tower = peft.LoraConfig(
        target_modules=r".*(visual|vision_model)\..*(qkv|q_proj)", task_type="CAUSAL_LM"
    )
    with pytest.raises(InputError, match="leaves nothing to train"):
        look(folder, tmp_path, use_vllm=False, freeze_vision_tower=True, peft_config=in_tower)


@pytest.mark.parametrize("kind", list(IN_VLLM))
def test_packs_give_an_adapter_the_gradients_of_plain_rows(kind: str, tmp_path: Path) -> None:
    folder = save_seeing(tmp_path / "seeing", kind)

    def adapted() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return add_adapter(make_seeing(kind), config)

    packed, plain = adapted(), adapted()
    adopt_tree_attention(packed.get_base_model())
    sequences = sequences_of(ImagePrompts(make_seeing(kind), make_seeing_tokenizer(kind), folder))
    (pack,) = pack_sequences(sequences, 4096)
    weights = {s.name: torch.linspace(-1.0, 1.0, s.length) for s in sequences}
    sum(
        (weights[name] * logps).sum() for name, logps in scored(packed.get_base_model(), pack).items()
    ).backward()
    for sequence in sequences:
        (weights[sequence.name] * plain_logps(plain.get_base_model(), sequence)).sum().backward()
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert any(tower_of(kind, name) for name in theirs)
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            due = theirs[name]
            assert (
                float((parameter.grad - due).abs().max()) < 1e-4 * float(due.abs().max()) + 1e-6 * largest
            ), name


@pytest.mark.long
def test_gradient_checkpointing_gives_an_adapter_the_same_step(
    family: str, folder: str, tmp_path: Path
) -> None:
    def step(on: bool) -> dict[str, torch.Tensor]:
        given = {"gradient_checkpointing": on, "max_steps": 1, "optim": "sgd", "learning_rate": 0.5}
        trainer = look(
            folder, tmp_path / str(on), use_vllm=False, peft_config=adapter(family, "all"), **given
        )
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    plain, saving = step(False), step(True)
    assert any("lora_B" in name and tower_of(family, name) and p.any() for name, p in saving.items())
    for name, value in saving.items():
        torch.testing.assert_close(value, plain[name], atol=1e-6, rtol=1e-4)


@pytest.mark.long
def test_base_weights_in_4_bits_are_proven_with_pictures_too(
    family: str, folder: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    _, moved = train(folder, tmp_path, peft_config=adapter(family, "all"), quantization_config=quantised)
    assert all("lora_" in name for name in moved)
    assert any(tower_of(family, name) for name in moved)
