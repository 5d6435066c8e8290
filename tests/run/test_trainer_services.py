"""The services of `transformers.Trainer` work for every method: evaluation, callbacks, trackers, the hub."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from methods import FIELDS, PROMPTS, by_length, lora, make, parameters
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError


class Listener(TrainerCallback):
    """Replaces a tracker and records what it gets."""

    def __init__(self) -> None:
        self.begun = 0
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.evaluations: list[tuple[int, dict[str, Any]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append((state.global_step, dict(logs)))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.evaluations.append((state.global_step, dict(metrics)))


@pytest.mark.parametrize("method", sorted(FIELDS))
def test_evaluations_in_the_loop_and_every_log_reach_callbacks_and_trackers(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Listener()
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda names: [tracker])
    own = Listener()
    fields = {
        **FIELDS[method],
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "tensorboard",
    }
    run = make(
        method,
        untied_dir,
        tmp_path,
        hf_engine,
        fields,
        eval_dataset=PROMPTS.select(range(3)),
        callbacks=[own],
    )
    run.train()
    for heard in (own, tracker):
        assert heard.begun == 1
        assert [step for step, log in heard.logs if "loss" in log] == [1, 2, 3, 4]
        assert [step for step, log in heard.logs if "eval_reward" in log] == [2, 4]
        assert [step for step, _ in heard.evaluations] == [2, 4]
    rewards = [r.reward for group in run.last_eval_groups for r in group.rollouts]
    assert own.evaluations[-1][1]["eval_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert own.evaluations[-1][1]["eval_samples"] == len(rewards) == 3 * run.config.group_size
    name = "rewards/margins" if method == "OnlineDPO" else "clip_ratio/region_mean"
    assert name in own.logs[0][1]
    ratios = {f"sampling/importance_sampling_ratio/{kind}" for kind in ("mean", "min", "max")}
    always = {"sampling/effective_sample_size", *ratios}
    assert all(always <= log.keys() for _, log in own.logs if "loss" in log)
    # An evaluation draws no numbers from the random state of the training.
    quiet = make(method, untied_dir, tmp_path, hf_engine, {**FIELDS[method], "max_steps": 4})
    quiet.train()
    losses = [[log["loss"] for log in r.state.log_history if "loss" in log] for r in (run, quiet)]
    assert losses[0] == losses[1]


@dataclass(frozen=True)
class Upload:
    """The files that a call of `upload_folder` would have sent, read at the time of the call."""

    said: dict[str, Any]
    files: dict[str, bytes]


class Hub:
    """Replaces the hub's own client and records the uploads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[str] = []
        self.uploads: list[Upload] = []
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)
        # The model card would ask the hub for the base model.
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def create_repo(self, repo_id: str, **said: Any) -> Any:
        self.created.append(repo_id)
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def upload_folder(self, *, folder_path: str, run_as_future: bool = False, **said: Any) -> Any:
        folder = Path(folder_path)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        sent = filter_repo_objects(names, ignore_patterns=said.get("ignore_patterns"))
        self.uploads.append(
            Upload({**said, "folder": folder}, {name: (folder / name).read_bytes() for name in sent})
        )
        later: Future[str] = Future()
        later.set_result("done")
        return later if run_as_future else "done"


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("method", sorted(FIELDS))
def test_push_to_hub_uploads_weights_tokenizer_and_a_model_card(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    method: str,
    adapter: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub(monkeypatch)
    arguments = {"peft_config": lora()} if adapter else {}
    fields = {**FIELDS[method], "max_steps": 1}
    run = make(method, untied_dir, tmp_path / "mine", hf_engine, fields, reward_funcs=by_length, **arguments)
    run.train()
    assert run.push_to_hub(model_name="mine") == "done"
    assert hub.created == ["mine"]
    (upload,) = hub.uploads
    assert upload.said["repo_id"] == "someone/mine"
    folder = upload.said["folder"]
    assert "mine" in (folder / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|end|>"
    if adapter:
        assert (folder / "adapter_model.safetensors").exists()
    else:
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == run.model.num_parameters()


@pytest.mark.parametrize("offline", [True, False], ids=["offline mode", "no network"])
def test_a_push_without_a_hub_says_what_is_wrong_and_that_nothing_is_lost(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens on port 9 of this machine.
    api = huggingface_hub.HfApi(endpoint="http://127.0.0.1:9", token="none")
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: api)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    run = make("GRPO", untied_dir, tmp_path / "mine", hf_engine, {**FIELDS["GRPO"], "max_steps": 1})
    with pytest.raises(InputError, match=r"push_to_hub: .* cannot be used \(.*Nothing on disk is lost"):
        run.push_to_hub()
    with pytest.raises(InputError, match="push_to_hub"):
        make("GRPO", untied_dir, tmp_path / "other", hf_engine, {**FIELDS["GRPO"], "push_to_hub": True})


@pytest.mark.parametrize("method", ["GRPO", "OnlineDPO"])
def test_every_save_of_a_run_that_pushes_uploads_its_weights_and_a_checkpoint_to_go_on_from(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**FIELDS[method], "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    hub = Hub(monkeypatch)
    pushing = {"push_to_hub": True, "hub_model_id": "mine", "hub_strategy": "checkpoint"}
    run = make(method, untied_dir, tmp_path / "run", hf_engine, fields | pushing)
    run.train()
    assert hub.created == ["mine"]
    assert [upload.said["repo_id"] for upload in hub.uploads] == ["someone/mine"] * 4
    assert ["path_in_repo" in upload.said for upload in hub.uploads] == [False, True, False, True]
    weights = []
    for step, model, checkpoint in zip((2, 4), hub.uploads[::2], hub.uploads[1::2], strict=True):
        assert all(f"step {step}" in upload.said["commit_message"] for upload in (model, checkpoint))
        folder = tmp_path / "run" / f"checkpoint-{step}"
        # The files in the folder after the run are the files that were sent: no file was written too late.
        assert checkpoint.files == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert {"trainer_state.json", "optimizer.pt", "digests.json"} <= checkpoint.files.keys()
        assert {"config.json", "tokenizer.json", "receipt.jsonl"} <= model.files.keys()
        assert model.files["model.safetensors"] == checkpoint.files["model.safetensors"]
        weights.append(model.files["model.safetensors"])
    assert weights[0] != weights[1]

    fetched = tmp_path / "elsewhere" / "checkpoint-2"
    fetched.mkdir(parents=True)
    for name, content in hub.uploads[1].files.items():
        (fetched / name).write_bytes(content)
    again = make(method, untied_dir, fetched.parent, hf_engine, fields)
    again.train(resume_from_checkpoint=str(fetched))
    expected = parameters(run.model)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(again.model).items())
