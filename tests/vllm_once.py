"""What vLLM does at every start of an engine, and what a test process needs to do once.

On a CPU, vLLM puts functions in the place of its Triton kernels. It looks for each kernel among all names of all
imported modules, which is a third of the time that the start of a tiny model takes. The functions stay there: a later
search finds nothing new.
"""

from __future__ import annotations

import functools
import sys


def search_kernels_once() -> None:
    """Let engines of this process, and of its forks, search at the first start alone.

    Does nothing before vLLM is imported.
    """
    if (platforms := sys.modules.get("vllm.platforms.cpu")) is None:
        return
    search = platforms.CpuPlatform.register_triton_kernel_overrides
    if not hasattr(search, "cache_info"):
        platforms.CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(search))
