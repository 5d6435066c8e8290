"""An error of an engine or of a library becomes one line with its type, its text and its place (`errors.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CONTEXT

from lockstep.cli.main import main
from lockstep.cli.output import libraries_aside
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError, foreign_errors
from lockstep.models.arithmetic import Precision
from lockstep.models.policy import load_policy
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.push import ProvenPusher

BARE = r"AssertionError: without a text \(.*test_foreign_errors\.py:\d+, raise AssertionError\)"


def bare(*args: Any, **kwargs: Any) -> Any:
    """A library whose own check fails without a word, as vLLM's loaders of experts."""
    raise AssertionError


def long(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("first line\n  second line\nframe #0: c10::Error::Error")


def test_an_error_of_several_lines_becomes_one_and_keeps_the_librarys_own() -> None:
    with pytest.raises(LockstepError) as found, foreign_errors("the push failed"):
        long()
    assert "\n" not in str(found.value)
    assert str(found.value).startswith("the push failed: KeyError: ")
    assert "test_foreign_errors.py:" in str(found.value)
    assert isinstance(found.value.__cause__, KeyError)


def test_a_bare_assertion_is_named_by_its_line() -> None:
    said = "vLLM cannot load it"
    with pytest.raises(InputError, match=f"^{said}: {BARE}$"), foreign_errors(said, InputError):
        bare()


@pytest.mark.parametrize(
    "own",
    [InputError("a"), ProofError("gap", "a", "b", "c"), EngineLost("a", lambda: None), KeyboardInterrupt()],
)
def test_lockstep_s_own_errors_and_signals_go_on_unchanged(own: BaseException) -> None:
    with pytest.raises(type(own)) as found, foreign_errors("the push failed"):
        raise own
    assert found.value is own


@pytest.fixture
def engine(untied_dir: str) -> TransformersEngine:
    return TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )


Work = Callable[[TransformersEngine, ProvenPusher], Any]
REQUEST = GenerationRequest(RequestKey("a", 0), [7, 8], Sampling(max_tokens=2), 0)
# What is asked, the method of the engine or of its model that fails, and the beginning of the error.
ASKED: dict[str, tuple[Work, str, str]] = {
    "push": (
        lambda engine, pusher: pusher.push(1),
        "load",
        "the weights could not be pushed into the engine",
    ),
    "probe": (
        lambda engine, pusher: pusher.push(1),
        "probe",
        "the modules of the engine could not be probed",
    ),
    "canary": (
        lambda engine, pusher: pusher.push(1, canary=True),
        "settings",
        "the canary could not be scored",
    ),
    "score": (
        lambda engine, pusher: engine.score({"a": (5, 6, 7)}),
        "model.model.forward",
        "transformers failed while it scored sequences",
    ),
    "sample": (
        lambda engine, pusher: engine.generate([REQUEST]),
        "model.forward",
        "transformers failed while it sampled",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_an_engine_raises_says_what_was_asked_of_it(
    name: str, engine: TransformersEngine, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, fails, said = ASKED[name]
    pusher = ProvenPusher(load_policy(untied_dir), engine, torch.float32, Precision(None))
    pusher.push(0)
    place, _, method = fails.rpartition(".")
    owner: Any = engine
    for part in place.split(".") if place else ():
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, method, bare)
    with pytest.raises(LockstepError, match=f"^{said}: {BARE}$"):
        work(engine, pusher)


def test_what_the_trainers_own_model_raises_says_what_it_was_asked(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_policy(untied_dir)
    monkeypatch.setattr(model.model, "forward", bare)
    with pytest.raises(LockstepError, match=f"^the trainer could not score a completion: {BARE}$"):
        completion_logps(model, [5, 6], [7], Sampling(1))


@pytest.mark.parametrize("command", ["verify", "grpo"])
def test_a_command_ends_with_one_line(
    command: str,
    untied_dir: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TransformersEngine, "load", bare)
    words = {
        "verify": ["--model", untied_dir, "--engine", "transformers", "--plain_prompts"],
        "grpo": ["--recipe", "arithmetic", "--model_name_or_path", untied_dir, "--use_vllm", "False", "--max_steps",
        "1",
                 "--eval_size", "2", "--output_dir", str(tmp_path / "run"), "--bf16", "False"],
    }[command]  # fmt: skip
    assert main([command, *words]) == 1
    shown = capfd.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if "AssertionError" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "lockstep: the weights could not be pushed into the engine: AssertionError: without a text ("
    )
    assert "Traceback" not in shown.out + shown.err
    if command == "grpo":
        assert "in bare" in (tmp_path / "run" / "libraries.log").read_text(encoding="utf-8")


def test_the_traceback_is_kept_in_the_libraries_log(tmp_path: Path) -> None:
    def push() -> None:
        with libraries_aside() as log, foreign_errors("the push failed"):
            log.move_to(tmp_path)
            bare()

    with pytest.raises(LockstepError):
        push()
    kept = (tmp_path / "libraries.log").read_text(encoding="utf-8")
    assert "in bare" in kept
