"""Proofs about weights: a real sync, the module probe layer by layer, caches, versions."""

from __future__ import annotations

from dataclasses import replace

from lockstep.errors import ProofError
from lockstep.extras.verify.rows import Row, gap_row
from lockstep.extras.verify.stage import Stage
from lockstep.watch.canary import score_canary
from lockstep.watch.gap import GapStats
from lockstep.watch.tolerances import Tolerance

_SYNC_FIX = "the engine does not compute with the weights that it received; see which layers the module probe names"


def canary(stage: Stage) -> list[Row]:
    """Both sides score fixed sequences."""
    found = score_canary(stage.model, stage.engine, stage.engine.settings().max_model_len, stage.precision)
    return [gap_row("canary", found, stage.trainer.proofs.limit, _SYNC_FIX)]


def module_probe(stage: Stage) -> list[Row]:
    """Every module that the engine runs, with two probe vectors."""
    probe = stage.trainer.proofs.probe
    records = [probe.measure(seed, every=True) for seed in (1, 2)]
    errors = {name: max(r.errors[name] for r in records) for name in records[0].errors}
    name = max(errors, key=lambda n: errors[n])
    failed = sorted({n for r in records for n in r.failed})
    unreached = records[0].unreached
    note = f"; no probe reaches {', '.join(unreached[:3])}{' …' if len(unreached) > 3 else ''}" if unreached else ""
    return [
        Row(
            "module probe",
            f"{records[0].of_modules} modules, {probe.reached():.0%} of the weights; worst {name} {errors[name]:.1e}{note}",
            f"{records[0].limit:g}",
            not failed,
            f"these weights are not in use as they were sent: {', '.join(failed[:8])}",
            {"errors": errors, "unreached": list(unreached)},
        )
    ]


def sync(stage: Stage) -> list[Row]:
    """Changed weights are pushed and sampled from. Then the original weights are pushed back."""
    limit = stage.trainer.proofs.limit
    sampling = stage.sampling(temperature=1.0)
    with stage.moved(stage.scale):
        stage.push(every_module=True)
        moved = stage.sample(sampling)
        there = stage.gap(moved, sampling)
    apart = stage.gap(moved, sampling)
    stage.push(every_module=True)
    back = stage.gap(stage.sample(sampling), sampling)
    note = f" ({apart.mean_abs:.2g} against the old weights)"
    return [
        _conclusive(gap_row("sync: moved weights", there, limit, _SYNC_FIX, note), apart, limit),
        gap_row("sync: pushed back", back, limit, _SYNC_FIX),
    ]


def caches(stage: Stage) -> list[Row]:
    """Sample a prompt longer than a cache block before and after a push: no cache of the old weights may be used."""
    sampling = stage.sampling(temperature=1.0)
    longest = max(stage.prompts, key=lambda p: len(p.ids))
    stage.sample(sampling, [longest], samples=4)
    with stage.moved(stage.scale, seed=1):
        stage.push()
        moved = stage.sample(sampling, [longest], samples=4)
        found = stage.gap(moved, sampling)
    apart = stage.gap(moved, sampling)
    stage.push()
    fix = (
        "keys and values of older weights outlive a push: the engine confirmed a reset of its caches that it did not do"
    )
    note = f", prompt of {len(longest.ids)}"
    limit = stage.trainer.proofs.limit
    return [_conclusive(gap_row("caches after a sync", found, limit, fix, note), apart, limit)]


def versions(stage: Stage) -> list[Row]:
    """Tokens carry the version that sampled them, and the engine serves no token during an update."""
    stage.push()
    found = stage.sample(stage.sampling(), samples=1)
    stamped = all((c.weight_versions == stage.version).all() for c in found)
    stage.engine.begin_update()
    try:
        stage.engine.generate([])
        closed = False
    except ProofError as error:
        closed = error.check == "version"
    stage.push()
    return [
        Row(
            "weight versions",
            f"{'every token stamped' if stamped else 'tokens without their version'}; "
            f"{'closed' if closed else 'open'} during an update",
            "stamped, closed",
            stamped and closed,
            "the engine serves tokens whose weight version is unknown",
        )
    ]


def _conclusive(row: Row, apart: GapStats, limit: Tolerance) -> Row:
    """The row. It fails if the weights before the change would have passed too."""
    if apart.mean_abs > limit.mean:
        return row
    return replace(
        row,
        passed=False,
        fix=f"nothing was shown: old weights are only {apart.mean_abs:.1e} away, within the limit for these dtypes; use float32",
    )
