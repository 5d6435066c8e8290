"""The model's own files are inputs of a run: their meaning is compared, and a file written again is the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from model_families import make_family
from tiny import make_model, make_tokenizer, save
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM

from lockstep.models.adapters import base_digest, weights_digest
from lockstep.models.policy import load_policy
from lockstep.tokens.chat import end_ids, fit_vocabulary, load_tokenizer
from lockstep.watch.inputs import (
    changed_meaning,
    changed_surroundings,
    config_meaning,
    model_meaning,
    surroundings,
    tokenizer_meaning,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model()
    model.generation_config.update(eos_token_id=[0, 2], do_sample=True, temperature=0.7)
    return save(model, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copied")


def meaning(folder: Path) -> dict[str, Any]:
    model, tokenizer = load_policy(str(folder)), load_tokenizer(str(folder))
    fit_vocabulary(model, tokenizer)
    return json.loads(json.dumps(model_meaning(model, tokenizer, end_ids(model, tokenizer))))


def changed(saved: Path, folder: Path, *, same_libraries: bool = True) -> list[str]:
    return changed_meaning(meaning(saved), meaning(folder), same_libraries=same_libraries)


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edited


def swap_two_words(content: dict[str, Any]) -> None:
    words = content["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]


def another_end(content: dict[str, Any]) -> None:
    content["eos_token_id"] = [0, 3]


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "norm": (edit("config.json", lambda c: c.update(rms_norm_eps=1e-3)), r"config.json \(rms_norm_eps was "
                                                                         r"1e-06, is 0.001"),
    "activation": (edit("config.json", lambda c: c.update(hidden_act="gelu")), r"config.json \(hidden_act was 'silu'"),
    "positions": (
        edit("config.json", lambda c: c["rope_parameters"].update(rope_theta=5.0)),
        r"config.json \(rope_parameters.rope_theta was 10000.0, is 5.0\)",
    ),
    "end tokens": (edit("generation_config.json", another_end), r"generation_config.json \(end tokens was \[0, 2\]"),
    "generation": (
        edit("generation_config.json", lambda c: c.update(temperature=0.3)),
        r"generation_config.json \(temperature was 0.7",
    ),
    "no generation": (lambda folder: (folder / "generation_config.json").unlink(), "generation_config.json"),
    "words": (edit("tokenizer.json", swap_two_words), r"tokenizer \(rules of its vocabulary .* and 1 more\)"),
    "merges": (
        edit("tokenizer.json", lambda c: c["model"].update(merges=c["model"]["merges"][::-1])),
        r"tokenizer \(rules of its vocabulary",
    ),
    "template": (lambda folder: _template(folder), r"tokenizer \(chat template was"),
    "end word": (
        edit("tokenizer_config.json", lambda c: c.update(eos_token="<|user|>")),
        r"tokenizer \(special tokens.eos_token was",
    ),
}  # fmt: skip


def _template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant", "user"))


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_a_file_means_is_named_with_its_values(saved: Path, folder: Path, what: str) -> None:
    change, named = CHANGES[what]
    change(folder)
    found = changed(saved, folder)
    assert any(re.match(named, text) for text in found), found


def written_again(folder: Path) -> None:
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(content.items())), indent=7))


def saved_again(folder: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        load_tokenizer(str(folder)),
    )
    model.save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)


def by_another_version(content: dict[str, Any]) -> None:
    content.update(
        transformers_version="5.18.2", _name_or_path="/elsewhere", dtype="bfloat16", architectures=None
    )
    content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]


SAME: dict[str, Callable[[Path], Any]] = {
    "copied": lambda folder: None,
    "other order and spaces": written_again,
    "saved again, in parts": saved_again,
    "of another version": edit("config.json", by_another_version),
    "a field that says nothing": edit("config.json", lambda c: c.update(problem_type=None, id2label=None)),
    "an integer for a number": edit("config.json", lambda c: c["rope_parameters"].update(rope_theta=10000)),
}


@pytest.mark.parametrize("what", SAME)
def test_a_file_that_is_only_written_again_is_no_change(saved: Path, folder: Path, what: str) -> None:
    SAME[what](folder)
    assert changed(saved, folder) == []


def test_every_part_of_a_tokenizer_counts() -> None:
    found = []
    for change in (
        lambda t: None,
        lambda t: setattr(
            t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
        ),
        lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase()),
        lambda t: setattr(t.backend_tokenizer, "decoder", decoders.Fuse()),
        lambda t: t.add_tokens(["<|more|>"]),
        lambda t: setattr(t, "clean_up_tokenization_spaces", True),
    ):
        tokenizer = make_tokenizer()
        change(tokenizer)
        found.append(json.dumps(tokenizer_meaning(tokenizer)))
    assert len(set(found)) == 6


def test_a_tokenizer_that_was_used_is_the_same(saved: Path) -> None:
    tokenizer = load_tokenizer(str(saved))
    before = tokenizer_meaning(tokenizer)
    tokenizer(["a", "the quick brown fox"], padding=True, truncation=True, max_length=3)
    assert tokenizer_meaning(tokenizer) == before


def test_fields_that_another_version_does_not_know_are_no_change() -> None:
    config = make_model().config
    before, after = config_meaning(config), config_meaning(config) | {"new_field": 1}
    del after["rope_parameters"]
    for same, expected in ((True, 1), (False, 0)):
        assert len(changed_meaning({"a": before}, {"a": after}, same_libraries=same)) == expected
    # What both know counts in every case.
    assert changed_meaning({"a": before}, {"a": after | {"rms_norm_eps": 2.0}}, same_libraries=False)


def test_the_loss_of_routers_counts_although_no_engine_needs_it() -> None:
    config = make_family("qwen3_moe").config
    before = config_meaning(config)
    config.router_aux_loss_coef = 0.7
    assert (
        "router_aux_loss_coef"
        in changed_meaning({"a": before}, {"a": config_meaning(config)}, same_libraries=True)[0]
    )


# ---- the digest of a base
# -----------------------------------------------------------------------------------------------


def lora(model: Any, **fields: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **fields))


def test_a_base_has_one_digest_wherever_it_lies_and_whatever_adapter_is_on_it(
    saved: Path, folder: Path
) -> None:
    wanted = base_digest(load_policy(str(saved)))
    load_policy(str(folder)).save_pretrained(folder, max_shard_size="60KB")
    for model in (load_policy(str(folder)), lora(load_policy(str(folder)), modules_to_save=["lm_head"])):
        assert base_digest(model) == wanted
    adapted = lora(load_policy(str(folder)))
    before = weights_digest(adapted)
    with torch.no_grad():
        next(p for n, p in adapted.named_parameters() if "lora_B" in n).add_(1.0)
    assert base_digest(adapted) == wanted
    assert weights_digest(adapted) != before


def test_the_dtype_of_a_base_does_not_count_where_its_values_are_the_same(saved: Path) -> None:
    rounded = load_policy(str(saved), {"dtype": torch.bfloat16})
    wanted = base_digest(rounded)
    assert base_digest(rounded.float()) == wanted != base_digest(load_policy(str(saved)))


@pytest.mark.parametrize("kind", ["plain", "tied", "experts"])
def test_every_weight_and_saved_buffer_of_a_base_counts(kind: str) -> None:
    model = make_family("qwen3_moe") if kind == "experts" else make_model(tied=kind == "tied")
    model.register_buffer("offsets", torch.zeros(3))
    before = base_digest(model)
    digests = set()
    with torch.no_grad():
        for tensor in [*model.parameters(), model.offsets]:
            last = tensor.view(-1)[-1].clone()
            tensor.view(-1)[-1] += 1e-3
            digests.add(base_digest(model))
            tensor.view(-1)[-1] = last
    assert base_digest(model) == before not in digests
    assert len(digests) == len(list(model.parameters())) + 1


def test_names_and_shapes_of_a_base_count() -> None:
    module = torch.nn.Linear(4, 6, bias=False)
    other, renamed = torch.nn.Linear(6, 4, bias=False), torch.nn.Sequential(module)
    other.weight.data = module.weight.data.view(4, 6)
    assert len({base_digest(m) for m in (module, other, renamed)}) == 3


def test_the_digest_is_the_same_in_every_version() -> None:
    """Receipts and adapters keep it. Whoever changes this number refuses every run that has begun."""
    module = torch.nn.Linear(2, 3)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).view(3, 2))
        module.bias.zero_()
    assert base_digest(module) == "5259a4fec809572578127d8f092cc247"


# ---- where a run computes
# -----------------------------------------------------------------------------------------------


def test_versions_the_device_and_threads_are_compared_and_a_receipt_without_them_is_not() -> None:
    now = surroundings()
    other = {**now, "threads": 77, "versions": {**now["versions"], "torch": "1.0", "gone": "3"}}
    texts = changed_surroundings(other, now)
    assert sorted(text.split()[0] for text in texts) == ["gone", "threads", "torch"]
    assert "gone was 3, is not there" in texts
    assert changed_surroundings(now, now) == changed_surroundings({}, now) == []
