"""The examples run unchanged on a tiny model: their calls, their proofs, and their output.

The script with a server runs in CI as forks of the suite's fork server. Before a release it runs as in a user's
shell: with imports and with the compilation of vLLM's sampler, which take a minute.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from example_scripts import EXAMPLES, example
from servers import KEY, Server, free_port, is_free
from transformers import AutoModelForCausalLM

from lockstep.server.keys import KEY_VARIABLE
from lockstep.watch.receipt import check_receipt

pytestmark = VLLM


def test_a_trainer_of_ones_own_samples_learns_updates_and_proves(
    server: Server, untied_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    module, models = example("own_trainer"), []
    load = module.load_policy
    monkeypatch.setattr(module, "load_policy", lambda *args: models.append(load(*args)) or models[0])
    monkeypatch.setattr(module, "STEPS", 3)
    monkeypatch.setattr(sys, "argv", ["own_trainer.py", server.url, untied_dir])
    module.main()
    out = capsys.readouterr().out
    steps = re.findall(r"^step (\d): reward (\S+), largest gap (\S+)$", out, re.MULTILINE)
    assert [number for number, _, _ in steps] == ["0", "1", "2"]
    assert all(0 <= float(reward) <= 1 and float(gap) < 1e-3 for _, reward, gap in steps)
    (modules, error, gap) = re.findall(
        r"proved at the end: (\d+) modules, worst \S+ by (\S+); gap (\S+)", out
    )[0]
    assert int(modules) > 10
    assert max(float(error), float(gap)) < 1e-3
    assert out.splitlines()[-1].startswith("{'prompt': -")
    before = AutoModelForCausalLM.from_pretrained(untied_dir).state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in models[0].state_dict().items())


def test_trls_trainer_with_one_assignment_proves_every_push(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed here")
    module = example("trl_grpo")
    # The example replaces this class; the test restores it afterwards.
    monkeypatch.setattr(trainers, "VLLMGeneration", trainers.VLLMGeneration)
    for name, value in {"max_steps": 2, "max_completion_length": 6, "use_cpu": True}.items():
        monkeypatch.setitem(module.SETTINGS, name, value)
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", untied_dir])
    module.main()
    found = re.findall(
        r"^step (\d): version (\d), (\d+) tensors as sent, (\d+) of (\d+) modules within (\S+), canary within (\S+); "
        r"reward \S+, log-probs within (\S+), mean ratio (\S+)$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert [(step, version) for step, version, *_ in found] == [("1", "1"), ("2", "2")]
    for _, _, tensors, probed, modules, *errors, ratio in found:
        assert 0 < int(probed) <= int(modules) <= int(tensors)
        assert all(float(error) < 1e-3 for error in errors)
        assert float(ratio) == pytest.approx(1.0, abs=1e-3)


# What `lockstep` is in the script: a real interpreter as in a user's shell, or a fork that has imported the libraries
# already.
COMMANDS = {
    "interpreter": "-m lockstep.cli.main",
    "fork": str(Path(__file__).parents[1] / "forked_command.py"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("interpreter", marks=pytest.mark.release), "fork"])
def test_the_script_serves_trains_and_stops_its_server(kind: str, untied_dir: str, tmp_path: Path) -> None:
    shim = tmp_path / "bin" / "lockstep"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} {COMMANDS[kind]} "$@"\n')
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    port, run = free_port(), tmp_path / "run"
    fields: dict[str, Any] = {"max_steps": 2, "save_steps": 2, "train_size": 24, "eval_size": 4}
    fields |= {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "num_generations_eval": 2,
        "output_dir": run,
    }
    environment = {n: value for n, value in os.environ.items() if n != KEY_VARIABLE}
    if kind == "interpreter":
        # As in a user's shell: with the compilation that conftest.py turns off.
        environment.pop("TORCHDYNAMO_DISABLE", None)
    environment |= {"PATH": f"{shim.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment |= {"LOCKSTEP_EXAMPLE_MODEL": untied_dir, "LOCKSTEP_EXAMPLE_PORT": str(port)}
    words = [str(word) for name, value in fields.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        ["bash", str(EXAMPLES / "server_mode.sh"), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert f"is ready at http://127.0.0.1:{port}" in done.stderr
    assert done.stderr.rstrip().endswith("lockstep serve: stopped")
    assert is_free(port)
    check_receipt(run / "receipt.jsonl")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
