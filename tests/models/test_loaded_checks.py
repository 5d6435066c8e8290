"""A damaged model directory is refused, with the names of its tensors.

A model that is saved in another valid way is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_model, make_tokenizer, save_model
from transformers import LlamaConfig, LlamaForSequenceClassification

from lockstep import GRPOConfig
from lockstep.errors import InputError
from lockstep.learn.policy_and_reference import open_policy
from lockstep.models.policy import load_policy
from lockstep.models.reward_model import RewardModel, load_reward_model
from lockstep.run.trainers.checks import check_reference_model

QUERY = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, change: Callable[[Tensors], object]) -> str:
    """Change the tensors in a model directory with `change`; returns the directory."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return str(folder)


def narrow(tensors: Tensors) -> None:
    tensors[QUERY] = tensors[QUERY][:32].clone()


def classifier(folder: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=384, num_labels=1, pad_token_id=0, **sizes)
    ).save_pretrained(folder)
    return folder


def in_eight_bits(tensors: Tensors) -> None:
    tensors[QUERY] = tensors[QUERY].to(torch.int8)


def test_weights_that_are_stored_as_codes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{QUERY} is stored as I8, a quantised weight"):
        load_policy(rewritten(save_model(tmp_path / "model"), in_eight_bits))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(QUERY), rf"its files lack {QUERY}, which would be random"),
        (narrow, rf"another shape than the config requires for {QUERY}"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "its files have extra, which no layer"),
    ],
    ids=["a tensor is missing", "a tensor has another shape", "a tensor is left over"],
)
def test_a_policy_whose_files_do_not_hold_its_tensors_is_refused_by_their_names(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_policy(rewritten(save_model(tmp_path / "model"), change))


def test_a_missing_output_head_is_refused_where_it_is_not_tied(tmp_path: Path) -> None:
    tied, untied = save_model(tmp_path / "tied", tied=True), save_model(tmp_path / "untied")
    # The files of a tied model hold the embedding, and no head.
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_policy(str(tied))
    with pytest.raises(InputError, match=r"lack lm_head\.weight"):
        load_policy(rewritten(untied, lambda tensors: tensors.pop("lm_head.weight")))


def test_old_buffers_that_transformers_itself_ignores_are_taken(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_policy(
        rewritten(save_model(tmp_path / "model"), lambda tensors: tensors.update({name: torch.ones(16)}))
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused_by_its_tensor(tmp_path: Path, value: float) -> None:
    path = rewritten(save_model(tmp_path / "model"), lambda tensors: tensors[QUERY][3, 5:6].fill_(value))
    args = GRPOConfig(output_dir=str(tmp_path), bf16=False)
    with pytest.raises(InputError, match=rf"weights that are NaN or infinite, in {QUERY}:"):
        open_policy(path, None, None, args)
    with pytest.raises(InputError, match=rf"ref_model has weights that are NaN or infinite, in {QUERY}:"):
        check_reference_model(make_model(), load_policy(path))


def test_a_truncated_file_is_one_clear_error(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cannot load a causal language model from"):
        load_policy(str(folder))


def test_a_reward_model_lacks_nothing_and_holds_numbers(tmp_path: Path) -> None:
    whole = classifier(tmp_path / "whole")
    with pytest.raises(InputError, match=r"weights that are NaN or infinite, in score\.weight"):
        RewardModel(
            load_reward_model(rewritten(whole, lambda tensors: tensors["score.weight"].fill_(float("nan")))),
            make_tokenizer(),
        )
    for name in ("score.weight", QUERY):
        folder = classifier(tmp_path / name)
        with pytest.raises(InputError, match=f"lack {name}"):
            load_reward_model(rewritten(folder, lambda tensors, name=name: tensors.pop(name)))  # type: ignore[misc]
    biased = classifier(tmp_path / "biased")
    with pytest.raises(InputError, match=r"have score\.bias, which no layer"):
        load_reward_model(rewritten(biased, lambda tensors: tensors.update({"score.bias": torch.ones(1)})))


def test_a_reward_model_may_still_carry_the_head_of_the_language_model_it_was_made_from(
    tmp_path: Path,
) -> None:
    folder = classifier(tmp_path / "model")
    head = {"lm_head.weight": torch.ones(384, 32)}
    assert load_reward_model(rewritten(folder, lambda tensors: tensors.update(head))).config.num_labels == 1


def test_the_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(InputError, match="code that comes with a model is not run"):
        load_policy(str(folder), {"trust_remote_code": True})
    load_policy(str(folder))
    assert not (tmp_path / "ran").exists()
