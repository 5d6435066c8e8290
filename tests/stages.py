"""A stage of `lockstep verify` on a tiny model, for tests of proofs, faults and explanations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from lockstep.contract.protocol import Engine
from lockstep.extras.verify.stage import Stage, open_stage, stage_config
from lockstep.learn.methods.grpo import GRPOConfig

# Smaller than the embedding of a tiny model in bf16, and larger than its other tensors.
PART_BYTES = 40 << 10


def config(folder: Path, **changes: object) -> GRPOConfig:
    """The config that the command line makes when it gets no arguments."""
    return stage_config(str(folder), **changes)


@contextmanager
def in_small_parts() -> Iterator[None]:
    """vLLM in this process loads a tiny model in several parts."""
    import lockstep.engines.vllm.port.receive as backend

    with patch.object(backend, "PART_BYTES", PART_BYTES):
        yield


@contextmanager
def stage_on(model: str, folder: Path, engine: Engine | None = None, **changes: object) -> Iterator[Stage]:
    """A stage for a model directory, with its own engine unless an engine is given."""
    with open_stage(model, config(folder, **changes), engine=engine) as stage:
        yield stage
