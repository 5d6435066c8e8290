"""A step that is wrong in few elements is found where gradients are largest: rows of an embedding, a matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods
import pytest
import torch
from portions import portion
from tiny import save_model

from lockstep.errors import ProofError
from lockstep.watch import elements
from lockstep.watch.elements import DrawnElements, LargestElements

# What a fault changes: the parameter, its value before the step, its gradient, and its state after the step.
Fault = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]


def largest(gradient: torch.Tensor, count: int) -> torch.Tensor:
    return gradient.flatten().abs().topk(count).indices


def every_eighth_row_stays(p: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
    p[::8] = old[::8]


def a_tenth_of_the_rows_stays(p: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
    p[: len(p) // 10] = old[: len(p) // 10]


def largest_200_stay(p: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
    at = largest(gradient, 200)
    p.view(-1)[at] = old.flatten()[at]


def largest_one_stays(p: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
    at = largest(gradient, 1)
    p.view(-1)[at] = old.flatten()[at]


def largest_50_forget(p: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
    state["exp_avg"].view(-1)[largest(gradient, 50)] = 0.0


def largest_20_round(p: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
    at = largest(gradient, 20)
    p.view(-1)[at] = p.view(-1)[at].bfloat16().float()


def inject(monkeypatch: pytest.MonkeyPatch, run: Any, name: str, fault: Fault, first: int) -> None:
    real = torch.optim.AdamW.step

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        p = dict(run.model.named_parameters())[name]
        old, gradient = p.detach().clone(), p.grad.clone()
        real(self)
        if run.state.global_step >= first:
            fault(p, old, gradient, self.state[p])

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose embedding has many more rows than a step has tokens."""
    return str(save_model(tmp_path_factory.mktemp("models") / "wide", vocab_size=20_000))


def run_of(folder: Path, model: str, **more: Any) -> Any:
    fields = {**methods.GROUPS, "use_vllm": False, "max_steps": 6, "learning_rate": 1e-3, **more}
    return methods.make("GRPO", model, folder, None, fields)


EMBEDDING, MATRIX, HEAD = "model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"
CASES = [
    (every_eighth_row_stays, EMBEDDING, False, "first"),
    (a_tenth_of_the_rows_stays, EMBEDDING, True, "middle"),
    (largest_200_stay, MATRIX, True, "first"),
    (largest_one_stays, HEAD, False, "middle"),
    (largest_50_forget, HEAD, False, "resumed"),
    (largest_20_round, MATRIX, True, "resumed"),
]


@pytest.mark.parametrize(
    ("fault", "name", "bf16", "moment"), portion(CASES, lambda c: c[0] is largest_one_stays)
)
def test_a_fault_in_few_elements_stops_the_run_within_two_steps(
    wide_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    name: str,
    bf16: bool,
    moment: str,
) -> None:
    first = {"first": 0, "middle": 2, "resumed": 2}[moment]
    more: dict[str, Any] = {"bf16": bf16}
    if moment == "resumed":
        more |= {"save_strategy": "steps", "save_steps": 2}
        run_of(tmp_path, wide_dir, **more, max_steps=2).train()
    run = run_of(tmp_path, wide_dir, **more)
    inject(monkeypatch, run, name, fault, first)
    with pytest.raises(ProofError, match=name.replace(".", r"\.")) as error:
        run.train(resume_from_checkpoint=moment == "resumed" or None)
    assert error.value.check == "update"
    assert first <= run.state.global_step <= first + 1
    run.close()


def test_an_element_that_is_cut_after_the_clip_is_found(
    wide_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, wide_dir)
    real = run.accelerator.clip_grad_norm_

    def clip(parameters: Any, limit: float) -> Any:
        norm = real(parameters, limit)
        gradient = run.model.lm_head.weight.grad
        gradient.view(-1)[largest(gradient, 1)] /= 2
        return norm

    monkeypatch.setattr(run.accelerator, "clip_grad_norm_", clip)
    with pytest.raises(ProofError, match=r"the gradient of lm_head\.weight is") as error:
        run.train()
    assert error.value.check == "clipping"
    assert run.state.global_step <= 1
    run.close()


def test_the_largest_element_of_every_piece_has_its_turn_in_32_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_PIECE", 256)
    monkeypatch.setattr(elements, "_PIECES", 3)
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (7, 100_000, 700, 1, 256 * 40)]
    found = LargestElements(tensors, (0,))
    seen: dict[int, set[int]] = {}
    for step in range(32):
        pieces, places = found.of(tensors, step)
        assert len(pieces) == len(torch.cat(places)) <= -(-len(found._pieces) // 32)
        for (index, first), place in zip(pieces, torch.cat(places).tolist(), strict=True):
            seen.setdefault(index, set()).add(first + place)
    for index, tensor in enumerate(tensors):
        count = -(-len(tensor) // found._size)
        assert len(seen[index]) == count
        assert int(tensor.abs().argmax()) in seen[index] or len(tensor) > found._size
    # In a piece of one block the element is the largest one.
    wide = torch.zeros(2, 256)
    wide[0, 17], wide[1, 200] = -3.0, 2.0
    (_, places) = LargestElements([wide], (0,)).of([wide], 0)
    assert torch.cat(places).tolist() == [17, 200]


def test_windows_of_one_tensor_are_read_in_any_order() -> None:
    tensors = [torch.arange(100.0), torch.arange(1000.0)]
    drawn = DrawnElements.around([(1, 700), (0, 3), (1, 5)], tensors)
    first, *others = drawn.read(tensors).split(16)
    assert first.tolist() == list(range(16))
    assert [own.tolist() for own in others] == [list(range(16)), list(range(692, 708))]
