"""Move or merge files, and rewrite every import, path and link that names them.

    scripts/move.py OLD NEW [OLD NEW ...]     each OLD, a file or a folder, goes to NEW
    scripts/move.py --into NEW OLD [OLD ...]  the contents of files of Python go into one file, which may exist
    scripts/move.py --lines FILE              a move per line: NEW = OLD [OLD ...]; several OLD are merged into NEW

Paths begin at the root of the repository. Those of `src/lockstep` may leave these two folders out. `git mv` moves the
files, so that `git diff HEAD -M` shows what has changed. What is rewritten:

- imports, and dotted names in code, strings and settings (`lockstep.weights.push.push_weights`, entry points, import
  contracts);
- paths in docs, docstrings, comments, settings and tables of tests, whatever folder they are relative to, and links
  between pages;
- `Path(__file__).parents[N]` in a file that now stands deeper or less deep.

A merged file has the imports of its parts, then their contents: a part comes after the parts that it imports. Its
docstring has the text of all parts. If two parts give different things one name, nothing is moved; rename one of them
first.

At the end Ruff sorts the imports, and the program prints what only a person can decide: contracts that name a package
that is gone, names that are put together at run time, new packages without a docstring. Then run `make lint`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import libcst as cst

PACKAGE = PurePosixPath("src/lockstep")
# A path in prose is relative to one of these folders, or to that of its own file; the first that fits is meant.
BASES = (
    PurePosixPath("."), PACKAGE, PurePosixPath("tests"), PurePosixPath("docs"),
    PurePosixPath("benchmarks"),
)  # fmt: skip
# The history keeps the names of its time, and the test of this script has a repository of its own.
LEFT_ALONE = {"CHANGELOG.md", "requirements.lock", "test_move.py"}
NAMED = re.compile(
    r"(?P<link>(?<=\]\()[^)#\s:]+)"
    r"|(?<![\w.])(?P<dotted>(?:lockstep|benchmarks)(?:\.\w+)+)"
    r"|(?<![\w/.~$-])(?P<path>(?:\.\.?/)*(?:[\w-]+/)+[\w.-]*)"
)


@dataclass
class Plan:
    """Where everything goes.

    Attributes:
        root: of the repository.
        tree: every file of it before the move.
        files: old path of each file that moves, and its new one.
        merged: new paths that get the contents of several files, with the old paths in the order that was asked for.
        folders: folders from which everything goes to one other folder, and that folder.
        gone: folders from which everything goes, to several others.
    """

    root: Path
    tree: set[PurePosixPath]
    files: dict[PurePosixPath, PurePosixPath] = field(default_factory=dict)
    merged: dict[PurePosixPath, list[PurePosixPath]] = field(default_factory=dict)
    folders: dict[PurePosixPath, PurePosixPath] = field(default_factory=dict)
    gone: list[PurePosixPath] = field(default_factory=list)

    def modules(self) -> dict[str, str]:
        """Old and new name of every module and package that has another name afterwards."""
        named = {module(old): module(new) for old, new in self.files.items() if old.suffix == ".py"}
        named |= {module(old): module(new) for old, new in self.folders.items()}
        return {old: new for old, new in named.items() if old and new and old != new}


def module(path: PurePosixPath) -> str:
    """The name by which a file or a package of `src` or `benchmarks` is imported; the name of the file elsewhere."""
    name = path.with_suffix("") if path.name != "__init__.py" else path.parent
    if name.is_relative_to("src"):
        return ".".join(name.relative_to("src").parts)
    return ".".join(name.parts) if name.parts[0] == "benchmarks" else name.name


def files_of(root: Path) -> set[PurePosixPath]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return {PurePosixPath(line) for line in listed.stdout.splitlines() if (root / line).is_file()}


def planned(root: Path, moves: list[tuple[str, list[str]]]) -> Plan:
    """Plan moves, each given as the new path and its old ones.

    Raises:
        SystemExit: an old path does not exist, a new one does, or a new path is another move's old one.
    """
    plan = Plan(root, files_of(root))

    def placed(text: str, *, exists: bool) -> PurePosixPath:
        path = PurePosixPath(text.rstrip("/"))
        outside = (
            (root / path).exists() if exists else (root / path.parts[0]).is_dir() and len(path.parts) > 1
        )
        return path if outside else PACKAGE / path

    for new_name, old_names in moves:
        new = placed(new_name, exists=(root / new_name).exists())
        olds = [placed(old, exists=True) for old in old_names]
        if len(olds) > 1:
            plan.merged[new] = olds
        for old in olds:
            inside = {path for path in plan.tree if path == old or path.is_relative_to(old)}
            if not inside:
                sys.exit(f"{old} does not exist")
            plan.files |= {path: new / path.relative_to(old) for path in inside if path != new}
    for old, new in plan.files.items():
        if new in plan.tree and new not in plan.merged:
            sys.exit(
                f"{new} exists: give --into to merge {old} into it, or move it first, in a call of its own"
            )
    _note_emptied(plan)
    return plan


def _note_emptied(plan: Plan) -> None:
    """Find folders from which every file goes. Their `__init__.py` goes to the new folder if that has none."""
    for folder in sorted(
        {parent for path in plan.files for parent in path.parents if parent.parts}, reverse=True
    ):
        inside = [path for path in plan.tree if path.is_relative_to(folder)]
        if any(path not in plan.files and path.name != "__init__.py" for path in inside):
            continue
        direct = [path for path in inside if path.parent == folder and path.name != "__init__.py"]
        to = {plan.files[path].parent for path in direct} or {
            plan.folders[path].parent for path in plan.folders if path.parent == folder
        }
        if len(to) != 1:
            plan.gone.append(folder)
            continue
        plan.folders[folder] = new = to.pop()
        first, target = folder / "__init__.py", new / "__init__.py"
        if first in plan.tree and target not in plan.tree and target not in plan.files.values():
            plan.files.setdefault(first, target)


class Rewriter:
    """Rewrites what one file says about the others."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.modules = plan, plan.modules()
        self.known = plan.tree | {parent for path in plan.tree for parent in path.parents}
        dotted = {name: new for name, new in self.modules.items() if "." in name}
        self.packages = {name.rpartition(".")[0] for name in dotted}
        self.plain = {name: new for name, new in self.modules.items() if "." not in name and "." not in new}

    def new_text(self, text: str, page: PurePosixPath) -> str:
        """The text of a file, given with its old path."""
        if page.suffix == ".py":
            if any(f"from {package} import" in text for package in self.packages):
                text = cst.parse_module(text).visit(_FromPackage(self.modules)).code
            if self.plain and not page.is_relative_to("src"):
                text = re.sub(
                    r"^(\s*(?:from|import) )(\w+)(?= )",
                    lambda m: m[1] + self.plain.get(m[2], m[2]),
                    text,
                    flags=re.M,
                )
            deeper = len(self.plan.files.get(page, page).parts) - len(page.parts)
            if deeper:
                text = re.sub(
                    r"(__file__\)(?:\.\w+\(\))*\.parents\[)(\d+)",
                    lambda m: m[1] + str(int(m[2]) + deeper),
                    text,
                )
        return NAMED.sub(lambda found: self._named(found, page), text)

    def _named(self, found: re.Match[str], page: PurePosixPath) -> str:
        if name := found["dotted"]:
            parts = name.split(".")
            for end in range(len(parts), 1, -1):
                if new := self.modules.get(".".join(parts[:end])):
                    return ".".join([new, *parts[end:]])
            return name
        if link := found["link"]:
            return self._link(link, page) if page.suffix == ".md" else link
        return self._path(found[0], page)

    def _link(self, link: str, page: PurePosixPath) -> str:
        target = _joined(page.parent, link)
        if target not in self.known:
            return link
        at = self.plan.files.get(page, page).parent
        new = os.path.relpath(self._moved(target), at) + "/" * link.endswith("/")
        return link if new == os.path.normpath(link) else new

    def _path(self, name: str, page: PurePosixPath) -> str:
        said = name.rstrip("./-")
        for base in (page.parent,) if said.startswith(".") else (*BASES, page.parent):
            target = _joined(base, said)
            if target not in self.known:
                continue
            if (new := self._moved(target)) == target and not (
                said.startswith(".") and page in self.plan.files
            ):
                return name
            if said.startswith("."):
                return os.path.relpath(new, self.plan.files.get(page, page).parent) + name[len(said) :]
            under = [at for at in (base, PACKAGE) if new.is_relative_to(at) and at in BASES]
            return str(new.relative_to(under[0]) if under else new) + name[len(said) :]
        return name

    def _moved(self, path: PurePosixPath) -> PurePosixPath:
        return self.plan.files.get(path, self.plan.folders.get(path, path))


def _joined(base: PurePosixPath, name: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(base / name))


class _FromPackage(cst.CSTTransformer):
    """Rewrites `from package import module` where the module has another name afterwards."""

    def __init__(self, modules: dict[str, str]) -> None:
        self.modules = modules

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        (statement, *others) = updated_node.body
        if others or not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar):
            return updated_node
        package = _dotted(statement.module)
        staying: list[cst.ImportAlias] = []
        going: dict[str, list[str]] = {}
        for alias in statement.names:
            new = self.modules.get(f"{package}.{alias.evaluated_name}")
            if new is None:
                staying.append(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
                continue
            to, _, name = new.rpartition(".")
            bound = alias.evaluated_alias or alias.evaluated_name
            going.setdefault(to, []).append(name if name == bound else f"{name} as {bound}")
        lines = [
            cst.ensure_type(
                cst.parse_statement(f"from {to} import {', '.join(names)}"), cst.SimpleStatementLine
            )
            for to, names in going.items()
        ]
        if not lines:
            return updated_node
        if staying:
            lines.insert(0, updated_node.with_changes(body=[statement.with_changes(names=staying)]))
        else:
            lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel(
            [line.with_changes(trailing_whitespace=updated_node.trailing_whitespace) for line in lines]
        )


def _dotted(node: cst.BaseExpression | None) -> str:
    return cst.Module([]).code_for_node(node) if node is not None else ""


class _WithoutOwn(cst.CSTTransformer):
    """Removes imports of names that now stand in the same file."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.renamed: list[str] = []

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if _dotted(updated_node.module) != self.own or isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        self.renamed += [cst.Module([]).code_for_node(alias) for alias in updated_node.names if alias.asname]
        return cst.RemoveFromParent()

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        return updated_node if updated_node.body.body else cst.RemoveFromParent()


def merged(texts: dict[str, str], new: str, order: list[str]) -> str:
    """One file of several.

    Args:
        texts: the contents of each module, by its old name; their imports are rewritten already.
        new: the name of the module that has all of them.
        order: the old names, in the order in which their contents stand.

    Raises:
        SystemExit: two of them give one name to different things, or one imports from another under a second name.
    """
    blank = cst.Module([])
    docs: list[str] = []
    imports: dict[str, cst.BaseStatement] = {}
    for_types: dict[str, cst.BaseStatement] = {}
    bodies: dict[str, list[cst.BaseStatement]] = {}
    meanings: dict[str, set[str]] = {}
    for name, text in texts.items():
        own = _WithoutOwn(new)
        tree = cst.parse_module(text).visit(own)
        if own.renamed:
            sys.exit(f"{name} imports {own.renamed} from a file that it is merged with: use one name first")
        docs += [tree.get_docstring(clean=False) or ""]
        bodies[name] = []
        for statement in tree.body[1:] if docs[-1] else tree.body:
            code = blank.code_for_node(statement).strip()
            if _imports(statement):
                imports.setdefault(code, statement)
            elif isinstance(statement, cst.If) and _dotted(statement.test) == "TYPE_CHECKING":
                for_types |= {blank.code_for_node(line).strip(): line for line in statement.body.body}  # type: ignore[misc]
            elif not isinstance(statement, cst.SimpleStatementLine) or all(
                code != blank.code_for_node(other).strip() for body in bodies.values() for other in body
            ):
                bodies[name].append(statement)
            for bound, meaning in _bound(statement):
                meanings.setdefault(bound, set()).add(meaning)
    if twice := sorted(name for name, meant in meanings.items() if len(meant) > 1):
        raise SystemExit(f"{new}: several of the files have a {', a '.join(twice)}; rename all but one first")
    future = [line for code, line in imports.items() if code.startswith("from __future__")]
    said = "\n\n".join(doc.strip() for doc in docs if doc)
    said += "\n" if "\n" in said else ""
    head = [cst.parse_statement(f'"""{said}"""\n')] if said else []
    types = [line for code, line in for_types.items() if code not in imports]
    checking = [cst.If(cst.Name("TYPE_CHECKING"), cst.IndentedBlock(types))] if types else []
    rest = [line for line in imports.values() if line not in future]
    body = [line for name in order for line in bodies[name]]
    return cst.Module([*head, *future, *rest, *checking, *body]).code


def _imports(statement: cst.BaseStatement | cst.BaseSmallStatement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], cst.Import | cst.ImportFrom
    )


def _bound(statement: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """The names that a statement of a module binds, each with what it binds it to: equal text is the same thing."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        yield statement.name.value, cst.Module([]).code_for_node(statement)
    for line in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
        if isinstance(line, cst.ImportFrom) and not isinstance(line.names, cst.ImportStar):
            for alias in line.names:
                yield (
                    alias.evaluated_alias or alias.evaluated_name,
                    f"{_dotted(line.module)}.{alias.evaluated_name}",
                )
        elif isinstance(line, cst.Assign | cst.AnnAssign):
            for target in (
                [at.target for at in line.targets] if isinstance(line, cst.Assign) else [line.target]
            ):
                parts = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else [target]
                yield from ((_dotted(part), _dotted(line.value)) for part in parts)


def _after_what_they_import(texts: dict[str, str]) -> list[str]:
    ordered: list[str] = []

    def add(name: str) -> None:
        for other in texts:
            if other not in (name, *ordered) and re.search(
                rf"^from {re.escape(other)} import", texts[name], re.M
            ):
                add(other)
        if name not in ordered:
            ordered.append(name)

    for name in texts:
        add(name)
    return ordered


def carry_out(plan: Plan) -> list[str]:
    """Move the files and rewrite all others.

    Returns:
        What a person must look at, a line each.
    """
    rewriter = Rewriter(plan)
    texts: dict[PurePosixPath, str] = {}
    before: dict[PurePosixPath, str] = {}
    for page in sorted(plan.tree):
        if page.name in LEFT_ALONE or (plan.root / page).is_symlink():
            continue
        try:
            before[page] = (plan.root / page).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if (text := rewriter.new_text(before[page], page)) != before[page]:
            texts[page] = text
    changed = {plan.files.get(page, page): text for page, text in texts.items()}
    for new, olds in plan.merged.items():
        order = _after_what_they_import({module(old): before[old] for old in olds})
        changed[new] = merged({module(old): texts.get(old, before[old]) for old in olds}, module(new), order)
    for old, new in sorted(plan.files.items()):
        (plan.root / new).parent.mkdir(parents=True, exist_ok=True)
        here = new in plan.merged and (plan.root / new).exists()
        _git(plan.root, *(("rm", "-q", "-f", str(old)) if here else ("mv", str(old), str(new))))
    notes = _packages(plan)
    for path, text in changed.items():
        (plan.root / path).write_text(text, encoding="utf-8")
    programs = [str(path) for path in changed if path.suffix == ".py"]
    for words in (["check", "--quiet", "--fix-only", "--select", "I,F401"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *words, *programs], cwd=plan.root, check=bool(programs))
    return notes + _mentions(plan)


def _git(root: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=root, check=True)


def _packages(plan: Plan) -> list[str]:
    """Make the `__init__.py` of new packages, and remove those of packages without a file."""
    notes = []
    for new in sorted({path for path in plan.files.values() if path.parts[0] in ("src", "benchmarks")}):
        for folder in [at for at in new.parents if len(at.parts) > (1 if at.parts[:1] == ("src",) else 0)]:
            if new.suffix == ".py" and not (first := plan.root / folder / "__init__.py").exists():
                first.touch()
                _git(plan.root, "add", str(folder / "__init__.py"))
                notes.append(f"{folder}/__init__.py: is new and empty; say what the package is for")
    for folder in [*plan.folders, *plan.gone]:
        first = plan.root / folder / "__init__.py"
        if first.exists() and {at.name for at in first.parent.iterdir()} <= {"__init__.py", "__pycache__"}:
            notes.append(
                f"{folder}/__init__.py: is removed; it said {first.read_text(encoding='utf-8').strip()!r}"
            )
            _git(plan.root, "rm", "-q", "-f", str(folder / "__init__.py"))
    return notes


def _mentions(plan: Plan) -> list[str]:
    """Lines that still seem to name what has moved, and lines of moved files that look beside them."""
    patterns = []
    for old, new in plan.modules().items():
        # `trainers.grpo` in a table of names that are put together at run time.
        tails = [tail for tail in _tails(old) if not new.endswith(f".{tail}")]
        patterns += [rf"(?<![\w.]){re.escape(tail)}(?![\w(])" for tail in tails]
    patterns += [
        rf"(?<![\w/.-]){re.escape(old.name)}\b" for old, new in plan.files.items() if old.name != new.name
    ]
    patterns += [
        rf"\b{re.escape(module(folder))}\b|(?<![\w/]){re.escape(str(folder))}/" for folder in plan.gone
    ]
    said = re.compile("|".join(patterns) or r"(?!)")
    arrived = set(plan.files.values())
    notes = []
    for page in sorted(files_of(plan.root)):
        if page.name in LEFT_ALONE or (plan.root / page).is_symlink():
            continue
        try:
            lines = (plan.root / page).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            beside = page in arrived and re.search(r"__file__\)?\.(parent\b|with_name)", line)
            if beside or said.search(line):
                notes.append(f"{page}:{number}: {line.strip()[:120]}")
    return notes


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(1, len(parts) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="OLD NEW")
    parser.add_argument("--into", metavar="NEW")
    parser.add_argument("--lines", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    root = Path(
        subprocess.run(
            ["git", "rev-parse", "--show-toplevel"],
            check=True,
            capture_output=True,
            text=True,
            encoding="utf-8",
        ).stdout.strip()
    )
    paths, moves = arguments.paths, []
    if arguments.into:
        into = arguments.into
        there = (root / into).exists() or (root / PACKAGE / into).exists()
        # A file that exists is the first of those that are merged.
        moves = [(into, [*([into] if there else []), *paths])]
    elif arguments.lines:
        for line in arguments.lines.read_text(encoding="utf-8").splitlines():
            new, equal, olds = line.partition(" = ")
            moves += [(new, olds.split())] if equal and not line.startswith("#") else []
    elif len(paths) % 2:
        parser.error("give each OLD with its NEW")
    else:
        moves = [(new, [old]) for old, new in zip(paths[::2], paths[1::2], strict=True)]
    if not moves:
        parser.error("give what moves")
    notes = carry_out(planned(root, moves))
    for note in notes:
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
