"""The formulas of optimizers are those of torch, transformers and bitsandbytes; a wrong step of each is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.optimization import Adafactor

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.watch.elements import DrawnElements
from lockstep.watch.factored_steps import FactoredSteps
from lockstep.watch.optimizer_rules import OptimizerRule
from lockstep.watch.optimizer_settings import OptimizerSettings, Taken
from lockstep.watch.receipt import read_receipt

TORCH: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    "adamw_amsgrad": (torch.optim.AdamW, {"amsgrad": True, "betas": (0.5, 0.6), "weight_decay": 0.1}),
    "adamw_maximize": (torch.optim.AdamW, {"maximize": True}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adam_amsgrad": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "betas": (0.5, 0.6)}),
    "adam_decoupled": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "maximize": True}),
    "sgd_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "weight_decay": 0.1}),
    "rmsprop_centered": (torch.optim.RMSprop, {"alpha": 0.9, "centered": True, "momentum": 0.5}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
}


def bitsandbytes(name: str) -> Any:
    return getattr(pytest.importorskip("bitsandbytes").optim, name)


class Steps:
    """An optimizer with the rule that compares its steps."""

    def __init__(self, kind: Any, given: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in ((40, 30), (7,), (90, 50))
        ]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "lr": 0.02}]
        self.optimizer = kind(groups, **{"lr": 0.01, **given})
        names = {p: str(i) for i, p in enumerate(self.parameters)}
        settings = OptimizerSettings(self.optimizer, None, names, None, Taken(None, []))
        self.rule = OptimizerRule(settings, self.parameters, list(names.values()))
        self.drawn = DrawnElements.of(self.parameters, (1,))

    def wrong(self, fault: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None) -> set[str]:
        """What differs after a step with other gradients: `values`, and parts of the state."""
        before = self.rule.read(self.drawn)
        for p in self.parameters:
            p.grad = torch.randn_like(p)
        gradients = self.drawn.read([p.grad for p in self.parameters])
        fault(self.optimizer)
        self.optimizer.step()
        expected = self.rule.expected(before, gradients, self.drawn, [0.01, 0.02])
        assert expected is not None
        found = self.rule.read(self.drawn)
        differs = self.rule.state_differs(expected.step, found, self.drawn)
        differs["values"] = ~((found.values - expected.step.values).abs() <= expected.slack)
        return {name for name, flags in differs.items() if bool(flags.any())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TORCH)
def test_every_step_and_state_of_torch_is_the_formulas(name: str, dtype: torch.dtype) -> None:
    steps = Steps(*TORCH[name], dtype)
    assert steps.rule.known
    assert [steps.wrong() for _ in range(6)] == [set()] * 6


@pytest.mark.parametrize("name", ["Lion32bit", "Lion", "PagedLion32bit", "AdamW32bit", "PagedAdamW32bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_step_and_state_of_bitsandbytes_is_the_formulas(name: str, dtype: torch.dtype) -> None:
    steps = Steps(bitsandbytes(name), {"weight_decay": 0.1, "betas": (0.9, 0.95)}, dtype)
    assert steps.rule.known
    assert [steps.wrong() for _ in range(6)] == [set()] * 6


def test_optimizers_with_another_step_have_no_formula() -> None:
    class Own(torch.optim.AdamW):
        pass

    others = (
        (Own, {}),
        (torch.optim.NAdam, {}),
        (bitsandbytes("Lion"), {"optim_bits": 8}),
        (Adafactor, {"lr": None}),
    )
    for kind, given in others:
        assert not Steps(kind, given).rule.known


def faster(optimizer: torch.optim.Optimizer) -> None:
    """The rate is off by one part in a thousand."""
    for group in optimizer.param_groups:
        group["lr"] *= 1.001


def without_decay(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def halved(key: str) -> Callable[[torch.optim.Optimizer], None]:
    """A part of the state is halved before the step."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state[key] = state[key] / 2

    return change


@pytest.mark.parametrize("name", ["adamw_amsgrad", "adam", "sgd", "rmsprop", "adagrad"])
@pytest.mark.parametrize("fault", [faster, without_decay])
def test_a_wrong_setting_of_a_step_is_seen(name: str, fault: Any) -> None:
    steps = Steps(*TORCH[name])
    assert not steps.wrong()
    assert "values" in steps.wrong(fault)


@pytest.mark.parametrize(
    ("name", "key", "part"),
    [
        ("adamw_amsgrad", "max_exp_avg_sq", "highest"),
        ("adam", "exp_avg", "first"),
        ("sgd_momentum", "momentum_buffer", "velocity"),
        ("rmsprop_centered", "grad_avg", "mean"),
        ("rmsprop_centered", "momentum_buffer", "velocity"),
        ("adagrad", "sum", "sum"),
    ],
)
def test_a_changed_state_is_seen(name: str, key: str, part: str) -> None:
    steps = Steps(*TORCH[name])
    assert not steps.wrong()
    assert part in steps.wrong(halved(key))


def test_a_lost_momentum_of_sgd_is_seen() -> None:
    steps = Steps(*TORCH["sgd_momentum"])
    assert not steps.wrong()
    assert {"values", "velocity"} <= steps.wrong(lambda optimizer: optimizer.state.clear())


def test_a_lion_that_takes_the_sign_of_the_gradient_is_seen() -> None:
    steps = Steps(bitsandbytes("Lion32bit"), {})
    assert not steps.wrong()
    assert "values" in steps.wrong(halved("state1"))


class Factored:
    """Adafactor with the proof of its steps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        shapes = ((40, 30), (7,), (3, 20, 10), (90, 50))
        self.parameters = [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in shapes]
        self.optimizer = Adafactor(
            self.parameters, lr=0.01, scale_parameter=False, relative_step=False, weight_decay=0.1
        )
        names = list(map(str, shapes))
        self.proof = FactoredSteps(self.optimizer, names, self.parameters, [0] * 4, 0)

    def step(
        self, fault: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
    ) -> None:
        for p in self.parameters:
            p.grad = torch.randn_like(p) * torch.rand_like(p[..., :1]) ** 3
        self.proof.before()
        fault()
        self.optimizer.step()
        after()
        self.proof.check([0.01])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_tensor_of_adafactor_is_compared_within_ten_steps(dtype: torch.dtype) -> None:
    factored = Factored(dtype)
    seen = set()
    for step in range(20):
        factored.proof.keep(step)
        factored.step()
        if step >= 10:
            seen |= set(factored.proof._turn)
    assert seen == set(range(4))


def scaled(factored: Factored, key: str, by: float) -> None:
    for state in factored.optimizer.state.values():
        if key in state:
            state[key] *= by


@pytest.mark.parametrize(
    ("index", "fault", "said"),
    [
        (0, lambda f: f.optimizer.param_groups[0].update(lr=0.01002), "changed by"),
        (0, lambda f: f.optimizer.param_groups[0].update(clip_threshold=0.5), "changed by"),
        (2, lambda f: scaled(f, "exp_avg_sq_row", 1.5), "changed by"),
        (1, lambda f: scaled(f, "exp_avg_sq", 1.5), "changed by|mean square"),
        (3, lambda f: f.optimizer.state.clear(), "changed by|mean square"),
        (3, lambda f: f.parameters[3].grad.mul_(2), "changed by|mean square"),
    ],
)
def test_a_wrong_step_of_adafactor_is_seen(index: int, fault: Any, said: str) -> None:
    factored = Factored()
    for step in range(3):
        factored.proof.keep(step)
        factored.step()
    factored.proof.keep(10 - index)
    assert factored.proof._turn == [index]
    with pytest.raises(ProofError, match=said):
        factored.step(lambda: fault(factored))


@pytest.mark.parametrize(
    ("index", "key", "said"),
    [
        (2, "exp_avg_sq_row", "square of a row"),
        (3, "exp_avg_sq_col", "of a column"),
        (1, "exp_avg_sq", "square of"),
    ],
)
def test_a_state_of_adafactor_that_is_changed_after_the_step_is_seen(index: int, key: str, said: str) -> None:
    factored = Factored()
    factored.proof.keep(10 - index)
    with pytest.raises(ProofError, match=said):
        factored.step(after=lambda: scaled(factored, key, 1.001))


class Begin(TrainerCallback):
    """Calls a function at the beginning of the third step."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._work()


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "lion_32bit", "rmsprop", "adagrad"])
def test_a_run_whose_optimizer_leaves_half_of_a_tensor_is_stopped(
    optim: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**methods.GROUPS, "optim": optim, "max_steps": 14}
    )
    head = run.model.lm_head.weight

    def begin() -> None:
        optimizer = run.optimizer.optimizer
        real = optimizer.step

        def step(closure: Any = None) -> None:
            kept = head.detach().clone()
            real()
            head.data[: len(head) // 2].copy_(kept[: len(head) // 2])

        optimizer.step = step

    run.add_callback(Begin(begin))
    with pytest.raises(ProofError, match=r"an element of lm_head\.weight changed by"):
        run.train()
    # Adafactor's tensors follow each other.
    assert run.state.global_step <= (12 if optim == "adafactor" else 4)


def test_an_optimizer_without_a_formula_is_named_in_the_receipt(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    model = AutoModelForCausalLM.from_pretrained(untied_dir)
    own = torch.optim.NAdam(model.parameters(), lr=0.01)
    fields = {**methods.GROUPS, "max_steps": 2}
    methods.make("GRPO", model, tmp_path, hf_engine, fields, optimizers=(own, None)).train()
    lines = [line for line in read_receipt(tmp_path / "receipt.jsonl") if line["kind"] == "unproven"]
    assert [(line["proof"], "NAdam" in line["why"]) for line in lines] == [("update", True)]
