"""A digest of a Python function with everything that it uses from its own files, so that a resumed run notices a changed reward.

A function's digest covers its source, and the functions, classes and assignments of the user's own modules that it refers to. It
does not cover installed packages (`whose_code.py` tells them), files that the function reads, or services that it calls.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.engines.tensor_specs import tensor_digest
from lockstep.parity.receipt import text_digest
from lockstep.whose_code import is_users

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), re.Pattern)


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
        self._files: dict[str, _File] = {}
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
            if root or is_users(value):
                self._seen.add(id(value))
                self._code(name, value)
        elif root or (callable(value) and is_users(type(value))):
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
            self.parts.add(f"{name}: {self._source(value)}")
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

    def _source(self, value: Callable[..., Any] | type) -> str:
        """The text of a function or class. `inspect` would parse the whole file again for each class."""
        classes = self._file(inspect.getsourcefile(value) or "").classes if isinstance(value, type) else {}
        return classes.get(value.__qualname__) or inspect.getsource(value)

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _read(path)
        return self._files[path]

    def _references(self, function: Any) -> None:
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType):
            # What is wrapped may be a built-in function, which has no code in Python.
            return
        names = {name for code in _codes(function) for name in code.co_names}
        own_file = self._file(function.__code__.co_filename).assignments
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


@dataclass(frozen=True, slots=True)
class _File:
    """What a Python file has.

    Attributes:
        assignments: the text of the assignments at its top, by name.
        classes: the text of its classes, by qualified name.
    """

    assignments: Mapping[str, str]
    classes: Mapping[str, str]


def _read(path: str) -> _File:
    """A Python file; empty if it cannot be read."""
    try:
        return _parsed(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return _File({}, {})


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> _File:
    tree, lines = ast.parse(text), text.split("\n")
    assignments: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            segment = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    assignments[node.id] = assignments.get(node.id, "") + segment
    classes: dict[str, str] = {}
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, parent = waiting.pop()
        for node in ast.iter_child_nodes(parent):
            inner = prefix
            if isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                name = prefix + node.name
                # A class may be defined twice, in two branches.
                classes[name] = classes.get(name, "") + "\n".join(lines[first - 1 : node.end_lineno])
                inner = f"{name}."
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{node.name}.<locals>."
            waiting.append((inner, node))
    return _File(assignments, classes)


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


def _said(value: Any) -> str | None:
    """Text of a value that cannot change; None for any other value."""
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(str(_said(part)) for part in value)})"
    return None
