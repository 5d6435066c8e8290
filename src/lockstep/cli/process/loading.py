"""Makes the arguments and the config of a command that runs a trainer, and prints them for `--dry_run`.

Comes from: the command's own file, with a command line that was read and checked without torch (`cli/fields/arguments.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.cli.fields.arguments import Arguments, Given, build, resolved
from lockstep.cli.process.quiet import quiet_libraries
from lockstep.collector import collector_off
from lockstep.report.busy import busy
from lockstep.report.say import say


def load_config(
    given: Given, config_class: Callable[[], type], arguments_class: type[Arguments]
) -> tuple[Arguments, Any] | None:
    """The command's arguments and the trainer's config. Imports torch and transformers.

    Args:
        config_class: imports and gives the class of the config.
        arguments_class: `RunArguments`, or a subclass with more fields of the command.

    Returns:
        Both objects. None for a dry run, after it has printed every field as YAML.

    Raises:
        InputError: fields contradict each other, or this machine does not support them.
    """
    with busy("loading PyTorch and transformers"), collector_off():
        quiet_libraries()
        arguments, config = build(given, config_class(), arguments_class)
    if not given.dry_run:
        return arguments, config
    # The output of a dry run is one config file and nothing else, also with several ranks.
    if config.process_index == 0:
        say(resolved(arguments, config), end="")
    return None
