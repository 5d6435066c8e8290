"""One of two ranks whose sharded model is on the pretend GPU, over gloo. Started by `test_shards.py`.

python shards.py RANK PORT KIND FOLDER      (KIND: fsdp or deepspeed)

It writes the gradients of one pack, gathered. gloo takes no tensor of a GPU, so it gets the same memory as a tensor
of the CPU.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "run"), str(TESTS / "shards")]
RANKS = 2


def main() -> None:
    rank, port, kind, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cuda",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS)}
    import pretend_cuda

    log = pretend_cuda.activate(first=["bitsandbytes"])
    import torch
    import torch.distributed as dist
    from gradients import gradients

    from lockstep.extras.deepspeed.weights import ZeroWeights
    from lockstep.shards.fsdp import FsdpWeights
    from lockstep.shards.model import ShardedModel
    from lockstep.shards.passes import Passes
    from pretend_cuda.vllm import groups

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    groups.patch()
    weights = {"fsdp": FsdpWeights, "deepspeed": ZeroWeights}[kind]

    def shard(model: torch.nn.Module) -> ShardedModel:
        return ShardedModel(model.cuda(), Passes(120.0), torch.device("cuda"), None, weights)

    found = gradients(shard)
    assert not log.mixes, log.mixes
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
