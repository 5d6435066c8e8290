"""`lockstep verify`: runs every proof in turn. A failure is a row and does not end the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.errors import LockstepError, ProofError
from lockstep.extras.verify import engine_checks, logprob_checks
from lockstep.extras.verify.rows import Row
from lockstep.extras.verify.stage import Stage

Check = Callable[[Stage], list[Row]]

# Cheap checks that come first in the data's path run first; checks that need everything run last.
CHECKS: dict[str, Check] = {
    "tokenizer guards": engine_checks.tokenizer_guards,
    "vocabulary": engine_checks.vocabulary,
    "chat template": engine_checks.chat_template,
    "settings handshake": engine_checks.handshake,
    "token echo": engine_checks.echo,
    "finish reasons": engine_checks.finish_reasons,
    "group layout": engine_checks.groups,
    "repeated request": engine_checks.repetition,
    "module probe": engine_checks.module_probe,
    "canary": engine_checks.canary,
    "log-prob semantics": logprob_checks.semantics,
    "draws": logprob_checks.draws,
    "parity gap by dtype": logprob_checks.parity_by_dtype,
    "training step": logprob_checks.training_step,
    "exact accounting": logprob_checks.accounting,
    "weight sync": engine_checks.sync,
    "caches after a sync": engine_checks.caches,
    "weight versions": engine_checks.versions,
}


def _with_pictures(check: Check) -> Check:
    return lambda stage: [replace(row, proof=f"{row.proof}, with pictures") for row in check(stage)]


# On a stage whose prompts show pictures.
PICTURE_CHECKS: dict[str, Check] = {
    "training step with pictures": _with_pictures(logprob_checks.training_step),
    "exact accounting with pictures": _with_pictures(logprob_checks.accounting),
}


def run_checks(stage: Stage, progress: Callable[[str], None], checks: dict[str, Check] = CHECKS) -> list[Row]:
    """The rows of every check, in order. `progress` gets the name of each check when it begins."""
    rows: list[Row] = []
    for name, check in checks.items():
        progress(name)
        try:
            rows += check(stage)
        except LockstepError as error:
            rows.append(failed_row(name, error))
            recover(stage)
    return rows


def failed_row(name: str, error: LockstepError) -> Row:
    """The row of a check that ended in an error."""
    if not isinstance(error, ProofError):
        return Row(name, str(error), "no error", False, "see the message")
    return Row(name, f"{error.check}: {error.found}", "no error", False, f"{error.cause}; {error.fix}")


def recover(stage: Stage) -> None:
    """Load the model's weights into the engine again after a failed check. Failing too, the next check reports it."""
    try:
        restore(stage)
    except LockstepError:
        stage.engine.begin_update()


def restore(stage: Stage) -> None:
    """Load the model's weights into the engine again, and prove every module."""
    stage.model.zero_grad(set_to_none=True)
    stage.trainer.proofs.distrust()
    stage.push()
