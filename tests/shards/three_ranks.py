"""One of three ranks that shard a model whose tensors cannot be cut evenly, started by `test_three_ranks.py`.

python three_ranks.py RANK PORT FOLDER

It writes gradients, gathered weights, and how many rows it holds, of a model without shards and of both kinds of
shards. Without autocast the weights are float64.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "run")]
RANK, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
RANKS = 3


def main() -> None:
    import torch
    import torch.distributed as dist
    from accounts import norm_in_double
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from lockstep.extras.deepspeed.weights import ZeroWeights
    from lockstep.shards.fsdp import FsdpWeights
    from lockstep.shards.passes import Passes

    Qwen2RMSNorm.forward = norm_in_double
    os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    passes = Passes(60.0)
    kinds = {"whole": None, "fsdp": FsdpWeights, "zero": ZeroWeights}
    found = {
        name: {precision: steps(kind, passes, precision) for precision in (None, torch.bfloat16)}
        for name, kind in kinds.items()
    }
    torch.save(found, FOLDER / f"{RANK}.pt")
    dist.destroy_process_group()


def steps(kind: Any, passes: Any, precision: Any) -> dict[str, Any]:
    """Two optimizer steps, from a pack that each rank has of its own; without shards, from the packs of all ranks."""
    import torch
    from tiny import make_model

    from lockstep.learn.attention.tree import adopt_tree_attention
    from lockstep.shards.model import ShardedModel, local_part

    torch.manual_seed(0)
    model = make_model()
    adopt_tree_attention(model)
    if precision is None:
        model = model.double()
    shards = kind and ShardedModel(model, passes, torch.device("cpu"), precision, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    gradients: dict[str, Any] = {}
    for _ in range(2):
        optimizer.zero_grad()
        for first in [RANK] if shards else range(RANKS):
            with shards.learning() if shards else nullcontext(), autocast(precision):
                loss(model, first).backward()
        optimizer.step()
        gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
    if shards:
        shards.check(2)
    return {
        "gradients": gradients,
        "weights": {n: whole(p.detach()) for n, p in model.named_parameters()},
        "rows": {n: local_part(p).shape[0] for n, p in model.named_parameters()},
    }


def autocast(precision: Any) -> Any:
    import torch

    return partial(torch.autocast, "cpu", precision, enabled=precision is not None)()


def loss(model: Any, first: int) -> Any:
    from lockstep.learn.pack import pack_sequences
    from lockstep.learn.scoring import in_passes, score_pack
    from lockstep.learn.sequence import TrainingSequence
    from lockstep.shards.model import sharded

    one = TrainingSequence("a/0", [3, first], [4, 1, 5 + first], [0.0] * 3)  # type: ignore[arg-type]
    (pack,) = pack_sequences([one], 64)
    compute = partial(score_pack, model, pack, 1.0, 2)
    shards = sharded(model)
    return (compute() if shards is None else in_passes(shards, compute)).logps.sum()


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


if __name__ == "__main__":
    main()
