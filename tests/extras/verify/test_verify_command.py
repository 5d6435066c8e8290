"""`lockstep verify` from its command line: proofs that pass, proofs that fail, and settings that cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM, needs_vllm
from servers import KEY, free_port
from tiny import make_model, make_tokenizer, save_model
from transformers import AutoConfig

import lockstep.extras.verify.stage
from lockstep.cli.main import main
from lockstep.extras.selftest import self_test
from lockstep.extras.verify.run_checks import CHECKS
from lockstep.extras.verify.stage import stage_config
from lockstep.extras.verify.verify_command import VerifyArguments, adapter_stage
from lockstep.server.keys import KEY_VARIABLE

ROWS = [
    "tokenizer guards",
    "vocabulary",
    "chat template",
    "settings handshake",
    "token echo",
    "finish reasons",
    "group layout",
    "repeated request",
    "module probe",
    "held weights",
    "canary",
    "log-probs, T = 1",
    "log-probs, T = 0.7",
    "log-probs, T = 0.7, top-k 20",
    "log-probs, T = 1, top-p 0.9",
    "log-probs, T = 1, min-p 0.05",
    "draws",
    "parity gap, engine float32, trainer float32 (this run)",
    "parity gap, engine float32, trainer bfloat16",
    "training step",
    "exact accounting",
    "sync: moved weights",
    "sync: pushed back",
    "caches after a sync",
    "weight versions",
]


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=VLLM), pytest.param("server", marks=VLLM)]
)
def test_a_good_model_passes_every_row(
    engine: str,
    untied_dir: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "rows.json"
    words = ["verify", "--model", untied_dir, "--engine", engine, "--dtype", "float32", "--json", str(file)]
    if engine == "server":
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        words += ["--vllm_server_base_url", request.getfixturevalue("server").url]
    assert main(words) == 0
    found = json.loads(file.read_text())
    assert [row["proof"] for row in found["rows"]] == ROWS
    assert found["passed"]
    assert all(row["passed"] for row in found["rows"])
    (probe,) = [row for row in found["rows"] if row["proof"] == "module probe"]
    names = {name for name, _ in make_model().named_parameters() if not name.endswith("bias")}
    assert set(probe["details"]["errors"]) == names
    out = capsys.readouterr().out
    assert f"{len(ROWS)} proofs, 0 failed" in out
    assert "PASS" in out


@pytest.mark.long
def test_the_self_test_also_runs_with_several_steps_per_generation_and_with_generations_ahead(
    untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = [f for f in self_test.faults_of_runs() if f.id == "M2"]
    # `tests/faults/` injects all of them.
    monkeypatch.setattr(self_test, "faults_of_runs", lambda: (fault,))
    monkeypatch.setattr(
        self_test, "run_self_test", lambda stage, progress: [self_test.Verdict("-", "nothing")]
    )
    file = tmp_path / "verdicts.json"
    words = [
        "verify",
        "--model",
        untied_dir,
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--json",
        str(file),
    ]
    assert main([*words, "--self-test"]) == 0
    found = json.loads(file.read_text())
    assert (found["passed"], found["injected"], found["caught"]) == (True, 2, 2)
    ways = {v["way"]: v["caught_by"] for v in found["faults"] if v["id"] == "M2"}
    assert ways == {"several steps per generation": "learned", "max_staleness 2": "learned"}
    assert "max_staleness 2" in capsys.readouterr().out


def test_a_self_test_that_is_ended_early_leaves_what_it_has_found(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_early(stage: Any, progress: Any) -> Iterator[self_test.Verdict]:
        yield self_test.Verdict("-", "nothing")
        yield self_test.Verdict("W4", "an empty load", caught_by="manifest")
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "run_self_test", ends_early)
    file = tmp_path / "verdicts.json"
    words = [
        "verify",
        "--model",
        untied_dir,
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--json",
        str(file),
    ]
    assert main([*words, "--self-test"]) != 0
    found = json.loads(file.read_text())
    assert (found["injected"], found["caught"], found["passed"], found["ended"]) == (1, 1, False, False)


def test_the_runs_own_filters_are_verified_beside_the_fixed_ones(untied_dir: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = [
        "verify",
        "--model",
        untied_dir,
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--json",
        str(file),
    ]
    filters = [
        "--top_p",
        "0.9",
        "--repetition_penalty",
        "1.2",
        "--vllm_structured_outputs_regex",
        "[a-z ]{4,60}",
    ]
    assert main([*words, *filters]) == 0
    rows = json.loads(file.read_text())["rows"]
    place = ROWS.index("draws")
    assert [row["proof"] for row in rows] == [
        *ROWS[:place],
        "log-probs, the run's own settings",
        *ROWS[place:],
    ]
    assert rows[place]["details"]["tokens"] > 20


@pytest.mark.vllm
@pytest.mark.release
@pytest.mark.real_model
@needs_vllm
def test_the_packaged_model_passes_every_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert (
        main(["verify", "--config", "recipes/arithmetic.yaml", "--dtype", "float32", "--json", str(file)])
        == 0
    )
    found = json.loads(file.read_text())
    assert [row["proof"] for row in found["rows"]] == ROWS
    (probe,) = [row for row in found["rows"] if row["proof"] == "module probe"]
    # The probe covers every tensor of the checkpoint, and the tied head under its own name.
    assert len(probe["details"]["errors"]) == 273
    assert probe["details"]["unreached"] == []


@pytest.mark.vllm
@needs_vllm
def test_bf16_on_both_sides_passes(untied_dir: str) -> None:
    assert main(["verify", "--model", untied_dir, "--engine", "vllm", "--dtype", "bfloat16"]) == 0


@pytest.fixture
def only() -> Iterator[Callable[..., None]]:
    """Leaves some of the checks, for a test that does not need the others."""
    every = dict(CHECKS)

    def leave(*names: str) -> None:
        CHECKS.clear()
        CHECKS.update({name: check for name, check in every.items() if name in names})

    yield leave
    leave(*every)


def test_settings_that_differ_are_a_failed_row_with_the_fix(
    untied_dir: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    only: Callable[..., None],
) -> None:
    from dataclasses import replace

    from lockstep.engines.transformers_engine import TransformersEngine

    only("settings handshake")
    real = TransformersEngine.settings
    monkeypatch.setattr(
        TransformersEngine, "settings", lambda self: replace(real(self), logprobs_mode="raw_logprobs")
    )
    assert main(["verify", "--model", untied_dir, "--engine", "transformers", "--dtype", "float32"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "logprobs_mode is 'raw_logprobs'" in " ".join(out.split())
    assert "what to change" in out


def test_a_failed_check_does_not_end_the_others(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable[..., None]
) -> None:
    from lockstep.errors import ProofError

    def fails(stage: object) -> list:
        raise ProofError("gap", "found", "cause", "fix")

    only("vocabulary", "token echo", "finish reasons", "training step")
    monkeypatch.setitem(CHECKS, "token echo", fails)
    file = tmp_path / "rows.json"
    words = [
        "verify",
        "--model",
        untied_dir,
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--json",
        str(file),
    ]
    assert main(words) == 1
    rows = json.loads(file.read_text())["rows"]
    assert [row["proof"] for row in rows] == [name for name in ROWS if name in CHECKS]
    assert [row["proof"] for row in rows if not row["passed"]] == ["token echo"]


def test_the_users_own_prompts_are_verified(
    untied_dir: str, tmp_path: Path, only: Callable[..., None]
) -> None:
    only("chat template", "token echo", "finish reasons")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"hello world {i}"}) + "\n" for i in range(4)))
    words = [
        "verify",
        "--model",
        untied_dir,
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--plain-prompts",
    ]
    assert main([*words, "--dataset_name", str(data)]) == 0


def test_a_run_that_interrupts_thinking_can_be_verified(capsys: pytest.CaptureFixture[str]) -> None:
    # The completions of the stage are shorter than the thinking of such a run.
    words = [
        "--max_thinking_length",
        "4096",
        "--min_thinking_length",
        "2048",
        "--max_completion_length",
        "8192",
    ]
    assert main(["verify", "--model", "./nowhere", "--dry_run", *words]) == 0
    assert "max_thinking_length: null" in capsys.readouterr().out


def test_a_dry_run_prints_what_would_be_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "./nowhere", "--temperature", "0.7", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "temperature: 0.7" in out
    assert "max_completion_length: 12" in out


class TestBadInput:
    """Bad input gives one clear line and exit code 2."""

    def refused(self, words: list[str], capsys: pytest.CaptureFixture[str], *expected: str) -> None:
        assert main(["verify", *words]) == 2
        error = capsys.readouterr().err
        # The other lines say what is under way.
        (line,) = [line for line in error.splitlines() if not line.endswith((" …", " s"))]
        assert line.startswith("lockstep: ")
        for part in expected:
            assert part in error

    def test_no_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused([], capsys, "--model")

    def test_no_such_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["--model", "./nowhere"], capsys, "does not exist")

    def test_a_server_that_is_not_there(self, untied_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--vllm_server_port", str(free_port()), "--vllm_server_timeout", "1"]
        assert main(["verify", "--model", untied_dir, "--engine", "server", *words]) == 1
        assert "did not answer within 1 s" in capsys.readouterr().err

    def test_the_self_test_on_a_server(self, untied_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--model", untied_dir, "--engine", "server", "--self-test"]
        self.refused(words, capsys, "--engine vllm")

    def test_an_engine_that_nobody_knows(self, untied_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["--model", untied_dir, "--engine", "sglang"], capsys, "'sglang'", "vllm, transformers")

    def test_a_dtype_that_nobody_knows(self, untied_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["--model", untied_dir, "--dtype", "int3"], capsys, "'int3'", "bfloat16")

    def test_a_tokenizer_without_a_chat_template(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_model().save_pretrained(tmp_path)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path)
        words = ["--model", str(tmp_path), "--engine", "transformers", "--dtype", "float32"]
        self.refused(words, capsys, "no chat template", "--plain_prompts")
        assert main(["verify", *words, "--plain_prompts"]) == 0

    def test_a_quantised_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_model(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        config.quantization_config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        config.save_pretrained(tmp_path)
        self.refused(["--model", str(tmp_path)], capsys, "is quantised", "full-precision")

    @pytest.mark.vllm
    @needs_vllm
    def test_a_model_that_the_engine_cannot_load(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from transformers import AutoModelForCausalLM, Qwen2Config

        # Attention heads of 16, which vLLM's CPU kernels do not have.
        small = Qwen2Config(
            vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        self.refused(["--model", str(tmp_path), "--engine", "vllm"], capsys, "vLLM cannot load")

    def test_sampling_that_training_refuses(
        self, untied_dir: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.refused(
            ["--model", untied_dir, "--top_p", "0"], capsys, "top_p=0.0; it must be above 0 and at most 1"
        )

    def test_a_missing_receipt(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["--receipt", str(tmp_path / "receipt.jsonl")], capsys, "does not exist")

    def test_a_directory_that_is_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["--explain", str(tmp_path)], capsys, "has no receipt.jsonl")


def test_on_a_gpu_faults_of_adapters_meet_an_engine_in_half_precision(
    untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, vLLM computes adapters in nothing else. In float32, the self-test would leave all their faults out."""
    opened: list[Any] = []

    @contextmanager
    def recorded(name: str, config: Any, *rest: Any, **more: Any) -> Iterator[str]:
        opened.append(config)
        yield "a stage"

    config = stage_config(str(tmp_path), bf16=False)
    assert config.engine_torch_dtype == torch.float32
    monkeypatch.setattr(lockstep.extras.verify.stage, "open_stage", recorded)
    for is_gpu, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        with adapter_stage(untied_dir, VerifyArguments(), config) as stage:
            assert stage == "a stage"
        assert opened.pop().engine_torch_dtype == dtype
        assert ("bfloat16" in capsys.readouterr().err) == is_gpu
