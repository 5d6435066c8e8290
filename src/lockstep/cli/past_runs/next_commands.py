"""The last lines of a training command: where its model is, and the commands that go on from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from lockstep.secret import is_secret_name, masked, without_secrets


def next_lines(folder: Path, *, adapter: bool, typed: Sequence[str] | None = None) -> list[str]:
    """Where the trained model is, and the commands that go on from it.

    Args:
        adapter: whether the run trained an adapter, which other programs want merged into its model.
        typed: the words of a run that `lockstep evaluate` can take; None: it cannot evaluate this run.
    """
    from lockstep.run.files.checkpoints import last_checkpoint

    checkpoint = last_checkpoint(folder)
    rollouts = f"next             lockstep rollouts {_word(folder)}   reads what the model wrote"
    if checkpoint is None:
        return ["model            not saved: there is no checkpoint (save_strategy is no)", rollouts]
    lines, model = [f"{'adapter' if adapter else 'model':<17}{checkpoint}", rollouts], checkpoint
    if adapter:
        model = folder / "merged"
        lines.append(f"                 lockstep merge {_word(checkpoint)} {_word(model)}   makes a whole model of it")
    if typed is not None:
        kept = map(_without_secret, _without(typed, ("--model_name_or_path", "--use_peft")))
        words = [*kept, "--model_name_or_path", str(model)]
        # The config file of the run may say it.
        words += ["--use_peft", "False"] if adapter else []
        lines.append(f"                 lockstep evaluate {shlex.join(words)}")
    return [
        *lines,
        f"                 lockstep verify --model {_word(model)}   proves that an engine runs it as the trainer does",
        f"                 lockstep serve {_word(model)}   serves it with vLLM, behind a key",
    ]


def _without(words: Sequence[str], names: tuple[str, ...]) -> list[str]:
    """The words without these fields, those of secrets, and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            dropping = name in names or is_secret_name(name)
        if not dropping:
            kept.append(word)
    return kept


def _without_secret(word: str) -> str:
    """A word of a command line without the secrets in its value, which may be JSON."""
    name, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    try:
        found = json.loads(value)
    except ValueError:
        return masked(word)
    kept = without_secrets(found)
    return word if kept is found else f"{name}{sign}{json.dumps(kept)}"


def _word(path: Path) -> str:
    return shlex.quote(str(path))
