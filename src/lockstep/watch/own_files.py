"""The files of the user's that a piece of code reaches, each digested whole.

A file reaches the files that it imports, at its top or inside a function, and the Python files beside it that it
names in a text. A script that trains is different: between a stop and a resume its user edits it
(`resume_from_checkpoint`, `max_steps`). Of a script only those statements count that define or change what the code
names, and what these name in turn. If the code looks names up as text (`globals()`, `eval`), the script counts whole
too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import symtable
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeGuard

from lockstep.watch.receipt import text_digest
from lockstep.whose_code import is_installed

# Methods that change a collection in place.
_CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem",
    "popleft", "remove", "reverse", "setdefault", "sort", "update", "subtract",
}  # fmt: skip
# Functions that build an object. What they assign to it is how it begins.
_BUILDING = {"__init__", "__new__", "__post_init__", "__setstate__"}
# A value that comes from one of these differs between two processes.
_UNSTABLE = {
    "time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today", "uuid1", "uuid4", "random",
    "randint", "choice", "shuffle", "sample", "uniform", "token_hex", "urandom", "getenv", "getpid",
    "getcwd", "cwd", "gethostname", "node", "mkdtemp", "mkstemp", "cpu_count", "get_ident", "id", "hash",
    "is_available", "device_count", "sched_getaffinity", "get_num_threads", "abspath", "absolute", "resolve",
    "expanduser", "home", "gettempdir", "getuser", "version",
}  # fmt: skip
_UNSTABLE_ATTRIBUTES = {"environ", "argv", "__version__"}
_LOOKUPS = {"globals", "eval", "exec"}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(slots=True)
class _File:
    """A Python file of the user's.

    Attributes:
        digest: of its bytes.
        statements: the innermost statements outside of functions and classes, with the names that each defines or
            changes, and the attributes that it changes.
        places: functions, classes and lambdas by the line of their code.
        taken: of a script, the nodes that count so far.
    """

    text: str
    digest: str
    tree: ast.Module
    is_script: bool
    statements: list[tuple[ast.stmt, set[str], set[str]]]
    places: dict[int, list[ast.AST]]
    taken: dict[int, ast.AST] = field(default_factory=dict)
    whole: bool = False

    def segment(self, node: ast.AST) -> str:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
        if isinstance(node, ast.Lambda):
            return ast.unparse(node)
        return "\n".join(self.text.split("\n")[first - 1 : node.end_lineno])  # type: ignore[attr-defined]


class OwnFiles:
    """The files that were reached so far.

    Attributes:
        changed: names whose values are not compared: functions in these files change them, or processes differ in them.
    """

    def __init__(self) -> None:
        self._files: dict[Path, _File | str | None] = {}
        self.changed: set[str] = set()

    def digests(self) -> dict[Path, str]:
        """The digest of each file that counts whole."""
        found = {}
        for path, file in self._files.items():
            if isinstance(file, str):
                found[path] = file
            elif file is not None and (file.whole or not file.is_script):
                found[path] = file.digest
        return found

    def slices(self) -> list[str]:
        """The texts of scripts that count."""
        known = [file for file in self._files.values() if isinstance(file, _File)]
        files = [file for file in known if file.is_script and not file.whole]
        return [file.segment(node) for file in files for node in file.taken.values()]

    def without_places(self, text: str) -> str:
        """The text without the folders in which the files lie, so that a copy of a project is the same."""
        folders = {folder for path in self._files for folder in path.parents[:3] if len(folder.parts) > 2}
        for folder in sorted(map(str, folders), key=len, reverse=True):
            text = text.replace(folder, "")
        return text

    def reach_module(self, module: types.ModuleType) -> bool:
        """Take a module's file. Returns whether it is the user's own."""
        place = getattr(module, "__file__", None)
        return (
            place is not None and not _is_lockstep(module.__name__) and self._reach(Path(place)) is not None
        )

    def reach_object(self, path: Path, value: Any) -> str | None:
        """Take the file of a function or class, or what the object names in a script, and return the object's text.

        None: the file is not the user's own, or does not have the object.
        """
        file = self._reach(path)
        if not isinstance(file, _File):
            return None
        nodes = _nodes_of(file, value)
        if file.is_script:
            self._take(path.resolve(), file, nodes)
        return "\n".join(file.segment(node) for node in nodes) or None

    def reach_named(self, texts: Iterable[str], folder: Path) -> None:
        """Take the Python files that a text names, in a folder or by their whole path."""
        for text in texts:
            # A text may be too long for a path, or name a folder that this user may not open.
            with suppress(OSError):
                if text.endswith(".py") and "\n" not in text and (path := folder / text).is_file():
                    self._reach(path)

    def _reach(self, place: Path) -> _File | str | None:
        path = place.resolve()
        if path not in self._files:
            self._files[path] = None
            if not is_installed(str(path)) and not path.is_relative_to(_LOCKSTEP):
                self._files[path] = file = _read(path)
                if isinstance(file, _File):
                    # A resumed run has another process, and perhaps the same one: a value that changes says nothing.
                    self.changed |= _changed(file.tree)
                    if not file.is_script:
                        self._follow(path, file.tree)
        return self._files[path]

    def _follow(self, path: Path, *nodes: ast.AST) -> None:
        """Take the files that statements import or name."""
        for node in (inner for outer in nodes for inner in ast.walk(outer)):
            if isinstance(node, ast.Import):
                self._import([alias.name for alias in node.names], path)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                inside = [f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names]
                self._import([base, *inside], path)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.reach_named([node.value], path.parent)
            elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
                self._import([str(a.value) for a in node.args if isinstance(a, ast.Constant)], path)

    def _import(self, names: Iterable[str], path: Path) -> None:
        for name in names:
            for found in _module_files(name, path):
                self._reach(found)

    def _take(self, path: Path, file: _File, nodes: list[ast.AST]) -> None:
        """Of a script: take some nodes, and all that they name."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if id(node) in file.taken:
                continue
            file.taken[id(node)] = node
            names, used = _identifiers(node), _globals_of(node)
            file.whole |= bool(names & _LOOKUPS)
            self._follow(path, node)
            if isinstance(node, _Definition) and _changed_globals(node):
                # Whether it is called decides what it has changed.
                used.add(node.name)
                waiting += [statement for statement, *_ in file.statements if _calls(statement, node.name)]
            waiting += [
                statement
                for statement, defined, attributes in file.statements
                if defined & used or attributes & names
            ]
        if file.whole:
            self._follow(path, file.tree)


# ---- one file
# -----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> _File | str | None:
    """A Python file; the digest of any other file, such as a compiled module; None: it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    text = content.decode("utf-8", "replace").replace("\r\n", "\n")
    digest = text_digest(text) if path.suffix == ".py" else text_digest(content.hex())
    try:
        tree = _parsed(text) if path.suffix == ".py" else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        return digest
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    is_script = (main is not None and Path(main).resolve() == path) or _trains(tree)
    places: dict[int, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda | _Definition):
            for line in {node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))}:
                places.setdefault(line, []).append(node)
    return _File(text, digest, tree, is_script, list(_statements(tree.body)), places)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _trains(tree: ast.Module) -> bool:
    """Whether a file uses one of Lockstep's trainers."""
    imported = any(
        (isinstance(node, ast.Import) and any(_is_lockstep(alias.name) for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and _is_lockstep(node.module or ""))
        for node in ast.walk(tree)
    )
    return imported and any(name.endswith("Trainer") for name in _identifiers(tree))


def _statements(body: Iterable[ast.stmt]) -> Iterator[tuple[ast.stmt, set[str], set[str]]]:
    """The innermost statements outside of functions and classes."""
    for statement in body:
        inside = [
            inner
            for name in ("body", "orelse", "finalbody")
            for inner in getattr(statement, name, ())
            if not isinstance(statement, _Definition)
        ]
        inside += [
            inner
            for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
            for inner in branch.body
        ]
        if inside:
            yield from _statements(inside)
        else:
            yield statement, *_defined(statement)


def _defined(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement defines, or whose values it changes, and the attributes that it changes."""
    if isinstance(statement, _Definition):
        return {statement.name, *_changed_globals(statement)}, set()
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}, set()
    stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    changed = [_without_index(place) for place in _changed_places(statement)]
    names = {place.id for place in changed if isinstance(place, ast.Name)}
    return stored | names, {place.attr for place in changed if isinstance(place, ast.Attribute)}


def _changed_globals(definition: ast.AST) -> set[str]:
    """Names of a module that the functions of a definition assign, or whose objects they change."""
    found: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            roots = {_root_name(place) for place in _changed_places(node)}
            found |= roots - _locals(node) - {""}
    return found


def _nodes_of(file: _File, value: Any) -> list[ast.AST]:
    """The definitions of a function or class in its file."""
    plain = inspect.unwrap(value)
    if isinstance(plain, type):
        name = plain.__name__
        named = [node for nodes in file.places.values() for node in _first_of(nodes, name)]
        return [node for node in named if isinstance(node, ast.ClassDef)]
    code = getattr(plain, "__code__", None)
    found = file.places.get(code.co_firstlineno, []) if code is not None else []
    return _first_of(found, code.co_name) if code is not None else []


def _first_of(nodes: list[ast.AST], name: str) -> list[ast.AST]:
    return [n for n in nodes if getattr(n, "name", "<lambda>") == name]


def _identifiers(node: ast.AST) -> set[str]:
    """All names, attributes, keywords and names in texts of a piece of code."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.add(inner.attr)
        elif isinstance(inner, ast.alias):
            found.add(inner.name.rpartition(".")[2])
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isidentifier():
            found.add(inner.value)
    return found


def _globals_of(node: ast.AST) -> set[str]:
    """Names in code that stand for globals of its module, as Python sees it; all names if it cannot say."""
    try:
        scopes = [symtable.symtable(ast.unparse(node), "", "exec")]
    except SyntaxError:
        # It is a part of a function, and says so (`nonlocal`).
        return _identifiers(node)
    found: set[str] = set()
    while scopes:
        scope = scopes.pop()
        kind = scope.get_type()
        found |= {
            name.get_name()
            for name in scope.get_symbols()
            # The body of a class looks a name that it assigns up among the globals before.
            if name.is_global() or kind == "module" or (kind == "class" and name.is_referenced())
        }
        scopes += scope.get_children()
    return found


# ---- values that are not compared
# ---------------------------------------------------------------------------------------


def changed_names(text: str) -> set[str]:
    """Names whose values a text's functions change, or in which processes differ; empty if it is no Python."""
    try:
        return _changed(ast.parse(textwrap.dedent(text)))
    except (SyntaxError, ValueError):
        return set()


def _changed(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            building = getattr(node, "name", "") in _BUILDING
            own = _locals(node)
            changes = [name for name, of_self in _changes(node) if not (building and of_self)]
            found |= {name for name in changes if name not in own}
            named = (c.args[1] for c in ast.walk(node) if _is_setattr(c))
            found |= {str(part.value) for part in named if isinstance(part, ast.Constant)}
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found |= set(node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            called = {_last_name(c.func) for c in ast.walk(node.value) if isinstance(c, ast.Call)}
            attributes = {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}
            called |= attributes & _UNSTABLE_ATTRIBUTES
            if called & (_UNSTABLE | _UNSTABLE_ATTRIBUTES):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {name for target in targets for name in _targets(target)}
    return found - {""}


def _is_setattr(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _last_name(node.func) == "setattr" and len(node.args) > 1


def _locals(function: ast.AST) -> set[str]:
    """Names that are a function's own variables."""
    given: Any = function.args  # type: ignore[attr-defined]
    names = {
        a.arg
        for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        if a is not None
    }
    outer: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            outer |= set(node.names)
    return names - outer


def _changes(code: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names of what code changes in place: attribute, collection or owner; and whether it is an attribute of `self`."""
    for inner in map(_without_index, _changed_places(code)):
        if name := _last_name(inner):
            yield (
                name,
                isinstance(inner, ast.Attribute)
                and _root_name(inner.value) == _last_name(inner.value) == "self",
            )


def _changed_places(code: ast.AST) -> Iterator[ast.expr]:
    """What a piece of code assigns to, beside plain names, and the collections that it changes by their methods."""
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and changes_in_place(node.func.attr)
        ):
            yield node.func.value


def _without_index(node: ast.expr) -> ast.expr:
    """`a.b` of `a.b[0][1]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _targets(node: ast.AST) -> Iterator[str]:
    """The last names of what an assignment assigns to."""
    if isinstance(node, ast.Tuple | ast.List):
        for inner in node.elts:
            yield from _targets(inner)
    else:
        while isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        yield _last_name(node)


def changes_in_place(method: str) -> bool:
    """Whether a method changes its object: of a collection, or of a tensor (`add_`)."""
    return method in _CHANGING or (method.endswith("_") and not method.startswith("_"))


def _root_name(node: ast.AST) -> str:
    """`a` of `a.b[0].c`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return _last_name(node)


def _calls(statement: ast.stmt, name: str) -> bool:
    """Whether a statement is a call of a function."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _last_name(statement.value.func) == name
    )


def _last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# ---- modules
# ------------------------------------------------------------------------------------------------------------


def _is_lockstep(name: str) -> bool:
    return name.partition(".")[0] == "lockstep"


_LOCKSTEP = Path(__file__).resolve().parents[2]


def _module_files(name: str, path: Path) -> Iterator[Path]:
    """The files of a module, which `path` imports, and of the packages around it. No code runs."""
    level = len(name) - len(name.lstrip("."))
    parts = [part for part in name.lstrip(".").split(".") if part]
    if level:
        folder = path.parents[level - 1] if level <= len(path.parents) else path.parent
        where = [str(folder)]
        if (own := folder / "__init__.py").is_file():
            yield own
    elif not parts or parts[0] in sys.stdlib_module_names or _is_lockstep(parts[0]):
        return
    else:
        where = [str(path.parent), *sys.path]
        known = getattr(sys.modules.get(".".join(parts)), "__file__", None)
        if known is not None:
            yield Path(known)
    for part in parts:
        try:
            spec = PathFinder.find_spec(part, where)
        except (ImportError, ValueError, AttributeError):
            return
        if spec is None:
            return
        if spec.origin is not None and Path(spec.origin).is_file():
            if is_installed(spec.origin):
                return
            yield Path(spec.origin)
        where = list(spec.submodule_search_locations or ())
