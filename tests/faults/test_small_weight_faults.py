"""Small faults in single tensors: the module probe finds each of them and names the tensor."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import ProofError
from lockstep.extras.selftest.seams import loads_instead
from lockstep.extras.verify.stage import Stage
from lockstep.watch.modules import ModuleProbe, check_probe


def matrices(stage: Stage) -> list[str]:
    return [name for name, p in stage.model.named_parameters() if p.dim() == 2]


def failing(stage: Stage) -> list[str]:
    probe = ModuleProbe(stage.model, stage.engine, torch.float32)
    record = probe.measure(stage.version, every=True)
    return record.failed


@pytest.fixture(autouse=True)
def clean(stage: Stage):  # type: ignore[no-untyped-def]
    yield
    stage.push(every_module=True)


def push_unproven(stage: Stage) -> None:
    """Push all weights without the probe, as a trainer without proofs would do."""
    from lockstep.weights.push import forget_push, push_weights

    stage.trainer.state.global_step += 1
    # No weight has changed since the last push.
    forget_push(stage.engine)
    push_weights(stage.model, stage.engine, stage.version)


def expected(stage: Stage, name: str) -> set[str]:
    """A tied embedding is used for look-up and for multiplication, so both of its modules are wrong."""
    tied = dict(stage.model.named_parameters(remove_duplicate=False))
    return {other for other, p in tied.items() if p is tied[name]}


def test_any_matrix_off_by_a_thousandth_is_named(stage: Stage) -> None:
    for name in matrices(stage):
        noise = torch.Generator().manual_seed(1)
        with loads_instead(
            stage,
            lambda sent, name=name, noise=noise: [
                (n, t * (1 + 1e-3 * torch.randn(t.shape, generator=noise).to(t.device)) if n == name else t)
                for n, t in sent
            ],
        ):
            push_unproven(stage)
        assert set(failing(stage)) == expected(stage, name)


def test_any_matrix_with_two_rows_swapped_is_named(stage: Stage) -> None:
    for name in matrices(stage):

        def swapped(sent, name=name):  # type: ignore[no-untyped-def]
            return [(n, torch.cat([t[1:2], t[:1], t[2:]]) if n == name else t) for n, t in sent]

        with loads_instead(stage, swapped):
            push_unproven(stage)
        assert set(failing(stage)) == expected(stage, name)


def test_a_norm_or_bias_off_by_a_thousandth_is_named(stage: Stage) -> None:
    for name, p in stage.model.named_parameters():
        if p.dim() != 1:
            continue

        def off(sent, name=name):  # type: ignore[no-untyped-def]
            return [(n, t * 1.001 if n == name else t) for n, t in sent]

        with loads_instead(stage, off):
            push_unproven(stage)
        assert failing(stage) == [name.removesuffix("bias") + "weight" if name.endswith("bias") else name]


def test_what_every_sample_holds_and_what_it_draws(stage: Stage) -> None:
    probe = ModuleProbe(stage.model, stage.engine, torch.float32)
    every = set(probe.measure(0, every=True).errors)
    samples = [set(probe.measure(seed, every=False).errors) for seed in range(40)]
    assert all(sample <= every for sample in samples)
    always = set.intersection(*samples)
    assert {name for name in every if "embed" in name or "lm_head" in name} <= always
    # Layers that are not in one sample are in later samples.
    assert set.union(*samples) == every


def test_the_error_names_the_layers_and_the_limit(stage: Stage) -> None:
    name = matrices(stage)[-1]
    with loads_instead(stage, lambda sent: [(n, t * 2 if n == name else t) for n, t in sent]):
        push_unproven(stage)
    probe = ModuleProbe(stage.model, stage.engine, torch.float32)
    with pytest.raises(ProofError, match=r"limit 1e-04 .*weight by [12]") as failed:
        check_probe(probe.measure(1, every=True), 1)
    assert failed.value.check == "module_probe"
