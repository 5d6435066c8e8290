"""An earlier name, for programs of users: `lockstep.integrations.trl` is `lockstep.extras.trl.vllm_generation`."""

import sys
from importlib import import_module

trl = sys.modules[f"{__name__}.trl"] = import_module("lockstep.extras.trl.vllm_generation")
