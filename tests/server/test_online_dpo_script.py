"""Scripts of Online DPO on real servers: the script of TRL's pull request 6228 with another import, and our example.

All pairs are right.
"""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from example_scripts import example
from servers import KEY, Server, is_free, serve
from tiny import make_model, make_tokenizer, save
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.learn.methods.online_dpo import OnlineDPOObjective
from lockstep.learn.sequence import TrainingSequence
from lockstep.run.trainers.methods import OnlineDPOTrainer
from lockstep.server.keys import KEY_VARIABLE

pytestmark = VLLM
SCRIPT = Path(__file__).parent / "trl_6228.py"
# The port where TRL's trainer expects a server if a script names none.
USUAL_PORT = 8000


@dataclass
class Recording:
    """The record of a script's run, with one entry per step.

    Attributes:
        scored: prompts and completions as the reward function got them.
        paired: every sequence, in pairs.
        learned: the names of the sequences in the loss.
    """

    scored: list[list[tuple[str, str]]] = field(default_factory=list)
    paired: list[list[TrainingSequence]] = field(default_factory=list)
    learned: list[set[str]] = field(default_factory=list)
    trainers: list[OnlineDPOTrainer] = field(default_factory=list)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """The record of a script that imports the trainer from lockstep."""
    found = Recording()
    with_advantages, loss = OnlineDPOObjective.with_advantages, OnlineDPOObjective.loss

    class Watched(OnlineDPOTrainer):
        def __init__(self, *, reward_funcs: Callable[..., list[float]], **arguments: Any) -> None:
            # The record has one call per step.
            arguments["args"].recheck_rewards = False

            def watched(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
                found.scored.append(list(zip(prompts, completions, strict=True)))
                return reward_funcs(prompts=prompts, completions=completions, **columns)

            super().__init__(reward_funcs=watched, **arguments)
            # This is the call of the rehearsal, with one pair.
            assert len(found.scored.pop()) == 2
            assert not found.scored
            found.trainers.append(self)

    def watched(objective: Any, groups: Any, sequences: Any) -> Any:
        found.paired.append(with_advantages(objective, groups, sequences))
        found.learned.append(set())
        return found.paired[-1]

    def learned(objective: Any, batch: Any, tally: Any) -> Any:
        found.learned[-1].update(s.name for s in batch.sequences)
        return loss(objective, batch, tally)

    monkeypatch.setattr(lockstep, "OnlineDPOTrainer", Watched)
    monkeypatch.setattr(OnlineDPOObjective, "with_advantages", watched)
    monkeypatch.setattr(OnlineDPOObjective, "loss", learned)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    yield found
    for trainer in found.trainers:
        trainer.close()


def check_steps(recording: Recording, batch: int, worth: Callable[[str], float]) -> list[int]:
    """Check the prompts, completions and pairs of every step; return the decided pairs of each step.

    Args:
        batch: number of prompts per step.
        worth: the score by which the script prefers a completion.
    """
    tokenizer = make_tokenizer()
    decided = []
    for scored, paired, learned in zip(recording.scored, recording.paired, recording.learned, strict=True):
        assert list(Counter(prompt for prompt, _ in scored).values()) == [2] * batch
        texts = {s.name: tokenizer.decode(s.completion_ids, skip_special_tokens=True) for s in paired}
        assert Counter((tuple(tokenizer(prompt)["input_ids"]), text) for prompt, text in scored) == Counter(
            (tuple(s.prompt_ids.tolist()), texts[s.name]) for s in paired
        )
        preferred = set()
        for unit in {s.unit for s in paired}:
            one, other = (s for s in paired if s.unit == unit)
            assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
            worths = [worth(texts[s.name]) for s in (one, other)]
            signs = [set(s.advantages) for s in (one, other)]
            if worths[0] == worths[1]:
                assert signs == [{0.0}, {0.0}]
            else:
                assert signs == ([{1.0}, {-1.0}] if worths[0] > worths[1] else [{-1.0}, {1.0}])
                preferred |= {one.name, other.name}
        assert learned == preferred
        decided.append(len(preferred) // 2)
    return decided


def check_logs(trainer: OnlineDPOTrainer, recording: Recording, batch: int, decided: list[int]) -> None:
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["pairs/undecided"] for log in logs] == pytest.approx([1 - count / batch for count in decided])
    tokens = [sum(len(s.completion_ids) for s in paired) for paired in recording.paired]
    assert [log["parity/checked_tokens"] for log in logs] == tokens


def saved(folder: Path, *, sure: bool) -> str:
    """A tiny model with weights of a usual scale.

    A sure model samples only `a`, so that all its completions are equal.
    """
    model = make_model(scale=0.05)
    if sure:
        with torch.no_grad():
            model.get_input_embeddings().weight[:, 0] = 50.0
            head = model.get_output_embeddings().weight.zero_()
            head[make_tokenizer().convert_tokens_to_ids("a"), 0] = 10.0
    return str(save(model, folder))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"unsure": saved(folder / "unsure", sure=False), "sure": saved(folder / "sure", sure=True)}


@pytest.fixture(scope="module")
def usual_server(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as 'lockstep serve' starts it.

    Its model has the shape of both models; the trainer pushes their weights.
    """
    if not is_free(USUAL_PORT):
        pytest.skip(f"port {USUAL_PORT} of this machine, where the script expects its server, is taken")
    with serve(models["unsure"], tmp_path_factory.mktemp("usual"), dtype="auto", port=USUAL_PORT) as running:
        yield running


def moved(model: str, output: Path) -> str:
    """The script with another import and other values for its two settings."""
    text = SCRIPT.read_text()
    changes = {
        "from trl.experimental.online_dpo import ": "from lockstep import ",
        '"Qwen/Qwen2-0.5B"': repr(model),
        '"online-dpo-on-a-server"': repr(str(output)),
    }
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


# On a server of its own.
@pytest.mark.long
@pytest.mark.parametrize("kind", ["unsure", "sure"])
def test_trls_script_runs_as_it_stands_once_its_import_is_changed(
    kind: str, models: dict[str, str], usual_server: Server, tmp_path: Path, recording: Recording
) -> None:
    path = tmp_path / "script.py"
    path.write_text(moved(models[kind], tmp_path / "out"))
    made = runpy.run_path(str(path), run_name="__main__")

    (trainer,) = recording.trainers
    assert trainer.config.server_urls == [usual_server.url]
    assert trainer.state.global_step == len(recording.scored) == 2
    # There are four prompts, two per step: one epoch, and each prompt twice.
    assert Counter(p for scored in recording.scored for p, _ in scored) == dict.fromkeys(made["prompts"], 2)
    decided = check_steps(recording, 2, lambda text: -abs(len(text) - 20))
    check_logs(trainer, recording, 2, decided)
    before = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32).state_dict()
    after = trainer.model.state_dict()
    moved_names = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    if kind == "sure":
        assert {text for scored in recording.scored for _, text in scored} == {"a" * 32}
        assert decided == [0, 0]
        assert moved_names == set()
    else:
        assert sum(decided) > 0
        assert moved_names == before.keys()


def test_the_example_prefers_the_longer_answer_and_neither_where_both_are_equal(
    server: Server, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    monkeypatch.setattr("lockstep.config.run.has_fast_bf16", lambda: False)
    module, steps, batch, cap = example("online_dpo"), 3, 4, 14
    length = module.longer
    # The lengths are capped, so that many are equal.
    monkeypatch.setattr(module, "longer", lambda completions, **_: [min(n, cap) for n in length(completions)])
    words = [untied_dir, "--server", server.url, "--output_dir", str(tmp_path), "--max_steps", str(steps)]
    run = module.main([*words, "--max_new_tokens", "10"])

    assert run.state.global_step == len(recording.scored) == steps
    decided = check_steps(recording, batch, lambda text: min(len(text), cap))
    assert 0 < sum(decided) < steps * batch
    check_logs(run, recording, batch, decided)
    assert all(log["parity/max_abs_gap"] < 1e-3 for log in run.state.log_history if "loss" in log)
