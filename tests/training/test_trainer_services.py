"""What `transformers.Trainer` does around the steps is there for every method: evaluation, callbacks, trackers, the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import start
from methods import GROUPS, PAIRS, PROMPTS, by_length, lora, make
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from lockstep.engines.protocol import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS: dict[str, dict[str, Any]] = {"RLOO": GROUPS, "OnlineDPO": PAIRS}


class Listener(TrainerCallback):
    """Stands for a tracker: hears what one would."""

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


@pytest.fixture(scope="module")
def hf_engine(untied_dir: str) -> Engine:
    return start("transformers", untied_dir)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_evaluations_in_the_loop_and_every_log_reach_callbacks_and_trackers(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Listener()
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda names: [tracker])
    own = Listener()
    fields = {**METHODS[method], "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "report_to": "tensorboard"}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, eval_dataset=PROMPTS.select(range(3)), callbacks=[own])
    run.train()
    for heard in (own, tracker):
        assert heard.begun == 1
        assert [step for step, log in heard.logs if "loss" in log] == [1, 2, 3, 4]
        assert [step for step, log in heard.logs if "eval_reward" in log] == [2, 4]
        assert [step for step, _ in heard.evaluations] == [2, 4]
    rewards = [r.reward for group in run.last_eval_groups for r in group.rollouts]
    assert own.evaluations[-1][1]["eval_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert own.evaluations[-1][1]["eval_samples"] == 6
    name = "rewards/margins" if method == "OnlineDPO" else "clip_ratio/region_mean"
    assert name in own.logs[0][1]
    # Evaluating draws nothing from the training's numbers.
    quiet = make(method, untied_dir, tmp_path, hf_engine, {**METHODS[method], "max_steps": 4})
    quiet.train()
    losses = [[log["loss"] for log in r.state.log_history if "loss" in log] for r in (run, quiet)]
    assert losses[0] == losses[1]


class Hub:
    """Takes what would be uploaded."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, name: str, **kwargs: Any) -> Any:
        self.created.append(name)
        return SimpleNamespace(repo_id=f"someone/{name}")

    def upload_folder(self, **kwargs: Any) -> str:
        self.uploads.append(kwargs)
        return "done"


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_push_to_hub_uploads_weights_tokenizer_and_a_model_card(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    method: str,
    adapter: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    # The card asks the hub what the base model is.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = {"peft_config": lora()} if adapter else {}
    fields = {**METHODS[method], "max_steps": 1}
    run = make(method, untied_dir, tmp_path / "mine", hf_engine, fields, reward_funcs=by_length, **arguments)
    run.train()
    assert run.push_to_hub(model_name="mine") == "done"
    assert hub.created == ["mine"]
    (upload,) = hub.uploads
    assert upload["repo_id"] == "someone/mine"
    folder = Path(upload["folder_path"])
    assert "mine" in (folder / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|end|>"
    if adapter:
        assert (folder / "adapter_model.safetensors").exists()
    else:
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == run.model.num_parameters()
