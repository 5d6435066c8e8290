"""The model's backward beside finite differences of a plain forward: right ones pass, wrong ones are named."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from filters import draw, rules_of
from model_families import make_family
from stages import config
from test_filtered_scores import ALONE, PROMPTS
from tiny import make_model
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

import lockstep.watch.finite_differences as differences
import lockstep.watch.model_gradient as module
from lockstep.contract.sampling import Sampling
from lockstep.errors import LockstepError, ProofError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.watch.model_gradient import Checked, ModelGradient

Handle = torch.utils.hooks.RemovableHandle
PLAIN = Sampling(6, temperature=0.8)


def policy_of(
    model: PreTrainedModel,
    sampling: Sampling = PLAIN,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **more: Any,
) -> Policy:
    if not more.get("plain_rows"):
        adopt_tree_attention(model)
    return Policy(model.train(), autocast, lambda loss: loss.backward(), rules=rules_of(sampling), **more)


def checked(
    policy: Policy,
    folder: Path,
    sequences: list[TrainingSequence] | None = None,
    *,
    bf16: bool = False,
    **more: Any,
) -> float | None:
    """The error of one check, as a run would make it at its first step."""
    assert policy.rules is not None
    settings = config(folder, bf16=bf16, temperature=policy.rules.sampling.temperature)
    modules = [policy.model, *([policy.critic] if policy.critic is not None else [])]
    proof = ModelGradient(lambda: modules, settings, 0, entropies=more.pop("entropies", False))
    found = sequences or draw(policy.model, PROMPTS, (6, 3, 6), policy.rules.sampling, 1)
    return proof.begin(policy, found, [], 0).figures.get("checked/model_gradient_error")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(tied=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_right_backward_passes_far_below_the_limit(kind: str, tmp_path: Path) -> None:
    error = checked(policy_of(make_model(kind)), tmp_path, entropies=True)
    assert error is not None
    assert 0 < error < 2e-3


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty", "grammar", "bad_words"])
def test_it_differentiates_the_distribution_of_the_run(
    model: PreTrainedModel, name: str, tmp_path: Path
) -> None:
    sampling = Sampling(6, temperature=0.8, **ALONE[name])
    error = checked(policy_of(model, sampling), tmp_path, entropies=True)
    assert error is not None
    assert error < 2e-3


def test_the_value_head_belongs_to_it(model: PreTrainedModel, tmp_path: Path) -> None:
    critic = torch.nn.Linear(64, 1)
    policy = policy_of(model, critic=critic)
    assert (checked(policy, tmp_path) or 1.0) < 2e-3
    handle = critic.weight.register_hook(torch.neg)
    with pytest.raises(ProofError, match=r"value_head\.weight"):
        checked(policy, tmp_path)
    handle.remove()


def test_an_adapter_is_differentiated_alone(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        make_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    )
    inner = wrapped.base_model.model
    assert (checked(policy_of(inner), tmp_path) or 1.0) < 0.025
    one = next(p for n, p in inner.named_parameters() if "lora_B" in n)
    handle = one.register_hook(torch.zeros_like)
    with pytest.raises(ProofError, match="the first wrong part is"):
        checked(policy_of(inner), tmp_path)
    handle.remove()


def test_experts_and_plain_rows_are_differentiated_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = AutoModelForCausalLM.from_config(
        MixtralConfig(
            vocab_size=384,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            initializer_range=0.3,
        ),
        dtype=torch.float32,
    )
    assert (checked(policy_of(experts, plain_rows=True), tmp_path) or 1.0) < 2e-3


def test_under_autocast_both_the_exact_and_the_rounded_gradient_are_compared(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    policy = policy_of(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert (checked(policy, tmp_path, bf16=True) or 1.0) < 2e-3

    for times in (5, 3):
        with pytest.raises(ProofError, match="with autocast the gradient"):
            _checked_with_wrong_autocast(policy, tmp_path, times, torch.zeros_like)
    # Each sum is computed once without autocast, and once with it.
    assert _checked_with_wrong_autocast(policy, tmp_path, 2, torch.zeros_like) == [False, True] * 5


def test_a_gradient_that_is_not_finite_under_autocast_is_not_drawn_again(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    policy = policy_of(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        found = gradient.clone()
        found.view(-1)[0] = math.inf
        return found

    with pytest.raises(ProofError, match="is inf of its size away"):
        _checked_with_wrong_autocast(policy, tmp_path, 1, overflow)


def test_a_gradient_that_vanishes_in_float32_is_no_distance_and_a_real_one_is() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    exact = differences.Directions({"weight": weight}, (0,))
    weight.grad = torch.full((1,), 0.6e-20)
    assert exact.distance() == 0.0
    weight.grad = torch.ones(1)
    assert exact.distance() > 1e10


@pytest.mark.parametrize(("times", "is_fault"), [(1, False), (2, False), (3, True)])
def test_the_majority_of_five_drawn_sums_is_judged(
    model: PreTrainedModel, tmp_path: Path, times: int, is_fault: bool
) -> None:
    policy, passes, real = policy_of(model), [], Policy.score

    def score(self: Policy, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return real(self, *args, **kwargs)

    with (
        patch.object(Policy, "score", score),
        turned(model, lambda gradient: -gradient if len(passes) <= times else gradient),
        pytest.raises(ProofError) if is_fault else contextlib.nullcontext(),
    ):
        checked(policy, tmp_path)
    assert len(passes) == (3 if is_fault else 3 + times)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_one_sum_whose_gradient_is_not_finite_is_enough(
    model: PreTrainedModel, tmp_path: Path, number: float
) -> None:
    with (
        turned(model, lambda gradient: torch.full_like(gradient, number)),
        pytest.raises(ProofError, match="not finite"),
    ):
        checked(policy_of(model), tmp_path)


@pytest.fixture(scope="module")
def certain() -> PreTrainedModel:
    """A policy that is nearly certain of every token: in bf16 the rounding of 1 − p is larger than 1 − p."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight *= 16
    return model


def test_a_policy_that_is_certain_has_right_gradients_in_bf16_too(
    certain: PreTrainedModel, tmp_path: Path
) -> None:
    policy = policy_of(certain, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert (checked(policy, tmp_path, bf16=True) or 1.0) < 0.025


def finished(policy: Policy, *args: Any, bf16: bool = True) -> float:
    """The error of a part of one sequence; arguments are those of `part_of`."""
    return part_of(policy, *args, bf16=bf16).figures["checked/step_gradient_error"]


def part_of(
    policy: Policy, folder: Path, during: Callable[[], contextlib.AbstractContextManager[Any]], *, bf16: bool
) -> Checked:
    """What a check of a part of one sequence has found. `during` is a context for its pass through the model."""
    sequences = draw(policy.model, PROMPTS, (6, 3, 6), PLAIN, 1)
    settings = config(folder, bf16=bf16, temperature=PLAIN.temperature, seed=3)
    proof = ModelGradient(lambda: [policy.model], settings, 0, entropies=False)
    proof._is_first = False
    proof.begin(policy, sequences, [sequences], module.EVERY - 3)
    assert proof.part is not None
    try:
        with during():
            for own in proof.part.split(sequences):
                for pack in policy.packs(own, settings):
                    scores = policy.score(pack, settings, entropy_gradient=False)
                    with proof.part.watch(pack, scores):
                        scores.logps.sum().backward()
        return proof.finish(policy, sequences, module.EVERY - 3)
    finally:
        for p in policy.model.parameters():
            p.grad = None


@contextlib.contextmanager
def turned(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    handles = [p.register_hook(change) for p in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_part_of_a_certain_policy_passes_in_bf16_and_its_faults_are_found(
    certain: PreTrainedModel, tmp_path: Path
) -> None:
    policy = policy_of(certain, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert finished(policy, tmp_path, contextlib.nullcontext) < 0.03

    # In the step alone: the same gradient, computed again, is another one.
    for change in (torch.neg, torch.zeros_like, lambda gradient: 2 * gradient):
        with pytest.raises(ProofError, match="away from the same gradient, computed once more"):
            finished(policy, tmp_path, lambda change=change: turned(certain, change))
    # In every backward: the slope of the plain forward is another one.
    with turned(certain, torch.neg), pytest.raises(ProofError, match="the backward gives a slope of"):
        finished(policy, tmp_path, contextlib.nullcontext)

    # In every backward under autocast: the gradient without autocast is another one.
    passes: list[bool] = []
    real = Policy.score

    def score(self: Policy, *args: Any, **kwargs: Any) -> Any:
        passes.append(self.autocast is policy.autocast)
        return real(self, *args, **kwargs)

    with (
        patch.object(Policy, "score", score),
        turned(certain, lambda gradient: -gradient if passes[-1] else gradient),
        pytest.raises(ProofError, match="with autocast the gradient"),
    ):
        finished(policy, tmp_path, contextlib.nullcontext)


@pytest.fixture(scope="module")
def surest() -> PreTrainedModel:
    """A policy with log-probs so near to 0 that a visible change of their sum needs a large change of weights."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight *= 24
    return model


def test_a_part_of_a_certain_policy_is_proven_in_float32_with_small_steps(
    surest: PreTrainedModel, tmp_path: Path
) -> None:
    policy = policy_of(surest)
    assert finished(policy, tmp_path, contextlib.nullcontext, bf16=False) < 0.01
    for change in (torch.neg, torch.zeros_like, lambda gradient: 2 * gradient):
        with pytest.raises(ProofError, match="gives a slope of"):
            finished(policy, tmp_path, lambda change=change: turned(surest, change), bf16=False)


def _checked_with_wrong_autocast(
    policy: Policy, folder: Path, times: int, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> list[bool]:
    """The passes of a check in which the first `times` gradients with autocast are wrong: whether each had autocast."""
    calls: list[bool] = []
    real = Policy.score

    def score(self: Policy, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.autocast is policy.autocast)
        return real(self, *args, **kwargs)

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        return wrong(gradient) if calls[-1] and sum(calls) <= times else gradient

    handles = [p.register_hook(spoiled) for p in policy.model.parameters()]
    try:
        with patch.object(Policy, "score", score):
            checked(policy, folder, bf16=True)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _layer_zeroed(model: PreTrainedModel) -> list[Handle]:
    return [p.register_hook(torch.zeros_like) for p in model.model.layers[0].parameters()]


def _keys_detached(model: PreTrainedModel) -> list[Handle]:
    return [
        model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, given, made: made.detach())
    ]


@pytest.mark.parametrize(
    ("fault", "where"), [(_layer_zeroed, r"model\.layers\.0"), (_keys_detached, r"model\.layers\.1")]
)
def test_the_part_of_the_model_is_named(
    model: PreTrainedModel, fault: Callable[[PreTrainedModel], list[Handle]], where: str, tmp_path: Path
) -> None:
    handles = fault(model)
    try:
        with pytest.raises(ProofError, match=f"the first wrong part is {where}"):
            checked(policy_of(model), tmp_path)
    finally:
        for handle in handles:
            handle.remove()


def test_a_check_leaves_nothing_behind(model: PreTrainedModel, tmp_path: Path) -> None:
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    numbers = torch.get_rng_state()
    assert checked(policy_of(model), tmp_path) is not None
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.training


def test_a_gradient_that_is_left_from_before_stays_for_its_own_proof(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    weight = model.lm_head.weight
    weight.grad = torch.ones_like(weight)
    assert checked(policy_of(model), tmp_path) is None
    assert bool((weight.grad == 1).all())
    weight.grad = None


def test_a_sum_is_checked_at_first_and_every_fiftieth_step_and_a_part_at_every_tenth(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    policy, sequences = policy_of(model), draw(model, PROMPTS, (6, 3, 6), PLAIN, 1)
    settings = config(tmp_path, bf16=False, seed=4)
    with patch.object(module.ModelGradient, "_error", lambda *args, **named: 0.0):
        proof = ModelGradient(lambda: [model], settings, 0, entropies=False)
        sums, parts = [], []
        for step in range(3, 50):
            if proof.begin(policy, sequences, [sequences] if step != 26 else [], step).figures:
                sums.append(step)
            if proof.part is not None:
                parts.append(step)
    # Where a step has nothing that is learned, a drawn sum takes the place of its part.
    # One step in fifty has both.
    assert (sums, parts) == ([3, 26, 46], [6, 16, 36, 46])


def test_a_forward_that_is_too_coarse_is_said_and_no_error(
    model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = np.random.default_rng(0)
    real = differences.DrawnSum.total
    with patch.object(
        differences.DrawnSum,
        "total",
        lambda self, moves, *dtype: real(self, moves, *dtype) + 1e-2 * draws.normal(),
    ):
        assert checked(policy_of(model), tmp_path) is None
    assert "not proven at this step: finite differences" in capsys.readouterr().out

    def fails(self: Any, moves: Any, dtype: Any = None) -> float:
        raise NotImplementedError("no kernel for float64")

    with patch.object(differences.DrawnSum, "total", fails):
        assert checked(policy_of(model), tmp_path) is None
    assert "no kernel for float64" in capsys.readouterr().out


def test_a_part_that_is_compared_with_itself_alone_is_unproven_without_its_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, moves: Any, dtype: Any = None) -> float:
        raise NotImplementedError("no kernel for float64")

    half = policy_of(make_model().to(torch.bfloat16))
    assert not part_of(half, tmp_path, contextlib.nullcontext, bf16=False).unproven
    monkeypatch.setattr(differences.DrawnSum, "total", fails)
    found = part_of(half, tmp_path, contextlib.nullcontext, bf16=False)
    assert found.figures["checked/step_gradient_error"] < 0.1
    assert "no kernel for float64" in found.unproven


class Scripted:
    """Directions whose gradient is 1, and whose slopes at smaller and smaller steps are given."""

    def __init__(self, slopes: list[float]) -> None:
        self.named: dict[str, torch.nn.Parameter] = {}
        self._slopes = iter(slopes)

    def compare(self, drawn: Any, names: Any, step: float) -> differences.Comparison:
        return differences.Comparison(np.array([1.0]), np.array([next(self._slopes)]), 1.0)


def settled(*slopes: float) -> float | None:
    directions = Scripted(list(slopes))
    first = directions.compare(None, [], 1.0)
    found = differences._settled(directions, None, first, 1.0, 0.05)  # type: ignore[arg-type]
    return None if found is None else float(found[0].due[0])


def test_a_slope_whose_rounding_grows_with_smaller_steps_is_no_error() -> None:
    # Below the digits of a kernel nothing changes any more, at every step.
    assert settled(5.0, 3.0, 0.0, 0.0, 0.0) is None
    # Curvature has less effect with every step.
    assert settled(500.0, 60.0, 8.0, 1.8, 1.01) == 1.01
    assert settled(500.0, 60.0, 8.0, -0.5, -0.6) == -0.5


@pytest.mark.parametrize(
    "trouble",
    [
        RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        ),
        RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)"),
        torch.OutOfMemoryError("out of memory"),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
        ),
        LockstepError("the answer of another part of this program"),
        KeyError("a defect of this program"),
    ],
    ids=["devices", "indices", "memory", "memory of the host", "of Lockstep", "defect"],
)
def test_an_error_of_the_device_or_of_this_program_stops(
    model: PreTrainedModel, tmp_path: Path, trouble: Exception
) -> None:
    def fails(self: Any, moves: Any, dtype: Any = None) -> float:
        raise trouble

    with patch.object(differences.DrawnSum, "total", fails), pytest.raises(type(trouble)):
        checked(policy_of(model), tmp_path)


def test_a_table_without_float64_is_a_kernel_that_refuses_it() -> None:
    assert module.refuses_a_dtype(KeyError(torch.float64))


def test_gradients_that_are_all_zero_are_no_gradients_that_vanish(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    handles = [p.register_hook(torch.zeros_like) for p in model.parameters()]
    try:
        with pytest.raises(ProofError, match="gives a slope of 0;"):
            checked(policy_of(model), tmp_path)
    finally:
        for handle in handles:
            handle.remove()


def test_a_convolution_takes_a_wide_input(tmp_path: Path) -> None:
    mamba = make_family("mamba")
    assert (checked(policy_of(mamba, plain_rows=True), tmp_path) or 1.0) < 1e-3
