"""Counts the house: how far a reader walks in the source, what is tangled, and how much there is.

    .venv/bin/python scripts/house.py                  # this tree
    .venv/bin/python scripts/house.py --tree ../other  # another checkout
    .venv/bin/python scripts/house.py --files          # also the names behind the figures

Nothing is run or imported: the source is only parsed. Each row's rule stands in the docstring of its function, so that
the count can be repeated by hand. A room is a folder (or a file) directly in `src/lockstep`. Names are found in the
tree, wherever they stand, so that a tree with other folders can be counted too. A figure is a thermometer, not a goal:
if it and a reader disagree, the reader is right.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ways import FUNCTIONS, PARAMETER, PROMPT, SELF_PROVEN_PARAMETER, House, Way, way


def the_loop(house: House) -> tuple[str, list[str]]:
    """Lines of the file that defines `TrainingLoop`, and the proofs that it imports, at any depth.

    A file is a proof if it is in a room of proofs (parity, watch, definitions), or if it makes a ProofError itself.
    The file that defines the protocol `Watch` is the contract of the events, and no proof.
    """
    ((module, *_),) = house.places["TrainingLoop"]
    targets = {house.target(base, name) for base, name, *_ in module.imports} - {None}
    return f"{len(module.text.splitlines())} ({house.file(module)})", sorted(
        house.file(t) for t in targets if t and t.is_proof
    )


def rooms_that_import(house: House, library: str) -> dict[str, int]:
    """Rooms with a file that imports a library, at any depth, also for type checkers only.

    Names of entry points do not count.
    """
    return dict(
        Counter(
            m.room for m in house.modules.values() if any(b.split(".")[0] == library for b, *_ in m.imports)
        )
    )


BY_TEXT = ("setattr", "getattr", "hasattr", "delattr", "object")


def private_touches(house: House) -> list[tuple[str, int, str]]:
    """Places in tests/ that touch a private name of Lockstep: file, line, name.

    A touch is `x._name` where x is not `self` or `cls`; an import of `_name` from Lockstep; or the text "_name" as an
    argument of a call of `setattr`, `getattr`, `hasattr`, `delattr` or `patch.object`. Names with two underscores do
    not count, nor does a name that the source never defines (then it is another library's, or the test's own), nor
    one on a module of another library.
    """
    own = set()
    for module in house.modules.values():
        for n in ast.walk(module.tree):
            if isinstance(n, (*FUNCTIONS, ast.ClassDef)):
                own.add(n.name)
            elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
                own.add(n.attr)
            elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                own.add(n.id)
    own = {name for name in own if name.startswith("_") and not name.startswith("__") and name != "_"}
    out = []
    for path in sorted((house.root / "tests").rglob("*.py")):
        tree, others = ast.parse(path.read_text(encoding="utf-8")), set()
        for n in ast.walk(tree):
            if isinstance(n, ast.Import):
                others |= {
                    (a.asname or a.name).split(".")[0] for a in n.names if not a.name.startswith("lockstep")
                }
            elif (
                isinstance(n, ast.ImportFrom)
                and n.module
                and not n.level
                and n.module.split(".")[0] != "lockstep"
            ):
                others |= {
                    a.asname or a.name for a in n.names if not (path.parent / f"{n.module}.py").exists()
                }
        for n in ast.walk(tree):
            found: list[str] = []
            line = getattr(n, "lineno", 0)
            if isinstance(n, ast.Attribute):
                root = n.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                foreign = isinstance(root, ast.Name) and root.id in others
                found = [] if ast.unparse(n.value) in ("self", "cls") or foreign else [n.attr]
            elif isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "lockstep":
                found = [a.name for a in n.names]
            elif isinstance(n, ast.Call) and ast.unparse(n.func).split(".")[-1] in BY_TEXT:
                on_other = bool(n.args) and ast.unparse(n.args[0]).split(".")[0] in others
                texts = [a.value for a in n.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found = [] if on_other else [t.split(".")[-1] for t in texts]
            out += [(str(path.relative_to(house.root)), line, name) for name in found if name in own]
    return out


def circles(house: House, *, inside: bool, kind: int) -> list[list[str]]:
    """Circles of imports: groups of two or more rooms (or, inside a room, files) each of which reaches all others.

    Of kind 0 count the imports at the top of a file, of kind 1 also those inside functions, of kind 2 also those for
    type checkers only. A file directly in the package is a room. What a package's `__init__.py` imports is an import
    of that file.
    """
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in house.modules.values():
        for base, name, is_local, typing in module.imports:
            other = house.target(base, name)
            if other is None or other is module or (is_local and kind < 1) or (typing and kind < 2):
                continue
            if inside and other.room == module.room:
                arrows[house.file(module)].add(house.file(other))
            elif not inside and other.room != module.room:
                arrows[module.room].add(other.room)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(arrows[start])
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += arrows.get(one, ())
        return seen

    reached = {one: reach(one) for one in list(arrows)}
    groups = {
        frozenset(two for two in reached[one] if one in reached.get(two, ()))
        for one in reached
        if one in reached[one]
    }
    return sorted(sorted(group) for group in groups)


def mutations_with_paths(house: House) -> tuple[int, int]:
    """Cases of the mutation list that name a path of a source file, also by a constant or function; and all cases.

    Each such case needs an edit when its file moves. A path is a text like `rollouts/driver.py` that is not below
    tests/.
    """
    path = house.root / "scripts" / "mutation_cases.py"
    if not path.exists():
        return 0, 0
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top: dict[str, ast.AST] = {n.name: n for n in tree.body if isinstance(n, FUNCTIONS)}
    lists: list[ast.expr] = []
    for n in tree.body:
        if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None:
            target = n.targets[0] if isinstance(n, ast.Assign) else n.target
            several = isinstance(target, ast.Tuple) and isinstance(n.value, ast.Tuple)
            pairs = zip(target.elts, n.value.elts, strict=False) if several else [(target, n.value)]  # type: ignore[attr-defined]
            top |= {ast.unparse(name): value for name, value in pairs}
            if isinstance(n.value, ast.List | ast.Tuple) and any(
                isinstance(e, ast.Call) for e in n.value.elts
            ):
                lists += n.value.elts

    def names_path(node: ast.AST, depth: int = 0) -> bool:
        for n in ast.walk(node):
            if (
                isinstance(n, ast.Constant)
                and isinstance(n.value, str)
                and re.fullmatch(r"(?!tests/)[\w/]+\.py", n.value)
            ):
                return True
            if isinstance(n, ast.Name) and n.id in top and depth < 4 and names_path(top[n.id], depth + 1):
                return True
        return False

    return sum(names_path(case) for case in lists), len(lists)


def lines(house: House) -> dict[str, Any]:
    """Files without `__init__.py`; lines of all files, and of the core (without cli and extras); imports in the code.

    A line of code has a token that is not a comment and not a docstring. A line of an import statement is one of them.
    """
    code = imported = 0
    for module in house.modules.values():
        skip: set[int] = set()
        for n in ast.walk(module.tree):
            if (
                isinstance(n, (*FUNCTIONS, ast.ClassDef, ast.Module))
                and ast.get_docstring(n, clean=False) is not None
            ):
                skip |= set(range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1))
            elif isinstance(n, ast.Import | ast.ImportFrom):
                imported += (n.end_lineno or n.lineno) - n.lineno + 1
        held: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type not in (
                tokenize.COMMENT,
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENDMARKER,
            ):
                held |= set(range(token.start[0], token.end[0] + 1))
        code += len(held - skip)
    count = {m.name: len(m.text.splitlines()) for m in house.modules.values()}
    core = sum(n for name, n in count.items() if house.modules[name].room not in ("cli", "extras"))
    files = sum(m.path.name != "__init__.py" for m in house.modules.values())
    return {"files": files, "core": core, "all": sum(count.values()), "code": code, "imports": imported}


def annotated(node: ast.ClassDef) -> set[str]:
    """The annotated names in the body of a class."""
    return {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}


def field_places(house: House) -> dict[str, list[str]]:
    """For each field of `GRPOConfig` that Lockstep declares: the files of the source in which it is declared or listed.

    Declared: an annotated name in a class of that name's family, or of `definitions/`. Listed: its name as a text in
    a table at the top of a file (a list, tuple, set or mapping). Files that only use the field do not count. A file
    that a script writes from the declarations (`fields.json`) is none of these. Some tables that count are about
    something else of the same name: requests of vLLM and OpenAI, figures, the settings of injected faults; and
    `definitions/` is a second opinion.
    """
    family: list[ast.ClassDef] = []
    todo = [(module, node) for module, node, _ in house.places["GRPOConfig"]]
    while todo:
        module, node = todo.pop()
        if isinstance(node, ast.ClassDef) and node not in family:
            family.append(node)
            bases = (house.found(module.name, ast.unparse(base).split("[")[0]) for base in node.bases)
            todo += [base for base in bases if base]
    own = {name for node in family for name in annotated(node)}
    own = {name for name in own if not name.startswith("_")}
    where: dict[str, set[str]] = {name: set() for name in own}
    for module in house.modules.values():
        told: set[str] = set()
        for n in module.tree.body:
            if isinstance(n, ast.ClassDef) and (n in family or "definitions" in module.name.split(".")):
                told |= annotated(n)
            elif isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None:
                told |= {str(c.value) for c in ast.walk(n.value) if isinstance(c, ast.Constant)}
                told |= {
                    k.arg for c in ast.walk(n.value) if isinstance(c, ast.Call) for k in c.keywords if k.arg
                }
        for name in told & own:
            where[name].add(house.file(module))
    return {name: sorted(files) for name, files in where.items()}


def rooms_reached(house: House) -> set[str]:
    """Folders with a file of the prompt's way from `micro_step` on, or with a file that this way calls."""
    steps = PROMPT.split()
    found = way(house, " ".join(steps[steps.index("TrainingLoop.micro_step") :]))
    return {str(Path(file).parent) for file in (*found.files, *found.proofs, *found.calls)}


def words(house: House) -> int:
    """Words of all pages below docs/."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in (house.root / "docs").rglob("*.md"))


# ---- the table ---------------------------------------------------------------------------------------------------


def rows(house: House, prompt: Way, parameter: Way) -> list[tuple[str, str, str, Iterable[str]]]:
    """Each row: what is counted, this tree's figure, what is asked after issue 45 and 46, the names behind it."""
    loop, proofs = the_loop(house)
    vllm, touches, size, fields = (
        rooms_that_import(house, "vllm"),
        private_touches(house),
        lines(house),
        field_places(house),
    )
    edits, cases = mutations_with_paths(house)
    rounds = {(i, k): circles(house, inside=i, kind=k) for i in (False, True) for k in range(3)}
    counts = sorted(len(v) for v in fields.values()) or [0]

    def walked(found: Way) -> str:
        behind = f"; {len(found.behind)} more behind the watch" if found.behind else ""
        told = f"{found.opened} ({len(found.files)}, and {len(found.proofs)} proofs{behind})"
        return f"NOT TRUE, at least {told}" if found.faults else told

    def behind(found: Way) -> list[str]:
        proofs = [f"{file} (a proof: {why})" for file, why in found.proofs.items()]
        return [*found.files, *proofs, *(f"({file}: behind the watch)" for file in found.behind)]

    def circle(inside: bool) -> str:
        first, second, third = (len(rounds[inside, k]) for k in range(3))
        return f"{first}; {second} with imports in functions; {third} with those for type checkers"

    def around(inside: bool) -> Iterable[str]:
        return (" - ".join(one) for one in rounds[inside, 2])

    touched = [f"{file}:{line} {name}" for file, line, name in touches]
    share = f"{100 * size['imports'] / max(size['code'], 1):.1f} % of {size['code']} lines"
    mean = sum(counts) / len(counts)
    declared = (
        f"{counts[0]} to {counts[-1]}, mean {mean:.1f}; {counts.count(1)} of {len(counts)} in one place"
    )
    listed = [f"{name}: {' '.join(files)}" for name, files in sorted(fields.items())]
    reached = sorted(rooms_reached(house))
    return [
        ("lines of the loop's file", loop, "<= 250 | ", ()),
        ("proofs that the loop imports", str(len(proofs)), "0 | ", proofs),
        ("prompt -> loss: files opened by hand", walked(prompt), "<= 36 | <= 24", behind(prompt)),
        ("parameter -> engine: files opened by hand", walked(parameter), "<= 12 | ", behind(parameter)),
        ("rooms that import vllm", str(len(vllm)), "1 | ", [f"{r}: {n} files" for r, n in vllm.items()]),
        ("private names touched in tests", str(len(touches)), "<= 80 | ", touched),
        ("circles between rooms", circle(False), "0 | 0", around(False)),
        ("circles inside rooms", circle(True), " | <= 2", around(True)),
        ("cases of the mutation list with a path", f"{edits} of {cases}", "0 | ", ()),
        ("files without __init__", str(size["files"]), " | <= 220", ()),
        ("lines of the source, core / all", f"{size['core']} / {size['all']}", " | 28 % / 9 % less", ()),
        ("imports, share of the code", share, " | <= 9 %", ()),
        ("folders that `micro_step` reaches", str(len(reached)), " | <= 20", reached),
        ("places where a field is declared or listed", declared, " | 1", listed),
        ("words of docs", str(words(house)), " | <= 60000", ()),
    ]  # fmt: skip


def main() -> int:
    """Print the table. Returns 1 if a way is broken, so that its count is not true."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--tree", type=Path, default=here, help="the checkout to count")
    parser.add_argument("--files", action="store_true", help="print the names behind each figure")
    asked = parser.parse_args()
    house = House(asked.tree.resolve())
    print("| | this tree | asked, first half | asked, second half |\n|---|---|---|---|")
    parameter = PARAMETER if "RolloutSource.send" in house.places else SELF_PROVEN_PARAMETER
    found_ways = way(house, PROMPT), way(house, parameter)
    table = rows(house, *found_ways)
    for what, figure, wanted, _ in table:
        print(f"| {what} | {figure} | {' | '.join(w.strip() or '-' for w in wanted.split('|'))} |")
    for what, _, _, names in table if asked.files else ():
        print(f"\n{what}:", *names, sep="\n  ")
    faults = [fault for found in found_ways for fault in found.faults]
    for fault in faults:
        print(f"THE COUNT IS NOT TRUE: {fault}. Mend the route in scripts/ways.py.", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
