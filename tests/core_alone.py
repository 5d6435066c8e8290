"""Imports all of the core, trains, and asks for extras, in a Python with only what `pip install lockstep-rl` brings.

    python tests/core_alone.py

Python's finder is replaced by one that finds no module and no distribution of another package. The folders of extras
are those of the table in docs/start/install.md; their modules need not be importable.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NAMED = (
    *(
        "vllm",
        "xgrammar",
        "gguf",
        "reasoning_gym",
        "math_verify",
        "latex2sympy2_extended",
        "starlette",
        "uvicorn",
    ),
    *("bitsandbytes", "liger_kernel", "deepspeed", "textarena", "openenv", "verifiers", "trl"),
)
CODE = re.compile(r"`(.+?)`")


def needed(requirements: list[str]) -> set[str]:
    """The names of the distributions that requirements ask for, and of those that these ask for."""
    names: set[str] = set()
    seen: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        names.add(canonicalize_name(wanted.name))
        extras = wanted.extras or {""}
        for further in map(Requirement, importlib.metadata.requires(wanted.name) or []):
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)
    return names


def hide_others(kept: set[str]) -> set[str]:
    """Let Python find nothing of distributions that are not in `kept`; returns the hidden modules."""
    owners = importlib.metadata.packages_distributions()
    hidden = {module for module, names in owners.items() if not kept & set(map(canonicalize_name, names))}

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
            return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

        @staticmethod
        def find_distributions(*arguments: Any, **named: Any) -> Iterator[importlib.metadata.Distribution]:
            found = PathFinder.find_distributions(*arguments, **named)
            return (one for one in found if canonicalize_name(one.metadata["Name"]) in kept)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
    return hidden


def extras() -> dict[str, list[str]]:
    """The names of the modules of each extra, from the table of the docs."""
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    found = {}
    for row in page.partition("| extra |")[2].partition("\n\n")[0].splitlines()[2:]:
        names, _, places, _ = row.strip("| ").split(" | ")
        modules = [place.removesuffix(".py").strip("/").replace("/", ".") for place in CODE.findall(places)]
        found |= {name: [f"lockstep.{module}" for module in modules] for name in CODE.findall(names)}
    return found


def import_all(outside: list[str]) -> int:
    """Import every module; returns how many of them are of the core. A module of an extra may need what is hidden.

    Args:
        outside: the names of the extras' modules and packages.
    """
    import lockstep

    core = 0
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if module.name.endswith(".__main__"):
            continue
        of_extra = any(f"{module.name}.".startswith(f"{place}.") for place in outside)
        core += not of_extra
        try:
            importlib.import_module(module.name)
        except ImportError:
            if not of_extra:
                raise
    return core


def train(model: str, folder: Path) -> None:
    """One step of a tiny model, and a look at its receipt, by the command line."""
    from lockstep.cli.main import main as lockstep

    fields = (
        f"--model_name_or_path {model} --dataset_name arithmetic --train_size 8 --eval_size 2 "
        f"--max_steps 1 --use_cpu"
    )
    few = (
        "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 4 --save_strategy no "
        "--report_to none"
    )
    assert lockstep(["grpo", *fields.split(), *few.split(), "--output_dir", str(folder)]) == 0
    assert lockstep(["verify", "--receipt", str(folder / "receipt.jsonl")]) == 0


def check_refusals(model: str, folder: Path) -> None:
    """What needs an extra is refused with the command that installs it."""
    import peft
    import torch
    from transformers import BitsAndBytesConfig

    from lockstep import GRPOConfig
    from lockstep.cli import serve
    from lockstep.extensions import PROGRAMS, load
    from lockstep.models.packaged import packaged_model_dir
    from lockstep.models.quantised import check_quantization
    from lockstep.run.engine import start_here
    from lockstep.tasks.data import load_data
    from lockstep.tasks.rewards import accuracy, load_reward

    problems: Any = {"train_split": "train", "test_split": None, "train_size": 2, "eval_size": 1, "seed": 0}
    engine: Any = {"dtype": torch.float32, "max_model_len": 64}
    wishes: list[tuple[str, Callable[[], object]]] = [
        ("math", lambda: load_reward("accuracy")),
        ("math", lambda: accuracy(["4"], answer=["4"])),
        ("demo", lambda: load_reward("reasoning_gym")),
        ("demo", lambda: load_data("reasoning_gym", subset="gcd", **problems)),
        ("gguf", packaged_model_dir),
        ("vllm", lambda: start_here(model, None, use_vllm=True, vllm_arguments={}, **engine)),  # type: ignore[arg-type]
        ("vllm", lambda: serve.run([model])),
        ("gateway", lambda: load(PROGRAMS["agent"])),
        ("quantized", lambda: check_quantization(BitsAndBytesConfig(load_in_4bit=True), peft.LoraConfig())),
        ("liger", lambda: GRPOConfig(output_dir=str(folder), use_liger_kernel=True)),
        (
            "deepspeed",
            lambda: GRPOConfig(output_dir=str(folder), deepspeed={"zero_optimization": {"stage": 3}}),
        ),
    ]
    for extra, ask in wishes:
        check_refused(ask, f"pip install 'lockstep-rl[{extra}]'")


def check_refused(ask: Callable[[], object], command: str) -> None:
    """Check that a wish is refused with the command that installs what it needs."""
    from lockstep.errors import InputError

    said = "nothing"
    try:
        ask()
    except InputError as error:
        said = str(error)
    assert command in said, f"{command!r} is not in what was said: {said}"


def main() -> None:
    """Import, train, and ask for extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    hidden = hide_others({"lockstep-rl", *needed(project["dependencies"])})
    there = [name for name in NAMED if importlib.util.find_spec(name) is not None]
    assert not there, f"{there} can still be found"
    found = extras()
    assert set(found) == set(project["optional-dependencies"]) - {"dev"}, (
        "the table of extras in docs/start/install.md"
    )
    count = import_all([place for places in found.values() for place in places])
    from tiny import save_model

    with tempfile.TemporaryDirectory() as folder:
        # A cache of its own has no packaged model.
        os.environ["XDG_CACHE_HOME"] = folder
        model = str(save_model(Path(folder) / "tiny"))
        train(model, Path(folder) / "run")
        check_refusals(model, Path(folder) / "run")
    loaded = hidden & {name.partition(".")[0] for name in sys.modules}
    print(
        f"{count} modules imported, a step trained; of {len(hidden)} hidden modules, these were there: {sorted(loaded)}"
    )


if __name__ == "__main__":
    main()
