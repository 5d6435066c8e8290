"""A digest of a Python function with everything that it uses from its own files, so that a resumed run notices a changed reward.

A function's digest covers its source, and the functions, classes and assignments of the user's own modules that it refers to. It
does not cover installed packages, files that the function reads, or services that it calls.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.engines.tensor_specs import tensor_digest
from lockstep.parity.receipt import text_digest

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), re.Pattern)
# Resolved, because the environment's folder may be a link.
_INSTALLED = tuple(str(Path(sysconfig.get_paths()[kind]).resolve()) for kind in ("stdlib", "purelib", "platlib"))


def code_digest(function: Any) -> str:
    """Hex digest of a function, a callable object, a model with its weights, or a command as text."""
    if isinstance(function, str):
        return text_digest(function)
    return text_digest("\n".join(sorted(_Walk(function).parts)))


class _Walk:
    """Collects a description of each object that a function reaches."""

    def __init__(self, root: Any) -> None:
        self.parts: set[str] = set()
        self._seen: set[int] = set()
        self._files: dict[str, dict[str, str]] = {}
        self._take("", root, root=True)

    def _take(self, name: str, value: Any, *, root: bool = False) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, torch.nn.Module):
            self._seen.add(id(value))
            self.parts |= {f"{name}.{key} {tensor_digest(tensor)}" for key, tensor in value.state_dict().items()}
        elif isinstance(value, functools.partial):
            self._take(name, value.func, root=root)
            self.parts.add(f"{name} = {_said((*value.args, *sorted(value.keywords.items())))}")
        elif isinstance(value, types.MethodType):
            self._take(name, value.__func__, root=root)
            self._take(name, value.__self__, root=root)
        elif isinstance(value, types.FunctionType | type):
            if root or _is_own(value):
                self._seen.add(id(value))
                self._code(name, value)
        elif root or (callable(value) and _is_own(type(value))):
            self._seen.add(id(value))
            self._take(name, type(value), root=root)
            changing = _assigned_later(type(value))
            for key, part in sorted(getattr(value, "__dict__", {}).items()):
                if key not in changing and not key.startswith("__"):
                    self._take(f"{name}.{key}", part)
        elif (said := _said(value)) is not None:
            self.parts.add(f"{name} = {said}")

    def _code(self, name: str, value: Callable[..., Any] | type) -> None:
        try:
            self.parts.add(f"{name}: {inspect.getsource(value)}")
        except (OSError, TypeError):
            # It was typed into a prompt, or made by exec.
            self.parts |= {f"{name}: {code.co_code.hex()} {_said(code.co_consts)}" for code in _codes(value)}
        functions = (
            [f for f in vars(value).values() if isinstance(f, types.FunctionType)]
            if isinstance(value, type)
            else [value]
        )
        for function in functions:
            self._references(function)

    def _references(self, function: Any) -> None:
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType):
            # What is wrapped may be a built-in function, which has no code in Python.
            return
        names = {name for code in _codes(function) for name in code.co_names}
        path = function.__code__.co_filename
        own_file = self._files[path] if path in self._files else self._files.setdefault(path, _bindings(path))
        for name in sorted(names & function.__globals__.keys()):
            found = function.__globals__[name]
            if isinstance(found, types.ModuleType):
                # Another file: only what is named beside it can be used.
                for attribute in sorted(names & vars(found).keys()):
                    self._take(f"{name}.{attribute}", getattr(found, attribute))
            elif name in own_file:
                # The text and not the value, because a reward function may change it while it runs.
                self.parts.add(f"{name}: {own_file[name]}")
            else:
                self._take(name, found)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._take(name, cell.cell_contents)
            except ValueError:
                # The cell is still empty.
                continue


def _bindings(path: str) -> dict[str, str]:
    """The text of the assignments at the top of a Python file, by name; empty if the file cannot be read."""
    try:
        return _assignments(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return {}


@functools.lru_cache(maxsize=64)
def _assignments(text: str) -> dict[str, str]:
    """The text of the assignments at the top of a module, by name."""
    found: dict[str, str] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            segment = ast.get_source_segment(text, statement) or ""
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found[node.id] = found.get(node.id, "") + segment
    return found


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function and of the functions inside it."""
    functions = vars(value).values() if isinstance(value, type) else [value]
    waiting = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def _assigned_later(kind: type) -> set[str]:
    """Attributes that methods other than `__init__` assign, such as a counter of calls."""
    functions = [f for name, f in vars(kind).items() if name != "__init__" and isinstance(f, types.FunctionType)]
    found = (step for f in functions for code in _codes(f) for step in dis.get_instructions(code))
    return {str(step.argval) for step in found if step.opname == "STORE_ATTR"}


def _is_own(value: Any) -> bool:
    """Whether a function or class stands in a file of the user's, and not in an installed package or in Lockstep."""
    if str(getattr(value, "__module__", "")).partition(".")[0] == "lockstep":
        return False
    try:
        path = inspect.getsourcefile(value)
    except TypeError:
        return False
    return path is None or not str(Path(path).resolve()).startswith(_INSTALLED)


def _said(value: Any) -> str | None:
    """Text of a value that cannot change; None for any other value."""
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(str(_said(part)) for part in value)})"
    return None
