"""`about.json`: what a run is, for readers of its directory: method, model, data, settings, versions and machine.

It is written when training begins. The report reads it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from typing import Any

from lockstep.run.files.run_identity import curve_settings, is_bookkeeping
from lockstep.secret import without_secrets
from lockstep.training.config.online_config import OnlineConfig
from lockstep.watch.surroundings import device, versions


def about_run(
    method: str,
    model: str,
    engine: Mapping[str, Any],
    config: OnlineConfig,
    rows: Mapping[str, int],
    data: Mapping[str, str],
) -> dict[str, Any]:
    """What `about.json` has, in JSON types, without secrets.

    Args:
        engine: settings that the engine reports.
        rows: number of prompts of each part of the data.
        data: digest of each part of the data.
    """
    settings = curve_settings(config)
    return {
        "name": without_secrets(config.run_name or ""),
        "method": method,
        "model": without_secrets(model),
        "engine": {name: str(value) for name, value in without_secrets(engine).items()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": dict(rows),
        "data": dict(data),
        "settings": settings,
        "chosen": [
            f.name for f in fields(config) if not is_bookkeeping(f.name) and _is_chosen(f, getattr(config, f.name))
        ],
        "versions": versions(),
        "machine": {
            "processes": config.world_size,
            "device": device(use_cpu=config.use_cpu),
            "system": platform.system(),
        },
    }


def _is_chosen(field: Field[Any], value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(value != default)
