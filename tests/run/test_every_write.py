"""Every file is written by `src/lockstep/files.py`, or its place stands in this table with the reason.

The functions there replace a file in one step, so that a kill or a full disk leaves the whole old content or the
whole new one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
WRITES = {
    "write_text",
    "write_bytes",
    "save_file",
    "copyfile",
    "copy2",
    "copytree",
    "fdopen",
    "write_table",
    "touch",
}
# Of these objects only. Others have methods of the same name that write no file.
OWNED = {"save": {"torch"}, "copy": {"shutil"}, "dump": {"json", "pickle"}, "move": {"shutil"}}
OPENS = {"open", "NamedTemporaryFile"}
# By reason, the functions that write in another way.
ELSEWHERE = {
    "a part of a checkpoint, which gets its name when all parts are on the disk": """
        run/files/checkpoints.py::MethodState.save
        run/trainers/checkpoints.py::WholeCheckpoints._save_optimizer_and_scheduler
        run/trainers/checkpoints.py::WholeCheckpoints._save_rng_state""",
    "a part of a folder that gets its name when it is whole": "models/packaged.py::fetch",
    "it goes through `replacing`": "run/files/rollouts.py::keep_rollouts",
    "a lock, whose content is nothing": "run/files/directory.py::locked server/supervisor.py::reserved_port",
    "a log of libraries, to which a descriptor of the process writes": """
        cli/output.py::LibraryLog.move_to cli/output.py::libraries_aside""",
    "a lock and a list of a folder for sockets, which nobody needs after a crash": """
        engines/vllm/environment.py::owned engines/vllm/environment.py::note
        engines/vllm/environment.py::remove_dead""",
    "a key: its file is made with its rights, and renamed": "server/keys.py::write_key server/keys.py::read_key",
    "a descriptor of the process, or memory": """
        extras/environments/own_process/verifiers_rollouts.py::main rollouts/programs/environment_runner.py::main
        weights/wire/shared_memory.py::shares_memory cli/output.py::open_streams""",
}


def writes(node: ast.AST) -> bool:
    """Whether a call may write a file."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in WRITES:
        return True
    if name in OWNED:
        return isinstance(function, ast.Attribute) and getattr(function.value, "id", "") in OWNED[name]
    if name not in OPENS:
        return False
    # `open(path, mode)`, and `path.open(mode)`.
    place = 1 if isinstance(function, ast.Name) else 0
    given = [*node.args[place : place + 1], *(word.value for word in node.keywords if word.arg == "mode")]
    modes = [mode.value for mode in given if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return any(set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in modes)


def found(source: Path) -> Iterator[str]:
    """The functions of a folder that write files, as `path::Class.function`."""
    for path in sorted(source.rglob("*.py")):
        waiting: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text()))]
        while waiting:
            name, node = waiting.pop()
            if writes(node):
                yield f"{path.relative_to(source)}::{name.removeprefix('.') or '<module>'}"
            for child in ast.iter_child_nodes(node):
                named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                waiting.append((f"{name}.{child.name}" if named else name, child))


def test_every_file_is_written_whole() -> None:
    known = {place for places in ELSEWHERE.values() for place in places.split()}
    there = {place for place in found(SOURCE) if not place.startswith("files.py::")}
    assert there - known == set(), "write with src/lockstep/files.py, or add a reason to the table"
    assert known - there == set(), "these places write no file any more"


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text('x')",
        "open(path, 'w')",
        "path.open(mode='ab')",
        "io.open('r+')",
        "torch.save(x, path)",
        "json.dump(x, f)",
    ],
)
def test_the_rule_sees_a_write(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(f"class A:\n    def b(self):\n        {line}\n")
    assert list(found(tmp_path)) == ["a.py::A.b"]
    (tmp_path / "a.py").write_text("path.open('rb')\nmodel.save(x)\nstream.open('input')\n")
    assert not list(found(tmp_path))
