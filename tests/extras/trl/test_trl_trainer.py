"""TRL's own trainer on our engines: it trains on tokens that the engine sampled from the trainer's current weights."""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
from conftest import needs_vllm, start
from recording import Recording, train
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="TRL is not installed here")

from lockstep.contract.tensors import LoadedWeights
from lockstep.errors import ProofError
from lockstep.extras.trl.vllm_generation import LockstepGeneration


def test_the_interface_is_that_of_trl() -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    theirs = list(signature(VLLMGeneration).parameters.values())
    ours = list(signature(LockstepGeneration).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])
    for name in ("generate", "sync_weights"):
        assert list(signature(getattr(VLLMGeneration, name)).parameters) == list(
            signature(getattr(LockstepGeneration, name)).parameters
        )


@pytest.mark.vllm
@needs_vllm
def test_trls_trainer_learns_from_proven_tokens_of_real_vllm(untied_dir: str, tmp_path: Path) -> None:
    trainer = train(Recording, untied_dir, tmp_path)
    generation = trainer.vllm_generation
    generation.close()
    assert [call.version for call in generation.calls] == [1, 2, 3]
    for call in generation.calls:
        assert call.prompt_ids == call.asked
        assert all(0 < len(ids) <= 8 for ids in call.completion_ids)
        # There are four samples of a prompt, each with its own seed.
        assert len({tuple(ids) for ids in call.completion_ids}) > len(call.asked) // 4
        assert call.worst < 1e-4
    before = AutoModelForCausalLM.from_pretrained(untied_dir).state_dict()
    moved = [
        name for name, now in trainer.model.state_dict().items() if not torch.equal(now.cpu(), before[name])
    ]
    assert len(moved) == len(before)
    # This is TRL's own measure, over the tokens of each step.
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == 3
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in logs)
    assert all(abs(entry["sampling/importance_sampling_ratio/min"] - 1) < 1e-4 for entry in logs)
    assert generation.proof.push.version == 3


def test_trls_trainer_learns_an_adapter_whose_merged_weights_are_proven(
    untied_dir: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    engine = start("transformers", untied_dir)
    trainer = train(partial(Recording, engine=engine), untied_dir, tmp_path, peft_config=adapter)
    generation = trainer.vllm_generation
    assert [call.version for call in generation.calls] == [1, 2, 3]
    assert all(call.worst < 1e-4 for call in generation.calls)
    assert generation.proof.probe.of_modules > 0
    # The base weights stay as they are, to the bit, and the engine has others.
    base = AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32).state_dict()
    inner = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    own = {
        name.replace(".base_layer", ""): value
        for name, value in inner.state_dict().items()
        if ".lora_" not in name
    }
    assert all(torch.equal(own[name].cpu(), value) for name, value in base.items())
    sent = engine.model.state_dict()  # type: ignore[attr-defined]
    assert not torch.equal(
        sent["model.layers.0.self_attn.q_proj.weight"].cpu(), base["model.layers.0.self_attn.q_proj.weight"]
    )


def test_weights_that_stay_behind_stop_the_run(untied_dir: str, tmp_path: Path) -> None:
    engine = start("transformers", untied_dir)
    load, pushes = engine.load, []

    def forgetful(tensors: object, base: str = "") -> LoadedWeights:
        pushes.append(1)
        before = {name: p.clone() for name, p in engine.model.named_parameters()}  # type: ignore[attr-defined]
        loaded = load(tensors, base)  # type: ignore[arg-type]
        if len(pushes) == 2:
            for name, parameter in engine.model.named_parameters():  # type: ignore[attr-defined]
                parameter.data.copy_(before[name])
        return loaded

    engine.load = forgetful  # type: ignore[method-assign, assignment]
    with pytest.raises(ProofError, match=r"at version 2 \d+ of \d+ weights give other outputs"):
        train(partial(Recording, engine=engine), untied_dir, tmp_path)
    assert len(pushes) == 2
