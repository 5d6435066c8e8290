"""Earlier names, for programs of users: `lockstep.environments.NAME` is `lockstep.extras.environments.NAME`."""

import sys
from importlib import import_module

for _name in ("openenv", "textarena", "verifiers"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = import_module(
        f"lockstep.extras.environments.{_name}"
    )
