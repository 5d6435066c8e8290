"""The fields of the command line without torch equal those of the classes, and early answers import nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.describe import CLASSES, as_text, describe
from lockstep.cli.help import FIELDS_FILE, fields_of, is_shown
from lockstep.cli.main import main
from lockstep.config.option import GROUPS
from lockstep.watch.receipt import Receipt

# Runs command lines in one process, and prints after each command line which modules it has imported.
PROBE = """
import contextlib, io, json, sys
from lockstep.cli.main import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    heavy = sorted({"torch", "transformers", "vllm", "datasets", "peft", "accelerate"} & sys.modules.keys())
    print(json.dumps([code, out.getvalue(), err.getvalue(), heavy]))
"""


def test_the_described_fields_are_those_of_the_classes() -> None:
    assert FIELDS_FILE.read_text() == as_text(describe()), "run: python scripts/reference_pages.py"


def test_help_and_early_errors_import_nothing_heavy(tmp_path: Path) -> None:
    gap = {
        "sampled_tokens": 2,
        "checked_tokens": 2,
        "sum_abs_gap": 0.0,
        "max_abs_gap": 0.0,
        "worst_request": "a",
    }
    worst = {"name": "a", "error": 0.0}
    engine = {"engine": "e", "architecture": "a", "dtype": "d", "head_dtype": "d", "logprobs_mode": "m"}
    receipt = Receipt(tmp_path / "receipt.jsonl", 0)
    receipt.append(
        {"kind": "start", "step": 0, "engine": engine, "canary": {"mean_abs_gap": 0.0, "max_abs_gap": 0.0},
         "trainer": {"compute": "c"}, "temperature": 1.0, "modules": {"probed": 1, "unreached": []},
         "worst_module": worst,
         "limits": {"module_probe": 1e-4, "mean": 1e-4, "max": 1e-3}}
    )  # fmt: skip
    receipt.append({"kind": "step", "step": 1, "version": 0, "tensors": 1, "worst_module": worst, **gap})
    (tmp_path / "typo.yaml").write_text("learning_rat: 1\n")
    run = ["grpo", "--model_name_or_path", "m", "--dataset_name"]
    cases: list[tuple[list[str], int, str]] = [
        ([], 0, "what to do next"),
        (["--help"], 0, "usage: lockstep COMMAND"),
        (["--version"], 0, "lockstep 0."),
        (["grop"], 2, "did you mean 'grpo'?"),
        *(([command, "--help"], 0, f"usage: lockstep {command} ") for command in CLASSES),
        (["grpo", "--help-all"], 0, "--adam_beta1"),
        (["grpo", "--learning_rat", "3"], 2, "did you mean 'learning_rate'?"),
        (["ppo", "--learning_rate", "fast"], 2, "invalid float value: 'fast'"),
        (["grpo", "--max_steps", "0"], 2, "max_steps=0; it must be at least 1"),
        (["grpo", "--top_p", "nan"], 2, "top_p=nan; it must be a finite number"),
        (["grpo", "--optim", "adam_torch"], 2, "did you mean 'adamw_torch'?"),
        (["grpo", "--bf16", "perhaps"], 2, "'perhaps' is neither yes nor no"),
        (["grpo", "--cache_implementation", "x"], 2, "cache_implementation='x' is not supported"),
        (["grpo", "--torch_compile", "true"], 2, "torch_compile=True is not supported"),
        (["grpo", "--lora_r", "3"], 2, "lora_r has no effect without use_peft"),
        (["rloo", "--config", "/no/such.yaml"], 2, "config file /no/such.yaml does not exist"),
        (["grpo", "--config", str(tmp_path / "typo.yaml")], 2, "unknown field 'learning_rat'"),
        (["grpo"], 2, "model_name_or_path is not set"),
        ([*run, "no.jsonl"], 2, "data file no.jsonl does not exist"),
        ([*run, "arithmetic", "--reward_funcs", "no.py:f"], 2, "no.py does not exist"),
        ([*run, "arithmetic", "--reward_funcs", "accurate"], 2, "not one of exact_match, accuracy"),
        ([*run, "arithmetic", "--agent_command", "{broken"], 2, "names no program that may be run here"),
        (["grpo", "--max_staleness", "100000000"], 2, "it must be at least 0 and at most 1000"),
        (["verify", "--model", "m", "--top_p", "0"], 2, "top_p=0.0; it must be above 0 and at most 1"),
        (["serve", "m", "--max-num-batch-tokens", "9"], 2, "unknown argument 'max_num_batch_tokens'"),
        (["verify", "--model", "/no/such"], 2, "model directory /no/such does not exist"),
        (["verify", "--explain", str(tmp_path)], 0, "2 tokens checked"),
        (["verify", "--receipt", str(tmp_path / "receipt.jsonl")], 0, "PASS"),
        (["serve", "/no/such"], 2, "model directory /no/such does not exist"),
        (["evaluate", "--help"], 0, "usage: lockstep evaluate "),
        (["evaluate", *run[1:], "arithmetic"], 2, "there is nothing to evaluate on"),
        (["demo", "--help"], 0, "lockstep grpo --recipe arithmetic"),
        (["demo", "--max_stepz", "3"], 2, "did you mean 'max_steps'?"),
        (["grpo", "--recipe", "agents"], 2, "did you mean 'agent'?"),
        (["compare", "/no/such"], 2, "has no run.json"),
        (["rollouts", "/no/such"], 2, "is not a directory"),
        (["merge", "/no/such", "x"], 2, "has no adapter_config.json"),
        (["init", "--fast"], 2, "unrecognized arguments"),
    ]
    words = json.dumps([case[0] for case in cases])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, words], capture_output=True, text=True, timeout=120, check=True
    )
    for (line, code, said), answer in zip(cases, done.stdout.splitlines(), strict=True):
        found, out, err, heavy = json.loads(answer)
        assert (found, heavy) == (code, []), (line, answer)
        assert said in out + err, (line, answer)
        assert code == 0 or len(err.splitlines()) == 1


def test_every_field_of_ours_that_is_shown_has_a_group_and_no_other_one_has() -> None:
    for command in CLASSES:
        for name, field in fields_of(command).items():
            assert field.get("group", GROUPS[0]) in GROUPS, name
            if not is_shown(field) or "inherited" not in field:
                assert ("group" in field) == is_shown(field), name
            assert is_shown(field) or "common" not in field, name


@pytest.mark.parametrize("command", sorted(CLASSES))
def test_help_names_each_common_field_once_and_nothing_that_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    known = fields_of(command)

    def flags(*words: str) -> list[str]:
        assert main([command, *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        return [line.split()[0][2:] for line in lines if line.startswith("  --")]

    common, every = flags("--help"), flags("--help-all")
    assert sorted(common) == sorted(
        {"config", "recipe", "dry_run", *(n for n, f in known.items() if "common" in f)}
    )
    assert sorted(every) == sorted(
        {"config", "recipe", "dry_run", *(n for n, f in known.items() if is_shown(f))}
    )
    assert len(common) < 46
    # The fields that only this command has come first.
    assert common[3] == ("model" if command == "verify" else "model_name_or_path")
