"""Writes the flags and defaults of released OpenRLHF versions, for docs/reference/migrating-from-openrlhf.md.

    pip download --no-deps --dest FOLDER openrlhf==0.9.10
    pip download --no-deps --dest FOLDER openrlhf==0.11.2
    python scripts/openrlhf_flags.py FOLDER/*.whl > tests/docs/openrlhf_flags.json

A wheel is read as a zip file; the package is not installed. Of its module `openrlhf.cli.train_ppo_ray` only the
statements that add flags to the parser are run. Defaults that JSON cannot express, such as infinity, become text.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODULE = "openrlhf/cli/train_ppo_ray.py"


def flags(source: str) -> dict[str, Any]:
    """The default of every flag, by the flag's longest name.

    Raises:
        ValueError: the module makes no parser.
    """
    tree = ast.parse(source)
    main = next((node for node in tree.body if isinstance(node, ast.If)), None)
    chosen = [node for node in main.body if _makes_a_parser(node) or _only_adds(node)] if main else []
    if not chosen:
        raise ValueError(f"{MODULE} has no parser under `if __name__ == '__main__'`")
    # Some defaults have the time of day in them; here they end where the time would begin.
    datetime = SimpleNamespace(now=lambda: SimpleNamespace(strftime=lambda _: ""))
    # The f-strings of flag names need no builtins; the types of flags do.
    names = {
        "argparse": argparse,
        "datetime": datetime,
        "__builtins__": {"int": int, "float": float, "str": str},
    }
    exec(compile(ast.Module(chosen, []), MODULE, "exec"), names)
    parser = names["parser"]
    assert isinstance(parser, argparse.ArgumentParser)
    return {max(a.option_strings, key=len): _plain(a.default) for a in parser._actions if a.dest != "help"}


def _makes_a_parser(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and "ArgumentParser" in ast.unparse(node.value)


def _only_adds(node: ast.stmt) -> bool:
    if isinstance(node, ast.For):
        return all(_only_adds(inner) for inner in node.body)
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("parser.add_argument(")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if value in (float("inf"), float("-inf")) else value


def main() -> None:
    found = {}
    for wheel in map(Path, sys.argv[1:]):
        with zipfile.ZipFile(wheel) as archive:
            path = next(name for name in archive.namelist() if name.endswith(MODULE))
            found[wheel.name.split("-")[1]] = flags(archive.read(path).decode())
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
