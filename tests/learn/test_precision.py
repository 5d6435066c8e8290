"""bf16 is the default exactly on machines where it is fast; the processor's features decide."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.run import engine_dtype
from lockstep.devices import has_fast_bf16

# The features of processors that PyTorch reports, as far as they matter here.
EPYC_7003 = {
    "architecture": "x86_64",
    "avx2": True,
    "avx512_f": False,
    "avx512_bf16": False,
    "amx_bf16": False,
}
SKYLAKE = {**EPYC_7003, "avx512_f": True, "avx512_vnni": True}
PROCESSORS = {
    "AVX2": (EPYC_7003, False),
    "AVX-512 without BF16": (SKYLAKE, False),
    "AMX for integers": ({**SKYLAKE, "amx_tile": True, "amx_int8": True}, False),
    "AVX-512 BF16": ({**SKYLAKE, "avx512_bf16": True}, True),
    "AMX": ({**SKYLAKE, "amx_bf16": True}, True),
    "Arm": ({"architecture": "aarch64", "neon": True, "bf16": False}, False),
    "Arm BF16": ({"architecture": "aarch64", "neon": True, "bf16": True}, True),
    "an architecture that PyTorch says nothing of": ({"architecture": "riscv64"}, False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_has_fast_bf16_where_it_multiplies_in_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, fast = PROCESSORS[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: reported)
    assert has_fast_bf16() is fast
    assert engine_dtype("auto") == (torch.bfloat16 if fast else torch.float32)
    assert engine_dtype("float32") == torch.float32
    assert engine_dtype("bfloat16") == torch.bfloat16


@pytest.mark.parametrize("native", [False, True])
def test_a_gpu_decides_for_itself_and_not_by_emulation(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or native

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    # The other processor reports the opposite.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": not native})
    assert has_fast_bf16() is native


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="reads Linux's flags of an x86",
)
def test_what_is_asked_of_pytorch_is_what_the_kernel_says_of_this_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that PyTorch does not know (any more) would silently make every machine a slow one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next(line.split(":")[1].split() for line in lines if line.startswith("flags"))
    reported: Any = torch.cpu.get_capabilities()
    assert {"amx_bf16", "avx512_bf16"} <= reported.keys()
    assert has_fast_bf16() == bool({"amx_bf16", "avx512_bf16"} & set(flags))
