"""`lockstep init`, `compare`, `rollouts` and `merge`: what they write and print, from files of runs.

They import nothing heavy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from full_disk import full_disk
from tiny import save_model
from transformers import AutoModelForCausalLM

from lockstep.cli.main import main
from lockstep.cli.past_runs import differing, next_lines, read_past_run, sections
from lockstep.models.policy import load_policy

PARITY = {"checked_tokens": 9, "failed": 0, "mean_abs_gap": 1e-6, "max_abs_gap": 1e-5}


def write_run(folder: Path, settings: dict[str, Any], rewards: list[float], *, ended: bool = True) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(settings))
    lines = [{"step": i + 1, "loss": 0.0, "reward": reward} for i, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half a li')
    if ended:
        summary = {"eval_reward_before": 0.25, "eval_reward_before_ci95": 0.01, "eval_reward_after": 0.5}
        summary |= {"eval_reward_after_ci95": 0.02, "wall_s": 12.3, "tokens_per_s": 45.6, "parity": PARITY}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    same = {"model_name_or_path": "m", "seed": 1}
    first = write_run(tmp_path / "one", {**same, "beta": 0.0, "loss_type": "dapo"}, [0.0, 0.5, 1.0])
    second = write_run(
        tmp_path / "two", {**same, "beta": 0.1, "lora_r": 4, "loss_type": "dapo"}, [0.0, 0.5], ended=False
    )
    return [str(first), str(second)]


def test_compare_lists_only_the_settings_that_differ(runs: list[str]) -> None:
    assert differing([read_past_run(Path(run)) for run in runs]) == [
        ("beta", ["0.0", "0.1"]),
        ("lora_r", ["–", "4"]),
    ]


def test_compare_shows_results_and_curves_on_one_scale(runs: list[str]) -> None:
    results, curves = list(sections([read_past_run(Path(run)) for run in runs]).values())[1:]
    cells = dict(results)
    assert cells["held-out reward before"] == ["0.250 ± 0.010", "–"]
    assert cells["held-out reward after"] == ["0.500 ± 0.020", "–"]
    assert cells["state"] == ["finished", "not finished"]
    assert cells["steps"] == ["3", "2"]
    assert dict(curves)["reward"] == ["▁▅█ 0 → 1", "▁▅ 0 → 0.5"]


def test_compare_prints_a_table_and_refuses_what_is_no_run(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *runs]) == 0
    printed = capsys.readouterr().out
    assert "beta" in printed
    assert "seed" not in printed
    assert main(["compare", str(tmp_path)]) == 2
    assert "has no run.json" in capsys.readouterr().err


def evaluation(folder: Path) -> Path:
    groups = [
        {"prompt": f"question {i}", "completions": [f"answer {i}a", f"answer {i}b"], "rewards": [i, None]}
        for i in (1, 2)
    ]
    (folder / "before.json").write_text(json.dumps({"metrics": {"eval_reward": 0.0}, "rollouts": groups}))
    return folder


def test_rollouts_of_an_evaluation_can_be_chosen_and_sorted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(evaluation(tmp_path))
    assert main(["rollouts", run]) == 0
    assert [capsys.readouterr().out.count(text) for text in ("answer 1a",)] == [1]
    assert main(["rollouts", run, "--best"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("answer 2a") < printed.index("answer 1a")
    assert "answer 1b" not in printed, "a rollout without a reward is not ranked"
    assert main(["rollouts", run, "--text", "question 2"]) == 0
    assert "question 1" not in capsys.readouterr().out
    for words in (
        [run, "--step", "3"],
        [run, "--text", "nowhere"],
        [str(tmp_path / "none")],
        [run, "--best", "--worst"],
    ):
        assert main(["rollouts", *words]) == 2


def test_init_writes_a_config_and_a_reward_that_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my first"]) == 0
    capsys.readouterr()
    assert main(["grpo", "--config", "my first/config.yaml", "--dry_run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["reward_funcs"] == ["my first/rewards.py:right_answer"]
    assert resolved["output_dir"] == "runs/my first"
    done = subprocess.run(
        [sys.executable, "my first/rewards.py"], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [1.0, 0.5, 0.0]
    from lockstep.tasks.rewards import load_reward

    answered = [[{"role": "assistant", "content": "7"}]]
    assert load_reward("my first/rewards.py:right_answer", {})(
        completions=answered, answer=["7"], prompts=[[]]
    ) == [1.0]
    assert main(["init", "my first"]) == 2
    assert "exists; give another folder" in capsys.readouterr().err


def test_a_run_ends_with_the_path_of_its_model_and_commands_that_exist(tmp_path: Path) -> None:
    assert "not saved" in next_lines(tmp_path, adapter=False)[0]
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (checkpoint / "model.safetensors").touch()
    typed = ("--recipe", "agent", "--model_name_or_path", "m", "--use_peft", "--reward_funcs", "a b.py:f")
    said = "\n".join(next_lines(tmp_path, adapter=True, typed=typed))
    assert (
        f"lockstep evaluate --recipe agent --reward_funcs 'a b.py:f' --model_name_or_path "
        f"{tmp_path / 'merged'} --use_peft False" in said
    )
    assert said.startswith(f"adapter          {checkpoint}\n")
    assert f"lockstep merge {checkpoint} {tmp_path / 'merged'}" in said
    assert f"lockstep serve {tmp_path / 'merged'}" in said


def test_merge_writes_the_model_that_the_adapter_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(tmp_path / "base")
    model = peft.get_peft_model(
        load_policy(str(base)), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "whole")]) == 0
    ids = torch.arange(6).unsqueeze(0)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, load_policy(str(base))(ids).logits, atol=1e-3)
    capsys.readouterr()
    with full_disk():
        assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "full")]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: the merged model could not be written (")
    assert line.endswith("make room, and start the same command again")
    assert not (tmp_path / "full").exists()
    assert main(["merge", str(base), str(tmp_path / "other")]) == 2
    assert "is it a checkpoint of a run with use_peft?" in capsys.readouterr().err
