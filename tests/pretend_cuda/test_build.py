"""The extension of the pretend GPU is compiled once, and a machine that cannot have it is told why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pretend_cuda import build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETEND_CUDA_BUILD", str(tmp_path))
    monkeypatch.setattr(build, "version", lambda name: f"{build.TORCH}.0+cpu")


def test_another_version_of_pytorch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "version", lambda name: "2.99.1+cpu")
    assert build.missing() == (
        f"tests/pretend_cuda is written for PyTorch {build.TORCH}, and this is 2.99.1+cpu: "
        "compare its C++ file with the new headers"
    )
    with pytest.raises(RuntimeError, match="is written for PyTorch"):
        build.compiled()


def test_without_a_compiler_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "install g++" in str(build.missing())


def test_workers_that_need_it_at_a_time_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_it(binary: Path) -> None:
        made.append(binary)
        binary.touch()

    monkeypatch.setattr(build, "_compile", compile_it)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.compiled(), range(4)))
    assert made == [found[0]]


def test_what_the_compiler_says_is_in_the_error_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_compiler", lambda: "false")
    with pytest.raises(RuntimeError, match="cannot compile"):
        build.compiled()
    assert not list(tmp_path.rglob("*.so"))
