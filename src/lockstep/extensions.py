"""What the core asks of extras by name: where each thing stands, as `module:attribute`, imported when it is asked for.

An extra is a folder of `lockstep.extras`. It may import everything, and nothing of the core imports it. A run that
asks for no extra needs none of their packages.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    "verify": ("lockstep.extras.verify.verify_command:VerifyArguments", "lockstep:GRPOConfig"),
}
# What rolls out instead of the plain program, by the trainer's argument that asks for it.
PROGRAMS: dict[str, str] = {"agent": "lockstep.extras.agents.agent_program:RolloutAgents"}
# Libraries that shard models, by the argument that asks: what reads their configuration (a `Sharding` of
# `shards/settings.py`).
SHARDINGS: dict[str, str] = {"deepspeed": "lockstep.extras.deepspeed.settings:take_zero_settings"}
# What is added to the pushes into an engine and to their proofs, by the option that asks: a `PushExtension` of
# `watch/push.py`.
PUSHES: dict[str, str] = {
    "vllm_quantization": "lockstep.extras.fp8.quantised_push:QuantisedPush",
    "vllm_enable_lora": "lockstep.extras.lora_alone.adapter_proof:AdapterPush",
}
# Further arguments of vLLM in this process, by the option that asks: a function of the policy.
ENGINES: dict[str, str] = {"vllm_enable_lora": "lockstep.extras.lora_alone.adapter_proof:engine_arguments"}
# How a module may hold its weights in another form, by vLLM's name of the scheme: a `HeldForm` of `watch/modules.py`.
HELD_FORMS: dict[str, str] = {"fp8_per_channel": "lockstep.extras.fp8.quantised_push:RowsInEightBits"}
# What receives adapters alone in an engine, by the engine: an `AdapterReceiver` of `contract/adapters.py`, made for it.
ADAPTERS: dict[str, str] = {
    "in_process": "lockstep.extras.lora_alone.engine_adapters:AdaptersInProcess",
    "servers": "lockstep.extras.lora_alone.server_adapters:ServerAdapters",
}
# Further flags of vLLM's server, by vLLM's argument that asks: a function of the model, its dtype, and the names of the
# arguments that the user has given.
SERVER_FLAGS: dict[str, str] = {"enable_lora": "lockstep.extras.lora_alone.adapter_arguments:server_flags"}
# Variables of the environment of vLLM's server, by vLLM's argument that asks.
SERVER_VARIABLES: dict[str, str] = {"enable_lora": "lockstep.extras.lora_alone.adapter_arguments:ENVIRONMENT"}
# What a worker of vLLM answers to an extra (`Engine.ask_workers`): functions of a worker and of what JSON can say.
WORKERS: dict[str, str] = {
    "codes": "lockstep.engines.vllm.port.quantised:code_digests",
    "quantise_inputs": "lockstep.engines.vllm.port.quantised:quantise_inputs",
}

# The extra of `pip install 'lockstep-rl[EXTRA]'` that brings the packages of a folder of `lockstep.extras`.
_PIP_EXTRAS = {"agents": "gateway", "environments": "textarena", "deepspeed": "deepspeed"}


def asked(table: Mapping[str, str], options: object) -> list[Any]:
    """What stands in a table for the options that are set."""
    return [load(place) for option, place in table.items() if getattr(options, option)]


def load(place: str) -> Any:
    """What stands at `module:attribute`. A package that the extra lacks is named with the command that installs it."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        folder = module.removeprefix("lockstep.extras.").partition(".")[0]
        missing = (error.name or "").partition(".")[0]
        if missing == "lockstep" or folder not in _PIP_EXTRAS:
            raise
        found = f"lockstep.extras.{folder} needs {missing}, not installed here"
        raise InputError(f"{found}: pip install 'lockstep-rl[{_PIP_EXTRAS[folder]}]'") from error
