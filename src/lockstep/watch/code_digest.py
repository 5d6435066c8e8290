"""Digests of the user's code, a function with all that it reaches: a resumed run notices a changed reward.

Two things are digested. The *files* of the user's that the function reaches, each whole (`own_files.py`). And the
*objects* that it reaches when the run begins: the text of functions and classes, and the values of globals,
attributes, closures and default arguments. `whose_code.py` tells the user's code from installed packages, whose code
is not digested.

A value is not compared where the user's own functions change it while they run (a counter, a cache), where it comes
from the clock, from chance, from the machine or from the environment, and where it is an object of an installed
package that is no number, text, collection, array or model.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import dis
import enum
import fractions
import functools
import inspect
import json
import re
import shlex
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from lockstep.contract.tensors import tensor_digest
from lockstep.tokens.arrays import digest_of
from lockstep.watch.own_files import OwnFiles, changed_names, changes_in_place
from lockstep.watch.receipt import text_digest
from lockstep.whose_code import is_lockstep, is_users

_PLAIN = (
    int, float, complex, str, bytes, bytearray, bool, type(None), range, PurePath, decimal.Decimal, fractions.Fraction,
    datetime.date, datetime.time, datetime.timedelta, np.generic, torch.dtype, torch.device,
)  # fmt: skip
_COLLECTIONS = (list, tuple, set, frozenset, dict, types.MappingProxyType)
# What holds functions, and the attributes that it holds them in.
_HOLDERS: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.singledispatchmethod: ("func", "dispatcher"),
    collections.defaultdict: ("default_factory",),
    types.BuiltinFunctionType: ("__self__",),
}
# A longer collection is described by its digest.
_LONGEST = 10_000
# Attributes that Python itself gives to classes and functions.
_OF_PYTHON = re.compile(
    r"__\w+__|_abc_impl|_member_\w+|_value2member_map_|_hashable_values_|_unhashable_values\w*"
)


@dataclass(frozen=True, slots=True)
class CodeDigest:
    """What a function reaches: a digest of its objects' texts and values, and of each file of the user's, by path."""

    objects: str
    files: Mapping[Path, str]

    def __str__(self) -> str:
        """Hex digest of all of it, wherever the files lie."""
        return text_digest("\n".join([self.objects, *sorted(self.files.values())]))


def code_digest(function: Any) -> CodeDigest:
    """Digests of a function, a callable object, a model with its weights, or a command as text."""
    walk = _Walk()
    if isinstance(function, str):
        walk.texts[()] = {function}
        walk.files.reach_named(_words(function), Path.cwd())
    else:
        walk.take((), function, root=True)
    return CodeDigest(walk.digest(), walk.files.digests())


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


class _Walk:
    """Collects a description of each object that a function reaches, by the names that lead to it."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, ...], set[str]] = {}
        self.files = OwnFiles()
        # Kept alive, so that no two objects have the same id.
        self._seen: dict[int, Any] = {}
        self._changed: set[str] = set()

    def digest(self) -> str:
        """Hex digest of the descriptions, without the values that the user's own functions change."""
        changed = self._changed | self.files.changed
        texts = [
            f"{'.'.join(names)}: {text}"
            for names, found in self.texts.items()
            if not changed.intersection(names)
            for text in found
        ]
        return text_digest(self.files.without_places("\n".join(sorted({*texts, *self.files.slices()}))))

    def take(self, names: tuple[str, ...], value: Any, *, root: bool = False) -> None:
        """Describe an object, which `names` lead to, and all that it reaches. A `root` need not be the user's own."""
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            self._say(names, f"{type(value).__name__} {value!r}")
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, re.Pattern):
            self._say(names, f"{value.pattern!r} {value.flags}")
        elif isinstance(value, types.ModuleType):
            self.files.reach_module(value)
        elif isinstance(value, torch.Tensor):
            self._say(names, f"{value.dtype} {list(value.shape)} {tensor_digest(value)}")
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._say(names, f"{value.dtype} {list(value.shape)} {digest_of(value)}")
        elif isinstance(value, torch.nn.Module):
            self._module(names, value)
        elif isinstance(value, functools.partial):
            self.take(names, value.func, root=root)
            for key, given in [*enumerate(value.args), *value.keywords.items()]:
                self.take((*names, f"({key})"), given)
        elif isinstance(value, types.MethodType):
            self.take(names, value.__func__, root=root)
            self.take(names, value.__self__, root=root)
        elif isinstance(value, types.FunctionType):
            self._function(names, value, root=root)
        elif isinstance(value, type):
            self._class(names, value, root=root)
        elif isinstance(value, enum.Enum):
            self._say(names, str(value))
            self.take(names, type(value))
        else:
            self._object(names, value, root=root)

    def _say(self, names: tuple[str, ...], text: str) -> None:
        self.texts.setdefault(names, set()).add(text)

    # ---- objects ----------------------------------------------------------------------------------------------------

    def _object(self, names: tuple[str, ...], value: Any, *, root: bool) -> None:
        is_own = root or is_users(type(value))
        name = getattr(value, "__qualname__", None) if callable(value) else None
        self._say(names, f"a {type(value).__name__} {name if isinstance(name, str) else ''}")
        if is_own:
            self._class(names, type(value), root=root)
            for key, part in sorted(_attributes(value).items()):
                if not key.startswith("__"):
                    self.take((*names, key), part)
        held = [key for kind, keys in _HOLDERS.items() if isinstance(value, kind) for key in keys]
        # A decorated function. Of a class that answers to every name, such as a mock, nothing is asked.
        held += ["__wrapped__"] if inspect.getattr_static(value, "__wrapped__", None) is not None else []
        for key in held:
            part = getattr(value, key, None)
            if part is not None and not isinstance(part, types.ModuleType):
                self.take((*names, key), part, root=root)
        if isinstance(value, _COLLECTIONS) or type(value).__module__ == "collections" or is_own:
            self._collection(names, value)

    def _collection(self, names: tuple[str, ...], value: Any) -> None:
        if not isinstance(value, Mapping | Sequence | Set):
            return
        try:
            # A table of numbers and texts may be large.
            text = json.dumps(value, sort_keys=True)
            self._say(names, text if len(text) <= _LONGEST else text_digest(text))
        except (TypeError, ValueError, RecursionError):
            if isinstance(value, Mapping):
                items = [(str(k) if isinstance(k, _PLAIN) else "", k, part) for k, part in value.items()]
            elif isinstance(value, Set):
                items = [("", None, part) for part in sorted(value, key=str)]
            else:
                items = [(str(place), None, part) for place, part in enumerate(value)]
            for title, key, part in items:
                if key is not None and not isinstance(key, _PLAIN):
                    self.take((*names, "[key]"), key)
                self.take((*names, f"[{title}]"), part)

    def _module(self, names: tuple[str, ...], value: torch.nn.Module) -> None:
        for key, tensor in value.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                self._say((*names, key), tensor_digest(tensor))
        for module in value.modules():
            self._class(names, type(module), root=False)

    # ---- code -------------------------------------------------------------------------------------------------------

    def _function(self, names: tuple[str, ...], value: types.FunctionType, *, root: bool) -> None:
        is_own = is_users(value)
        if is_own or root:
            self._say((), self._text(value))
            given = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
            for key, part in [*((f"default {key}", part) for key, part in given), *vars(value).items()]:
                self.take((*names, key), part, root=root and key == "__wrapped__")
        else:
            self._say(names, f"{value.__module__}.{value.__qualname__}")
            if is_lockstep(value):
                return
            # A decorator of an installed package holds the user's function.
            if (wrapped := vars(value).get("__wrapped__")) is not None:
                self.take(names, wrapped)
        if is_own:
            self._references(value)
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:
                # The cell is still empty.
                continue
            if is_own or root or isinstance(inside, _HOLDING):
                self.take((*names, key), inside)

    def _class(self, names: tuple[str, ...], value: type, *, root: bool) -> None:
        is_own = is_users(value)
        if not is_own:
            is_read = root and not is_lockstep(value)
            self._say(names, self._text(value) if is_read else f"{value.__module__}.{value.__qualname__}")
            return
        self._seen[id(value)] = value
        self._say((), self._text(value))
        for base in value.__mro__[1:]:
            if is_users(base) and id(base) not in self._seen:
                self._class((*names, base.__name__), base, root=False)
        if is_users(type(value)):
            self.take((*names, "metaclass"), type(value))
        for key, part in sorted(vars(value).items()):
            if isinstance(part, types.FunctionType) or not _OF_PYTHON.fullmatch(key):
                self.take((*names, key), part)

    def _text(self, value: Callable[..., Any] | type) -> str:
        """The text of a function or class. Notes its file, and the names that functions change."""
        path = _file_of(value)
        if path is not None and (text := self.files.reach_object(path, value)) is not None:
            return text
        try:
            text = inspect.getsource(value)
        except (OSError, TypeError):
            # It was typed into a prompt, or made by exec.
            self._changed |= {name for code in _codes(value) for name in _changed_by(code)}
            return " ".join(f"{code.co_code.hex()} {_consts(code)}" for code in _codes(value))
        self._changed |= changed_names(text)
        return text

    def _references(self, function: Any) -> None:
        if not isinstance(function, types.FunctionType):
            # What is wrapped may be a built-in function, which has no code in Python.
            return
        codes = list(_codes(function))
        names = {name for code in codes for name in code.co_names}
        steps = [step for code in codes for step in dis.get_instructions(code)]
        used = {str(step.argval) for step in steps if _is_of_globals(step)}
        for name in sorted(used & function.__globals__.keys()):
            found = function.__globals__[name]
            if isinstance(found, types.ModuleType):
                self._attributes_of((name,), found, names)
            else:
                self.take((name,), found)

    def _attributes_of(self, path: tuple[str, ...], module: types.ModuleType, names: set[str]) -> None:
        """What a function names of a module: only that can be used."""
        is_own = self.files.reach_module(module)
        for attribute in sorted(names & vars(module).keys()):
            part = getattr(module, attribute)
            if isinstance(part, types.ModuleType):
                if id(part) not in self._seen:
                    self._seen[id(part)] = part
                    self._attributes_of((*path, attribute), part, names)
            elif is_own or (isinstance(part, types.FunctionType | type) and is_users(part)):
                self.take((*path, attribute), part)


_HOLDING = (types.FunctionType, types.MethodType, functools.partial, *_COLLECTIONS)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _listed(getattr(kind, "__slots__", ()))]
    named = [name for name in slots if not name.startswith("__") and hasattr(value, name)]
    # What a property has computed and keeps is there only after it was asked for.
    own = getattr(value, "__dict__", {})
    kinds = {key: inspect.getattr_static(type(value), key, None) for key in own}
    kept = {key: own[key] for key, kind in kinds.items() if not isinstance(kind, functools.cached_property)}
    return {name: getattr(value, name) for name in named} | kept


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _file_of(value: Any) -> Path | None:
    try:
        found = inspect.getsourcefile(inspect.unwrap(value))
    except (TypeError, OSError):
        return None
    return Path(found) if found is not None and Path(found).is_file() else None


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function and of the functions inside it."""
    functions = vars(value).values() if isinstance(value, type) else [value]
    waiting = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def _changed_by(code: types.CodeType) -> Iterator[str]:
    """Names whose values a piece of code without a text may change."""
    steps = list(dis.get_instructions(code))
    yield from (str(s.argval) for s in steps if s.opname in ("STORE_GLOBAL", "STORE_ATTR"))
    if any(s.opname == "STORE_SUBSCR" for s in steps) or any(map(changes_in_place, code.co_names)):
        yield from code.co_names


def _is_of_globals(step: dis.Instruction) -> bool:
    """Whether an instruction uses a global by its name. The body of a class looks names up in several places."""
    return "GLOBAL" in step.opname or step.opname == "LOAD_NAME"


def _consts(code: types.CodeType) -> str:
    return repr([const for const in code.co_consts if not isinstance(const, types.CodeType)])
