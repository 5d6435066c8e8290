"""Checkpoints of a sharded model, on one rank: what is written, what comes back. Several ranks: `tests/run/`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_model import Shard, loss_of, passes, shard
from tiny import make_model
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.shards.files import read_optimizer, read_weights, write_shards
from lockstep.shards.model import clip_sharded
from lockstep.shards.passes import Passes
from lockstep.watch.resume import memory_digests

__all__ = ["passes", "shard"]


class Run:
    """A model with an optimizer that has taken some steps."""

    def __init__(self, shard: Shard | None, steps: int) -> None:
        self.model: PreTrainedModel = make_model()
        adopt_tree_attention(self.model)
        self.shards = None if shard is None else shard(self.model)
        self.named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.named.values(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        if self.shards is None:
            loss_of(self.model).backward()
        else:
            with self.shards.learning():
                loss_of(self.model).backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def digests(self) -> dict[str, str]:
        return memory_digests({"policy": self.model}, self.optimizer, self.schedule)


def test_weights_moments_and_rates_come_back_and_the_next_step_is_the_same(
    passes: Passes, shard: Shard, tmp_path: Path
) -> None:
    run, other = Run(shard, steps=2), Run(shard, steps=1)
    write_shards(tmp_path, run.named, run.optimizer, passes)
    read_weights(tmp_path, other.named)
    read_optimizer(tmp_path, other.named, other.optimizer)
    other.schedule.load_state_dict(run.schedule.state_dict())
    assert other.digests() == run.digests()
    run.step()
    other.step()
    assert other.digests() == run.digests()


def test_the_digests_are_those_of_a_whole_model(passes: Passes, shard: Shard) -> None:
    assert Run(shard, steps=2).digests() == Run(None, steps=2).digests()


def test_no_file_of_a_checkpoint_is_a_pickle(passes: Passes, shard: Shard, tmp_path: Path) -> None:
    run = Run(shard, steps=1)
    write_shards(tmp_path, run.named, run.optimizer, passes)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}


def test_a_checkpoint_of_another_model_is_refused(passes: Passes, shard: Shard, tmp_path: Path) -> None:
    run = Run(shard, steps=1)
    write_shards(tmp_path, run.named, run.optimizer, passes)
    del run.named["lm_head.weight"]
    with pytest.raises(InputError, match=r"holds other parameters than the model: lm_head\.weight"):
        read_weights(tmp_path, run.named)


def test_clipping_is_that_of_the_whole_gradient(passes: Passes, shard: Shard) -> None:
    run, whole = Run(shard, steps=0), Run(None, steps=0)
    assert run.shards is not None
    with run.shards.learning():
        loss_of(run.model).backward()
    loss_of(whole.model).backward()
    # A head of the critic is the same on every rank.
    beside = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in beside:
        p.grad = torch.full((3,), 5.0)
    due = torch.nn.utils.clip_grad_norm_([*whole.named.values(), beside[0]], 0.5)
    found = clip_sharded([*run.named.values(), beside[1]], 0.5, passes)
    assert float(found) == pytest.approx(float(due), rel=1e-6)
    for name, p in run.named.items():
        assert torch.allclose(p.grad.full_tensor(), whole.named[name].grad, rtol=1e-5, atol=0.0), name
    assert torch.allclose(beside[1].grad, beside[0].grad, rtol=1e-5)
