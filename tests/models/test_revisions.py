"""One revision of a model is one directory, for the policy, its tokenizer and the engine.

A folder plays the hub's cache.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from conftest import start
from methods import FIELDS, make, parameters
from tiny import save_model
from transformers import AutoModelForCausalLM

from lockstep.errors import InputError
from lockstep.models.resolve import at_revision

REVISIONS = {"main": "a" * 40, "older": "b" * 40}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The directories of the two revisions of `someone/tiny`, which have different weights."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    found = {}
    for name, commit in REVISIONS.items():
        (repository / "refs" / name).write_text(commit)
        found[name] = repository / "snapshots" / commit
        saved = save_model(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        if name == "older":
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.1)
        shutil.copytree(saved, found[name])
        model.save_pretrained(found[name])
    return found


def test_a_revision_is_the_directory_of_its_snapshot(hub: dict[str, Path]) -> None:
    assert at_revision("someone/tiny", "older") == str(hub["older"])
    assert at_revision("someone/tiny", None) == at_revision("someone/tiny", "main") == "someone/tiny"
    with pytest.raises(InputError, match="revision 'newer' of someone/tiny cannot be loaded"):
        at_revision("someone/tiny", "newer")
    with pytest.raises(InputError, match="is a directory and has no revisions"):
        at_revision(str(hub["main"]), "older")
    assert at_revision(str(hub["main"]), "main") == str(hub["main"])


def test_policy_and_engine_have_the_weights_of_the_revision(hub: dict[str, Path], tmp_path: Path) -> None:
    fields = {**FIELDS["GRPO"], "max_steps": 1, "model_init_kwargs": {"revision": "older"}}
    run = make("GRPO", "someone/tiny", tmp_path / "run", start("transformers", str(hub["older"])), fields)
    assert run.model_path == str(hub["older"])
    older = parameters(AutoModelForCausalLM.from_pretrained(hub["older"], dtype=torch.float32))
    assert all(torch.equal(p, older[name]) for name, p in parameters(run.model).items())
    run.train()
    assert run.state.global_step == 1
