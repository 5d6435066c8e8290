"""Every fault that can be injected into the running stack is caught by the proof that proof.md names for it."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import needs_vllm
from rich.console import Console
from stages import in_small_parts, stage_on

from lockstep.contract.tensors import LoadedWeights
from lockstep.extras.selftest.backward_faults import BACKWARD_FAULTS
from lockstep.extras.selftest.draw_faults import OF_EARLIER_IDS, OF_IDS
from lockstep.extras.selftest.loss_faults import LEARNED_FAULTS, LOSS_FAULTS
from lockstep.extras.selftest.optimizer_faults import OPTIMIZER_FAULTS
from lockstep.extras.selftest.rollout_faults import even_chance
from lockstep.extras.selftest.sampling_faults import samples_with
from lockstep.extras.selftest.seams import REACH, Fault, Patch, is_vllm
from lockstep.extras.selftest.self_test import FAULTS, Verdict, print_verdicts, run_self_test, verdict_of
from lockstep.extras.verify.run_checks import recover
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.chat import end_ids
from lockstep.watch.plain_forward import completion_logps

NO_FAULT = Fault("none", "no fault at all", lambda stage: nullcontext())
# The proofs that may stop each fault. Where there are two, the sampled tokens decide which one comes first.
CAUGHT_BY = {
    "T1": {"echo"},
    "T2": {"echo"},
    "T4": {"learned"},
    "L1": {"ends", "keys"},
    "T1b": {"turns"},
    "T5": {"template"},
    "T7": {"turns"},
    "T7b": {"learned"},
    "T8": {"tool_results"},
    "T8b": {"template"},
    "T9": {"learned"},
    "L2": {"keys"},
    "L3": {"gap"},
    "L4": {"keys"},
    "L5": {"gap"},
    "W1": {"module_probe"},
    "W2": {"module_probe"},
    "W3": {"module_probe", "gap"},
    "W3b": {"digest"},
    "W4": {"manifest"},
    "W4b": {"caches"},
    "W5": {"module_probe", "held_weights"},
    "W6": {"gap"},
    "W7": {"manifest"},
    "W8": {"module_probe"},
    "W9": {"live"},
    "W9b": {"live"},
    "W10": {"module_probe"},
    "W11": {"shards"},
    "W12": {"live"},
    "W13": {"module_probe"},
    "small-1": {"module_probe", "gap", "held_weights", "verify: module probe"},
    "small-2": {"module_probe", "gap"},
    "small-3": {"version", "held_weights"},
    **{f"small-{i}": {"module_probe", "held_weights", "verify: module probe"} for i in (4, 5, 7)},
    "small-6": {"module_probe", "held_weights"},
    "P1": {"gap"},
    "P2": {"gap", "settings"},
    "P3": {"logprobs"},
    "P3b": {"gap"},
    "P4": {"gap"},
    "P5": {"module_probe"},
    "P7": {"kept_ids"},
    "P7b": {"kept_ids"},
    "P8": {"kept_ids"},
    "P9-top_k": {"kept_ids"},
    "P9-top_p": {"kept_ids"},
    "P9-min_p": {"kept_ids"},
    "P10-top_k": {"kept_ids"},
    "P10-top_p": {"kept_ids"},
    "P10-min_p": {"kept_ids"},
    "P11": {"grammar"},
    "P11b": {"gap"},
    "P12": {"gap"},
    "P12b": {"gap"},
    "A1": {"verify: exact accounting"},
    "A2": {"verify: exact accounting"},
    "A3": {"learned", "model_gradient"},
    "A4": {"verify: finish reasons"},
    "A5": {"samples"},
    "A6": {"learned"},
    "S1-heat": {"draws", "verify: draws"},
    "S1-cold": {"draws", "verify: draws"},
    "S1-top_k": {"draws", "verify: draws"},
    "S1-top_p": {"draws", "verify: draws"},
    "S1-min_p": {"draws", "verify: draws"},
    "S1-two": {"draws", "verify: draws"},
    "S1-greedy": {"samples"},
    "S2-pairs": {"samples"},
    "S2-prompt": {"samples"},
    "S2-version": {"samples"},
    **{f"S5-{name}": {"draws", "verify: draws"} for name, *_ in (*OF_IDS, *OF_EARLIER_IDS)},
    "S3": {"ends"},
    "S3b": {"ends"},
    "S3c": {"ends"},
    "S3d": {"ends"},
    **{f"R{i}": {"advantages"} for i in range(1, 6)},
    "R6": {"rows"},
    "R7": {"rows"},
    **{f"G{i}": {"loss_gradient"} for i in range(1, 7)},
    "M1": {"temperature"},
    **{f"M{i}": {"learned"} for i in range(2, 8)},
    # `rows` compares the texts of one drawn group first.
    "M8": {"learned", "rows"},
    "U1": {"update"},
    "U2": {"update"},
    "U3": {"update"},
    "U4": {"update"},
    "U4b": {"learning_rate"},
    "U5": {"update"},
    "U6": {"update"},
    "R8": {"scores"},
    "R9": {"scores"},
    "B1": {"model_gradient"},
    "B2": {"model_gradient"},
    "B3": {"model_gradient"},
    "B4": {"model_gradient"},
    "B5": {"hooks"},
    "B6": {"model_gradient"},
    "B7": {"model_gradient"},
    **{f"B{i}": {"model_gradient"} for i in range(8, 11)},
    "U7": {"update"},
    "U8": {"update"},
    "U9": {"accumulation"},
    "U10": {"accumulation", "model_gradient"},
    "U11": {"clipping"},
    "U11b": {"clipping"},
    **{f"U12{variant}": {"optimizer"} for variant in ("", "b", "c", "d")},
    "U13": {"update"},
    "U13b": {"update"},
    "U14": {"update"},
    "U14b": {"clipping"},
    "S4": {"temperature", "model_gradient"},
    "S4b": {"temperature", "model_gradient"},
    "S4c": {"settings"},
    "S4d": {"settings"},
    "S4e": {"limits"},
    "S4f": {"settings"},
    "S4g": {"settings"},
    "S4h": {"interruption"},
    "S4i": {"rewards"},
    **{f"N1{letter}": {"prompts"} for letter in ("", "b", "c")},
    **{f"N2{letter}": {"prompts"} for letter in ("", "b")},
    **{f"E1{letter}": {"gap"} for letter in ("", "b", "c", "d", "e")},
    "E1f": {"rows"},
    "E1g": {"evaluation"},
    "E1h": {"evaluation"},
    "E1i": {"evaluation"},
    "E1j": {"ends"},
    "E1k": {"draws"},
}


# Faults of the trainer's own computation. The engine that sampled takes no part in it: CI injects them beside one
# kind of engine.
OF_THE_TRAINER = {fault.id for fault in (*LOSS_FAULTS, *BACKWARD_FAULTS, *LEARNED_FAULTS, *OPTIMIZER_FAULTS)}
# Proofs that compare computed numbers. All others compare ids, texts, settings or rewards, which are the same in bf16.
OF_NUMBERS = {
    "gap",
    "module_probe",
    "held_weights",
    "kept_ids",
    "draws",
    "loss_gradient",
    "model_gradient",
    "update",
    "accumulation",
    "clipping",
}
OF_NUMBERS |= {"learning_rate", "verify: exact accounting", "verify: draws"}
IN_BF16 = tuple(fault for fault in FAULTS if CAUGHT_BY[fault.id] & OF_NUMBERS)
# What rounding in bf16 hides. Beside that, nothing scores the tokens before the only step of a generation.
HIDDEN = {"W10", "W11", "P5", "S1-heat", "S1-cold", "M3", "M4", "M5"}
# What needs the ids before a token, which the sampler of vLLM is not told.
HIDDEN |= {f"S5-{name}" for name, *_ in OF_EARLIER_IDS}
# One fault per proof: the limits of bf16 are those of a proof, not of a fault.
OF_EACH_PROOF = tuple(
    {"/".join(sorted(CAUGHT_BY[f.id])): f for f in reversed(IN_BF16) if f.id not in HIDDEN}.values()
)


@dataclass
class SelfTest:
    """One run of `lockstep verify --self-test` on a stage.

    Attributes:
        control: the verdict without a fault.
        verdicts: the verdict on each fault, by its id.
        before: the weights before the run. They are those of the stage.
    """

    control: Verdict
    verdicts: dict[str, Verdict]
    before: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def self_test(stage: Stage) -> SelfTest:
    """The faults are injected into the same stage, one after the other, as a user's `--self-test` does."""
    before = {n: p.detach().clone() for n, p in stage.model.named_parameters()}
    faults = tuple(fault for fault in FAULTS if not (is_vllm(stage) and fault.id in OF_THE_TRAINER))
    control, *verdicts = run_self_test(stage, lambda name: None, faults)
    return SelfTest(control, {verdict.id: verdict for verdict in verdicts}, before)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
def test_the_fault_is_caught_by_its_proof(self_test: SelfTest, fault: Fault) -> None:
    verdict = self_test.verdicts.get(fault.id)
    if verdict is None:
        pytest.skip(
            "a fault of the trainer: injected beside the transformers engine, and before a release beside vLLM"
        )
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.caught_by in CAUGHT_BY[fault.id], f"{verdict.caught_by}: {verdict.message}"


def test_an_injection_leaves_nothing_behind(stage: Stage, self_test: SelfTest) -> None:
    assert self_test.control.caught_by == "", self_test.control.message
    recover(stage)
    assert all(torch.equal(p, self_test.before[n]) for n, p in stage.model.named_parameters())
    assert "serve" not in vars(stage.engine)
    assert stage.step() > 0
    # The proofs have no reason to stop a step after the last fault either.
    again, _ = run_self_test(stage, lambda name: None, (NO_FAULT,))
    assert again.caught_by == "", again.message


@pytest.mark.release
def test_the_faults_of_the_trainer_are_caught_beside_every_engine(stage: Stage) -> None:
    control, *verdicts = run_self_test(
        stage, lambda name: None, tuple(f for f in FAULTS if f.id in OF_THE_TRAINER)
    )
    assert control.caught_by == "", control.message
    others = [v for v in verdicts if not v.skipped and v.caught_by not in CAUGHT_BY[v.id]]
    assert [(v.id, v.caught_by, v.message) for v in others] == []


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(
    "faults", [OF_EACH_PROOF, pytest.param(FAULTS, marks=pytest.mark.release)], ids=["limits", "every"]
)
def test_in_bf16_every_fault_that_its_rounding_leaves_is_caught(
    tied_dir: str, tmp_path: Path, faults: tuple[Fault, ...]
) -> None:
    with in_small_parts(), stage_on(tied_dir, tmp_path, use_vllm=True, bf16=True) as stage:
        control, *verdicts = run_self_test(stage, lambda name: None, faults)
    assert control.caught_by == "", control.message
    assert {v.id for v in verdicts if v.skipped} == HIDDEN & {fault.id for fault in faults}
    assert [v.id for v in verdicts if not v.skipped and not v.caught_by] == []


def test_the_table_is_that_of_the_faults() -> None:
    assert set(CAUGHT_BY) == {fault.id for fault in FAULTS}


def test_a_fault_that_nothing_catches_is_reported_as_such(stage: Stage) -> None:
    _, verdict = run_self_test(stage, lambda name: None, (NO_FAULT,))
    assert (verdict.caught_by, verdict.steps) == ("", 3)


def test_completions_end_under_a_policy_that_would_hardly_end_them(stage: Stage) -> None:
    ends = end_ids(stage.model, stage.tokenizer)

    def chances(distribution: Any) -> list[float]:
        found = [
            [completion_logps(stage.model, p.ids, [end], distribution, stage.precision).exp() for end in ends]
            for p in stage.prompts
        ]
        return [float(torch.cat(own).sum()) for own in found]

    with stage.kept_weights():
        # A run may have moved its policy this far.
        with torch.no_grad():
            stage.model.lm_head.weight *= 8
        assert median(chances(stage.sampling(temperature=1.0))) < 0.1
        bias = dict.fromkeys(map(str, ends), even_chance(stage, ends))
        with samples_with(stage, logit_bias=bias):
            assert median(chances(stage.trainer.proofs.distribution)) == pytest.approx(0.5, abs=0.02)


def raises(*anything: object) -> Any:
    raise ValueError("'lm_head.weight' was skipped because it is tied")


def breaks_a_load(stage: Stage) -> Patch:
    """The engine's loader raises an error after it has begun, as vLLM's loader does."""
    real = stage.engine.load

    def load(tensors: Any, base: str = "") -> Any:
        real(list(tensors)[:3], base)
        raises()

    return patch.object(stage.engine, "load", load)


EMPTY_LOAD = next(fault for fault in FAULTS if fault.id == "W4")
BROKEN = (
    Fault("needs", "", lambda stage: nullcontext(), needs=raises),
    Fault("inject", "", raises),
    Fault("step", "", breaks_a_load),
)


def test_a_fault_that_raises_is_a_row_and_the_next_faults_are_injected(stage: Stage) -> None:
    control, *verdicts = run_self_test(stage, lambda name: None, (*BROKEN, EMPTY_LOAD, NO_FAULT))
    assert not control.caught_by, control.message
    assert not control.error, control.message
    *broken, caught, missed = verdicts
    said = "ValueError: 'lm_head.weight' was skipped because it is tied"
    pushed = "raised LockstepError: the weights could not be pushed into the engine: "
    for verdict, begin in zip(broken, ("not injected: ", "not injected: ", pushed), strict=True):
        assert verdict.error.startswith(begin + said)
    assert all("Traceback" in v.message and "in raises" in v.message for v in broken)
    assert (caught.caught_by, caught.error) == ("manifest", "")
    assert (missed.caught_by, missed.error, missed.steps) == ("", "", 3)


def test_what_a_fault_leaves_is_not_taken_for_the_catch_of_the_next_one(stage: Stage) -> None:
    def stays(stage: Stage) -> Patch:
        stage.engine.load = lambda tensors, base="": LoadedWeights((), ())  # type: ignore[method-assign]
        return nullcontext()

    try:
        _, first, second = run_self_test(stage, lambda name: None, (Fault("stays", "", stays), EMPTY_LOAD))
    finally:
        del stage.engine.load
    assert first.caught_by == "manifest"
    assert second.caught_by == ""
    assert second.error.startswith(
        "not injected: LockstepError: the engine cannot be restored after the fault before: manifest"
    )
    recover(stage)


@pytest.mark.parametrize("calls", [0, 2])
def test_a_fault_that_the_engine_never_met_is_not_told_as_a_blind_proof(calls: int) -> None:
    """Under a CUDA graph, for example, vLLM goes on without a patch."""
    engine = SimpleNamespace(forward=lambda: None)
    stage: Any = SimpleNamespace(
        trainer=SimpleNamespace(proofs=SimpleNamespace(forget_evidence=lambda: None)),
        kept_weights=nullcontext,
    )
    fault = Fault("E1b", "a window", lambda _: patch.object(engine, "forward", REACH.of(lambda: None)))

    def attempt(stage: Stage, fault: Fault, injection: Any) -> Verdict:
        injection.begin()
        for _ in range(calls):
            engine.forward()
        return Verdict(fault.id, fault.what)

    found = verdict_of(stage, fault, attempt)
    console = Console(record=True, width=200, file=io.StringIO())
    code = print_verdicts([Verdict("W4", "an empty load", caught_by="manifest"), found], console, None)
    said = console.export_text()
    assert (found.unreached, code) == ((False, 1) if calls else (True, 3))
    assert ("NOTHING" in said) is bool(calls)
    assert ("1 injected, 1 caught, 1 not injected" in said) is (not calls)


def test_an_error_fails_the_self_test_and_is_told_in_the_table(tmp_path: Path) -> None:
    caught = Verdict("W4", "an empty load", caught_by="manifest", tokens=12, steps=1)
    for wrong in (
        Verdict("W8", "a restarted engine", error="raised ValueError: tied"),
        Verdict("-", "nothing: a control", way="adapters alone", error="not begun: ProofError: no"),
        Verdict("-", "nothing: a control", caught_by="gap", message="over"),
        Verdict("W8", "a restarted engine"),
    ):
        console = Console(record=True, width=200, file=io.StringIO())
        assert print_verdicts([caught, wrong], console, str(tmp_path / "verdicts.json")) == 1
        said = console.export_text()
        assert all(word in said for word in (wrong.error or wrong.message or "NOTHING", "caught"))
        assert not json.loads((tmp_path / "verdicts.json").read_text())["passed"]
    assert print_verdicts([caught], Console(file=io.StringIO()), None) == 0
