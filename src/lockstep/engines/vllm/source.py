"""The names of vLLM's arguments, read from its source.

An import takes seconds, and reads an environment that Lockstep has not set.
"""

from __future__ import annotations

import ast
import functools
import re
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def names_of_engine() -> frozenset[str]:
    """The names of the arguments of the installed `vllm.LLM`; empty if vLLM is not installed."""
    for tree in _parsed("engine/arg_utils.py"):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                # `vllm.LLM` takes every field of EngineArgs, and this.
                return frozenset(
                    name for name in {*_fields(node), "chat_template"} if not name.startswith("_")
                )
    return frozenset()


@functools.cache
def names_of_server() -> frozenset[str]:
    """The names of the arguments of the installed vLLM's server, as `max_num_seqs`; empty if vLLM is not installed.

    Those are the fields of the classes from which its parser is made, and what is added to the parser as `--NAME`.
    """
    found: set[str] = set()
    for tree in _parsed("engine/arg_utils.py", "entrypoints/**/cli_args.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= _fields(node)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"--[a-z\d-]+", text := str(node.value)):
                found.add(text[2:].replace("-", "_"))
    return frozenset(found)


def _parsed(*places: str) -> list[ast.Module]:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    home = Path(spec.submodule_search_locations[0])
    files = [file for place in places for file in home.glob(place)]
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def _fields(node: ast.ClassDef) -> set[str]:
    return {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
