"""Functions and classes by name: `path/to/file.py:name`, or `package.module.name`.

The command line names reward functions, tools and environments so. The built-in reward functions are added to them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.homes import expanded

_numbers = itertools.count()
# Modules by their files.
Modules = dict[Path, Any]


def load_function(name: str, kind: str, modules: Modules | None = None) -> Any:
    """What a name names.

    Args:
        kind: what it is for, such as `tool`, for errors.
        modules: the files that this run has loaded. With it, everything from one file is from one module. None: the file is loaded
            again.

    Raises:
        InputError: there is no such function or class. The message says where it was searched.
    """
    where, function = place_of(name, kind)
    module = _from_file(Path(where), kind, modules) if where.endswith(".py") else _from_package(where, kind)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{kind} {name!r}: {where} has no function {function!r}")
    return found


def place_of(name: str, kind: str) -> tuple[str, str]:
    """File or module of a function, and the function's name. Runs no code.

    Raises:
        InputError: the name has another form, or the file does not exist.
    """
    where, _, function = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not where or name.endswith(".py"):
        raise InputError(f"{kind} {name!r}: give file.py:name or package.module.name")
    if where.endswith(".py"):
        where = str(expanded(where))
        if not Path(where).is_file():
            raise InputError(f"{kind} {name!r}: {where} does not exist")
    return where, function


def _from_file(path: Path, kind: str, modules: Modules | None) -> Any:
    """The module of a file, with a unique name."""
    known = modules if modules is not None else {}
    if path.resolve() in known:
        return known[path.resolve()]
    name = f"lockstep_file_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle search the module of a class in sys.modules.
    sys.modules[name] = module
    try:
        # The loader is not used, because it may run cached bytecode of an older text of this file.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(f"{kind} file {path} cannot be run: {type(error).__name__}: {error}") from error
    known[path.resolve()] = module
    return module


def _from_package(name: str, kind: str) -> Any:
    # TRL's commands search the working directory first. Here it comes last, so that no local folder hides an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"{kind} module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
