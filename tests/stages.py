"""A stage of `lockstep verify` on a tiny model, for tests of proofs, faults and explanations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.engines.protocol import Engine
from lockstep.training.config import GRPOConfig
from lockstep.verify.stage import SIZES, Stage, open_stage


def config(folder: Path, **changes: object) -> GRPOConfig:
    """What the command line makes of no words at all."""
    fields = {**SIZES, "shuffle_dataset": False, "generation_batch_size": 12, **changes}
    return GRPOConfig(output_dir=str(folder), **fields)  # type: ignore[arg-type]


@contextmanager
def stage_on(model: str, folder: Path, engine: Engine | None = None, **changes: object) -> Iterator[Stage]:
    """A stage for a model directory, with an engine of its own unless one is given."""
    with open_stage(model, config(folder, **changes), engine=engine) as stage:
        yield stage
