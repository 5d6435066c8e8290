"""What the core asks of extras by name: where each thing stands, as `module:attribute`. It is imported when it is asked for.

An extra is a folder of `lockstep.extras`. It may import everything, and nothing of the core imports it. A run that asks for no
extra needs none of their packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lockstep.errors import InputError

# Commands of the command line: a function that takes the words after the command, and returns the exit code.
COMMANDS: dict[str, str] = {
    "gateway": "lockstep.extras.agents.gateway_command:run",
    "verify": "lockstep.extras.verify.verify_command:run",
    "audit": "lockstep.extras.audit.audit_command:run",
}
# The dataclasses whose fields are those of a command.
FIELDS: dict[str, tuple[str, ...]] = {
    "gateway": ("lockstep.extras.agents.gateway_command:GatewayArguments", "lockstep:GRPOConfig"),
    "verify": ("lockstep.extras.verify.verify_command:VerifyArguments", "lockstep.extras.verify.stage:StageConfig"),
}
# What rolls out instead of the plain program, by the trainer's argument that asks for it.
PROGRAMS: dict[str, str] = {"agent": "lockstep.extras.agents.agent_program:RolloutAgents"}
# Engines that need more than the core knows, by the setting that asks for them.
ENGINES: dict[str, str] = {}
# Ways of weights to an engine, by the setting that asks for them.
PUSHES: dict[str, str] = {}

# The extra of `pip install 'lockstep-rl[EXTRA]'` that brings the packages of a folder of `lockstep.extras`.
_PIP_EXTRAS = {
    "agents": "gateway",
    "environments": "textarena",
    "deepspeed": "deepspeed",
}


def load(place: str) -> Any:
    """What stands at `module:attribute`.

    Raises:
        InputError: a package that the extra needs is not installed.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        folder = module.removeprefix("lockstep.extras.").partition(".")[0]
        missing = (error.name or "").partition(".")[0]
        if missing == "lockstep" or folder not in _PIP_EXTRAS:
            raise
        raise InputError(
            f"lockstep.extras.{folder} needs {missing}, not installed here: pip install 'lockstep-rl[{_PIP_EXTRAS[folder]}]'"
        ) from error
