"""Methods that a trainer calls on a server's vLLM worker, in addition to vLLM's own endpoints.

vLLM gets the class as `--worker-extension-cls`, and the trainer calls its methods by name over `/collective_rpc`. Arguments and
results are JSON; nothing is unpickled. `engines/http/vllm_server.py` is the other end.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from typing import Any

from lockstep.engines.probe import encode_floats
from lockstep.engines.vllm.settings import effective_settings, splits_prompts
from lockstep.sync.deltas import available_bytes
from lockstep.sync.shared_memory import read_mark

# Made when a worker's process starts. If two URLs lead to the same server, this value shows it.
_INSTANCE = uuid.uuid4().hex


class LockstepWorker:
    """Mixed into vLLM's worker class. Every method takes and returns JSON types."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def lockstep_state(self) -> dict[str, Any]:
        """The identity of this engine, and the settings that it runs with. Every trainer calls it first."""
        from lockstep.engines.vllm.kept_ids import record_kept_ids
        from lockstep.engines.vllm.pictures import picture_cache_bytes, record_pictures
        from lockstep.sync.vllm_reload import loaded_dtypes

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
            "loads_in": loaded_dtypes(self.model_runner.model),
            "available_bytes": available_bytes(),
        }

    def lockstep_update(self) -> dict[str, bool]:
        """Whether a weight update is open. If no trainer has begun one, an earlier trainer left it open."""
        return {"open": self._weight_update_active}

    def lockstep_modules(self, checkpoint_names: str) -> dict[str, Any]:
        """`EngineModules` for a JSON list of checkpoint names."""
        from lockstep.engines.vllm.probe import list_modules

        found = list_modules(self, tuple(json.loads(checkpoint_names)))
        return {"probed": [asdict(m) for m in found.probed.values()], "unreached": list(found.unreached)}

    def lockstep_probe(self, names: str, seed: str, every: str) -> dict[str, str]:
        """The output of each named module: float32 values, little-endian, base64."""
        from lockstep.engines.vllm.probe import probe_modules

        answers = probe_modules(self, tuple(json.loads(names)), int(seed), json.loads(every))
        return {name: encode_floats(answer) for name, answer in answers.items()}

    def lockstep_pictures(self, digests: str) -> dict[str, str | None]:
        """For each digest, the digest of the tensors that this worker has encoded under it; None: it has encoded none."""
        from lockstep.engines.vllm.pictures import recorded_digests

        return recorded_digests(self, json.loads(digests))

    def lockstep_encoded(self) -> dict[str, bool]:
        """Whether the worker keeps pictures that were encoded with the weights of some time."""
        from lockstep.engines.vllm.pictures import holds_no_pictures

        return {"holding": not holds_no_pictures(self)}

    def lockstep_acknowledgement(self) -> dict[str, Any]:
        """`LoadedWeights` of the last update."""
        found = self.weight_transfer_engine.acknowledgement
        return {
            "tensors": [list(spec) for spec in found.tensors],
            "untouched": list(found.untouched),
            "unknown_base": found.unknown_base,
        }

    def lockstep_sees(self, name: str) -> dict[str, str | None]:
        """The content of a trainer's file in shared memory, or None if this machine has no such file."""
        return {"read": read_mark(name)}
