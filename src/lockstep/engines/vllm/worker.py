"""Methods that a trainer calls on a server's vLLM worker, in addition to vLLM's own endpoints.

vLLM gets the class as `--worker-extension-cls`, and the trainer calls its methods by name over `/collective_rpc`.
Arguments and results are JSON; nothing is unpickled. `engines/servers/server.py` is the other end.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from typing import Any

import torch

from lockstep.contract.probe import HeldPart, encode_floats
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.vllm.port.engine import effective_settings, has_open_update, splits_prompts
from lockstep.extensions import WORKERS, load
from lockstep.weights.wire.cuda_ipc import read_test_buffer
from lockstep.weights.wire.network import identity_of
from lockstep.weights.wire.shared_memory import read_test_file
from lockstep.weights.wire.stream import available_bytes

# Made when a worker's process starts. If two URLs lead to the same server, this value shows it.
_INSTANCE = uuid.uuid4().hex


class LockstepWorker:
    """Mixed into vLLM's worker class. Every method takes and returns JSON types."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    def lockstep_state(self) -> dict[str, Any]:
        """The identity of this engine, and the settings that it runs with. Every trainer calls it first."""
        from lockstep.engines.vllm.port.kept_ids import record_kept_ids
        from lockstep.engines.vllm.port.lora import load_from_memory
        from lockstep.engines.vllm.port.receive import loaded_dtypes
        from lockstep.engines.vllm.port.requests import picture_cache_bytes, record_pictures

        memory = load_from_memory(self)
        record_kept_ids(self)
        record_pictures(self)
        return {
            "instance": _INSTANCE,
            "settings": effective_settings(self.vllm_config),
            "backend": getattr(self.vllm_config.weight_transfer_config, "backend", None),
            "world_size": self.vllm_config.parallel_config.world_size,
            "copies": self.vllm_config.parallel_config.data_parallel_size,
            "takes_priorities": self.vllm_config.scheduler_config.policy == "priority",
            "picture_cache": picture_cache_bytes(self.vllm_config.model_config),
            "splits_prompts": splits_prompts(self.vllm_config),
            "adapters": memory is not None,
            "loads_in": loaded_dtypes(self.model_runner.model),
            "available_bytes": available_bytes(),
        }

    def lockstep_alive(self) -> dict[str, Any]:
        """An answer. The server asks for it now and then, to learn whether its engine still answers."""
        return {}

    def lockstep_update(self) -> dict[str, bool]:
        """Whether a weight update is open. If the calling trainer has not begun it, an earlier trainer left it open."""
        return {"open": has_open_update(self)}

    def lockstep_modules(self, checkpoint_names: str) -> dict[str, Any]:
        """`EngineModules` for a JSON list of checkpoint names."""
        from lockstep.engines.vllm.port.probe import list_modules

        found = list_modules(self, tuple(json.loads(checkpoint_names)))
        return {"probed": [asdict(m) for m in found.probed.values()], "unreached": list(found.unreached)}

    def lockstep_probe(self, names: str, seed: str, every: str, adapter: str = "") -> dict[str, str]:
        """The output of each named module, with this adapter if one is named: float32 values, little-endian, base64."""
        from lockstep.engines.vllm.port.probe import probe_modules

        answers = probe_modules(self, tuple(json.loads(names)), int(seed), json.loads(every), adapter or None)
        return {name: encode_floats(answer) for name, answer in answers.items()}

    def lockstep_held(self, parts: str, dtype: str, key: str) -> dict[str, str]:
        """Digests of a JSON list of parts, under a key in hex; empty: they are xxh3 (`ProbedEngine.held`)."""
        from lockstep.engines.vllm.port.probe import digests_of_held

        asked = [HeldPart(*part) for part in json.loads(parts)]
        return digests_of_held(self, asked, getattr(torch, dtype), int(key, 16) if key else None)

    def lockstep_ask(self, question: str, arguments: str) -> dict[str, Any]:
        """What an extra wants to know of this worker (`WORKERS` of `lockstep.extensions`)."""
        return {"answer": load(WORKERS[question])(self, *json.loads(arguments))}

    def lockstep_pictures(self, digests: str) -> dict[str, str | None]:
        """The digest of the tensors that this worker has encoded under each digest; None: it has encoded none."""
        from lockstep.engines.vllm.port.requests import recorded_digests

        return recorded_digests(self, json.loads(digests))

    def lockstep_encoded(self) -> dict[str, bool]:
        """Whether the worker keeps pictures that were encoded with earlier weights."""
        from lockstep.engines.vllm.port.requests import holds_no_pictures

        return {"holding": not holds_no_pictures(self)}

    def lockstep_acknowledgement(self) -> dict[str, Any]:
        """`LoadedWeights` of the last update."""
        return as_json(self.weight_transfer_engine.acknowledgement)

    def lockstep_sees(self, name: str) -> dict[str, str | None]:
        """The content of a trainer's file in shared memory, or None if this machine has no such file."""
        return {"read": read_test_file(name)}

    def lockstep_device(self) -> dict[str, str]:
        """UUID of this worker's GPU; empty if it computes on another device."""
        return {"gpu": identity_of(self.weight_transfer_engine.device)}

    def lockstep_maps(self, handle: str) -> dict[str, str]:
        """The bytes of a trainer's small buffer on this worker's GPU, or why it cannot be mapped."""
        return read_test_buffer(json.loads(handle), self.weight_transfer_engine.device)

    # ---- adapters alone (`extras/lora_alone/server_adapters.py`) ----------------------------------------------------

    def lockstep_adapters(self) -> dict[str, Any] | None:
        """The largest rank, dtype, room, and names of the adapters held; None: vLLM was started without LoRA."""
        from lockstep.engines.vllm.port.lora import adapter_state

        return adapter_state(self)

    def lockstep_base(self) -> dict[str, str]:
        """Digest of the last whole push; empty if there was none."""
        return {"digest": self.weight_transfer_engine.base_digest}

    def lockstep_reserve(self, run: str, seconds: str) -> dict[str, bool]:
        """Reserve this engine for the push of one run (0 seconds: end it), if no other run has reserved it.

        The result is a dictionary, because vLLM converts values other than dictionaries and lists to text.
        """
        return {"granted": self.weight_transfer_engine.reserve(run, float(seconds))}

    def lockstep_open_segment(self, info: str) -> dict[str, Any]:
        """Open a trainer's segment of shared memory, for its adapters."""
        self.weight_transfer_engine.open_segment(json.loads(info))
        return {}

    def lockstep_keep_adapter(self, name: str, info: str, segment: str) -> dict[str, Any]:
        """Receive an adapter and keep it until vLLM loads it. Returns `LoadedWeights`."""
        from lockstep.engines.vllm.port.lora import keep_adapter

        return as_json(
            keep_adapter(self, name, self.weight_transfer_engine.received(json.loads(info), segment))
        )

    def lockstep_held_adapter(self, name: str) -> dict[str, Any]:
        """`LoadedWeights` of an adapter as vLLM computes with it."""
        from lockstep.engines.vllm.port.lora import read_adapter_back

        return as_json(read_adapter_back(self, name))

    def lockstep_probe_adapter(self, name: str, layers: str, seed: str) -> dict[str, str]:
        """For each adapted layer its outputs with the adapter, without it, and their difference, in one array."""
        from lockstep.engines.vllm.port.lora import probe_adapter

        answers = probe_adapter(self, name, json.loads(layers), int(seed))
        return {layer: encode_floats(answer.flatten()) for layer, answer in answers.items()}

    def lockstep_drop_adapters(self, names: str) -> dict[str, Any]:
        """Remove adapters."""
        from lockstep.engines.vllm.port.lora import drop_adapters

        drop_adapters(self, json.loads(names))
        return {}


def as_json(found: LoadedWeights) -> dict[str, Any]:
    """`LoadedWeights` as JSON types."""
    return {
        "tensors": [list(spec) for spec in found.tensors],
        "untouched": list(found.untouched),
        "unstored": list(found.unstored),
        "unknown_base": found.unknown_base,
    }
