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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# Rooms in which every file is a proof.
PROOF_ROOMS = {"parity", "watch", "definitions"}

# What a text prompt of a GRPO run in one process passes through, in order, with vLLM as the engine. `a|b`: a is now called b.
PROMPT = """
    GRPOTrainer OnlineTrainer.__init__ read_data read_prompts load_prompts render_prompt Template.ids whole_numbers Prompt
    make_loader OnlineTrainer.training_step TrainingLoop.micro_step RolloutSource.sample sampling_of Sampling sampled_now Driver.run Start
    check_requests GenerationRequest CallLoop.start single_turn Conversation.sample Branch.sample Inbox.ask Running.finish
    VLLMInProcess.serve Inbox.taken sampling_params completion Completion Inbox.answer Rollout RolloutGroup
    RolloutSource.score Scoring.score reward_scorer RewardScorer.score RewardScorer.finish call_functions call_within
    Preparation.generation TrainingSequence prepare_generation joined_branches GRPOObjective.with_advantages group_advantages
    OptimizerStep.learn learn Policy.packs pack_sequences SortedPaths cut_tree Pack Policy.score score_pack token_logps
    TokenBatch.of GRPOObjective.loss clipped_policy_loss Tally.mean
"""
# What a parameter passes through on its way to vLLM in this process.
PARAMETER = """
    TrainingLoop.rollout RolloutSource.push Proofs.sync ProvenPusher.push push_weights weights_of PlainSource checkpoint_tensors
    causal_model Update one_push TensorSpec VLLMInProcess.begin_update VLLMInProcess.load OwnWorker.load register
    _LayerwiseTransfer.start_weight_update begin_reload InProcessWeightTransfer.receive_weights HeldWeights.add LoadedWeights
    check_live ModuleProbe.measure probe_limit VLLMInProcess.probe probe_modules probe_inputs
"""
# Where a way begins: what the user calls, what transformers calls, and what vLLM calls.
STARTS = {"GRPOTrainer", "OnlineTrainer.training_step", "TrainingLoop.rollout", "register"}
STARTS |= {"_LayerwiseTransfer.start_weight_update", "InProcessWeightTransfer.receive_weights"}

# The constructor does many things. Only calls that get the data are on the way.
FOLLOWED = {"OnlineTrainer.__init__": "train_dataset"}

Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(eq=False)
class Module:
    """A file of the source. `imports` has (module, name or "", is inside a function, is for type checkers only)."""

    name: str
    path: Path
    text: str
    room: str
    tree: ast.Module = field(init=False)
    top: dict[str, Def] = field(init=False)
    imports: list[tuple[str, str, bool, bool]] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.top = {n.name: n for n in self.tree.body if isinstance(n, Def)}
        self._read(self.tree, False, False)

    def _read(self, node: ast.AST, local: bool, typing: bool) -> None:
        for sub in ast.iter_child_nodes(node):
            if isinstance(sub, ast.ImportFrom):
                base = sub.module or ""
                if sub.level:
                    package = self.name.split(".")[: None if self.path.name == "__init__.py" else -1]
                    base = ".".join([*package[: len(package) - sub.level + 1], *([base] if base else [])])
                for a in sub.names:
                    self.imports.append((base, a.name, local, typing))
                    self.names[a.asname or a.name] = (base, a.name)
            elif isinstance(sub, ast.Import):
                for a in sub.names:
                    self.imports.append((a.name, "", local, typing))
                    self.names[a.asname or a.name.split(".")[0]] = (a.name if a.asname else a.name.split(".")[0], "")
            else:
                checks = isinstance(sub, ast.If) and "TYPE_CHECKING" in ast.unparse(sub.test)
                self._read(sub, local or isinstance(sub, FUNCTIONS), typing or checks)

    @cached_property
    def raises_proofs(self) -> bool:
        """Whether the file makes a ProofError itself."""
        return any(isinstance(n, ast.Call) and ast.unparse(n.func).endswith("ProofError") for n in ast.walk(self.tree))

    @property
    def in_proof_room(self) -> bool:
        """Whether the file is in a room of proofs. The contract of the events is no proof."""
        events = any(isinstance(d, ast.ClassDef) and d.name == "Watch" and _is_protocol(d) for d in self.top.values())
        return not events and not PROOF_ROOMS.isdisjoint(self.name.split("."))

    @property
    def is_proof(self) -> bool:
        """Whether the file is in a room of proofs, or makes a ProofError itself."""
        return self.in_proof_room or self.raises_proofs


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


class House:
    """The source of a tree: `package` is its top module's folder."""

    def __init__(self, tree: Path) -> None:
        self.root, self.package = tree, tree / "src" / "lockstep"
        self.modules: dict[str, Module] = {}
        for path in sorted(self.package.rglob("*.py")):
            parts = path.relative_to(self.package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path, path.read_text(), parts[1])
        self.places: dict[str, list[tuple[Module, Def, ast.ClassDef | None]]] = defaultdict(list)
        for module in self.modules.values():
            for node in module.top.values():
                self.places[node.name].append((module, node, None))
                if isinstance(node, ast.ClassDef):
                    for sub in (sub for sub in node.body if isinstance(sub, FUNCTIONS)):
                        self.places[f"{node.name}.{sub.name}"].append((module, sub, node))

    def found(self, module: str, name: str, depth: int = 0) -> tuple[Module, Def] | None:
        """The function or class that a name means in a module."""
        here = self.modules.get(module)
        if here is None or depth > 5:
            return None
        if name in here.top:
            return here, here.top[name]
        return self.found(*here.names[name], depth + 1) if name in here.names else None

    def target(self, base: str, name: str) -> Module | None:
        """The file that an import reads."""
        return self.modules.get(f"{base}.{name}") or self.modules.get(base)

    def file(self, module: Module) -> str:
        return str(module.path.relative_to(self.package))

    def is_error(self, module: Module, node: Def, depth: int = 0) -> bool:
        """Whether a class is an exception: a reader who follows a value does not open it."""
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            name = ast.unparse(base)
            up = self.found(module.name, name)
            if name.endswith(("Error", "Exception")) or (up and depth < 5 and self.is_error(*up, depth + 1)):
                return True
        return False


# ---- the two ways ---------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """What a reader opens. `calls` has each further file, with who calls it; `proofs` those of them that prove."""

    files: list[str]
    proofs: list[str]
    calls: dict[str, str]
    faults: list[str]


def _family(module: Module, node: ast.ClassDef | None) -> list[ast.ClassDef]:
    """A class and its bases in the same file."""
    if node is None:
        return []
    bases = [module.top.get(ast.unparse(base)) for base in node.bases]
    return [node, *(c for base in bases if isinstance(base, ast.ClassDef) for c in _family(module, base))]


def _in_file(module: Module, node: Def, owner: ast.ClassDef | None) -> list[tuple[Any, ast.ClassDef | None]]:
    """A function with all functions and methods of its file that it names, and that these name. Of a class its constructor."""
    todo: list[tuple[Any, ast.ClassDef | None]] = [(node, owner)]
    seen: list[tuple[Any, ast.ClassDef | None]] = []
    while todo:
        one, its = todo.pop(0)
        if any(one is s for s, _ in seen):
            continue
        seen.append((one, its))
        if isinstance(one, ast.ClassDef):
            todo += [(m, one) for m in one.body if isinstance(m, FUNCTIONS) and m.name in ("__init__", "__post_init__")]
            continue
        todo += [(module.top[n.id], None) for n in ast.walk(one) if isinstance(n, ast.Name) and n.id in module.top]
        made = [c for c, _ in (*seen, *todo) if isinstance(c, ast.ClassDef)]
        for n in (n for n in ast.walk(one) if isinstance(n, ast.Attribute)):
            classes = _family(module, its) if ast.unparse(n.value) in ("self", "cls") else made
            todo += [(m, c) for c in classes for m in c.body if isinstance(m, FUNCTIONS) and m.name == n.attr]
    return [(one, its) for one, its in seen if not isinstance(one, ast.ClassDef)]


def _types(house: House, module: Module, annotation: ast.AST | None) -> list[tuple[Module, ast.ClassDef]]:
    """The classes of the source that an annotation names, without what stands in brackets."""
    while isinstance(annotation, ast.BinOp):
        return _types(house, module, annotation.left) + _types(house, module, annotation.right)
    if isinstance(annotation, ast.Name) and (hit := house.found(module.name, annotation.id)):
        return [(hit[0], hit[1])] if isinstance(hit[1], ast.ClassDef) else []
    return []


def _attributes(house: House, module: Module, owner: ast.ClassDef) -> dict[str, list[tuple[Module, ast.ClassDef]]]:
    """The classes of `self.x`: from annotations, from constructor calls, and from annotated arguments that are kept."""
    out: dict[str, list[tuple[Module, ast.ClassDef]]] = defaultdict(list)
    for method in (m for m in owner.body if isinstance(m, FUNCTIONS)):
        given = {a.arg: a.annotation for a in [*method.args.args, *method.args.kwonlyargs]}
        for n in ast.walk(method):
            pairs: list[tuple[ast.expr, ast.expr | None, ast.expr | None]] = []
            if isinstance(n, ast.AnnAssign):
                pairs = [(n.target, n.value, n.annotation)]
            elif isinstance(n, ast.Assign):
                t = n.targets[-1]
                if isinstance(t, ast.Tuple) and isinstance(n.value, ast.Tuple):
                    pairs += [(a, b, None) for a, b in zip(t.elts, n.value.elts, strict=False)]
                else:
                    pairs.append((t, n.value, None))
            for target, value, annotation in pairs:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    if annotation is None and isinstance(value, ast.Call):
                        annotation = value.func
                    elif annotation is None and isinstance(value, ast.Name):
                        annotation = given.get(value.id)
                    out[target.attr] += _types(house, module, annotation)
    return out


def _called(
    house: House, module: Module, function: Any, owner: ast.ClassDef | None, value: str
) -> Iterator[tuple[Module, Def, ast.ClassDef | None]]:
    """What a function calls in other files: by name, or a method of an argument or of `self.x` whose class is known."""
    given = {a.arg: a.annotation for a in [*function.args.args, *function.args.kwonlyargs]}
    attributes = _attributes(house, module, owner) if owner else {}
    wanted = _with_value(function, value) if value else None
    for call in (n for n in ast.walk(function) if isinstance(n, ast.Call) and (wanted is None or n in wanted)):
        what = call.func
        if isinstance(what, ast.Name) and what.id in module.names and (hit := house.found(*module.names[what.id])):
            yield *hit, None
        elif isinstance(what, ast.Attribute):
            on, classes = what.value, []
            if isinstance(on, ast.Name) and on.id in module.names:
                base, name = module.names[on.id]
                file = house.modules.get(f"{base}.{name}" if name else base)
                if file and what.attr in file.top:
                    yield file, file.top[what.attr], None
                elif (hit := house.found(base, name)) and isinstance(hit[1], ast.ClassDef):
                    classes = [(hit[0], hit[1])]
            elif isinstance(on, ast.Name) and on.id in given:
                classes = _types(house, module, given[on.id])
            elif isinstance(on, ast.Attribute) and ast.unparse(on.value) == "self":
                classes = attributes.get(on.attr, [])
            for file, node in classes:
                yield from ((file, m, node) for m in node.body if isinstance(m, FUNCTIONS) and m.name == what.attr)


def _proves(house: House, module: Module, node: Def, owner: ast.ClassDef | None) -> bool:
    """Whether a call proves: what is called (of a class a method) names a file of a room of proofs, or is a check.

    A check gives nothing back, and can raise ProofError in its own file.
    """
    methods = (
        [(m, node) for m in node.body if isinstance(m, FUNCTIONS)]
        if isinstance(node, ast.ClassDef)
        else [(node, owner)]
    )
    for method, its in methods:
        names = {n.id for f, _ in _in_file(module, method, its) for n in ast.walk(f) if isinstance(n, ast.Name)}
        files = [house.target(*module.names[name]) for name in names if name in module.names]
        if any(file is not None and file.in_proof_room for file in (module, *files)):
            return True
        if "ProofError" in names and method.returns is not None and ast.unparse(method.returns) == "None":
            return True
    return False


def _with_value(function: Any, value: str) -> set[ast.AST]:
    """The calls in a function that get an argument of it, or what was made of it."""
    held, before = {value}, 0
    while before != len(held):
        before = len(held)
        for n in ast.walk(function):
            gets = {x.id for x in ast.walk(n) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)} & held
            if gets and isinstance(n, ast.Assign | ast.NamedExpr | ast.For | ast.comprehension):
                targets = n.targets if isinstance(n, ast.Assign) else [n.target]
                held |= {
                    x.id
                    for t in targets
                    for x in ast.walk(t)
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
                }
            if gets and isinstance(n, ast.Call) and ast.unparse(n.func).endswith(".append"):
                held.add(ast.unparse(n.func).removesuffix(".append"))
    given = lambda c: [*c.args, *(k.value for k in c.keywords)]  # noqa: E731
    return {
        n for n in ast.walk(function) if isinstance(n, ast.Call)
        and held & {x.id for a in given(n) for x in ast.walk(a) if isinstance(x, ast.Name)}
    }  # fmt: skip


def way(house: House, route: str) -> Way:
    """The files that a reader opens who follows a value by hand.

    The route names, in order, each function and class of Lockstep that a text prompt (or a parameter) passes through.
    1. `files`: where these stand. This is the way without its proofs.
    2. `proofs`: the other files that the way itself calls, and that prove. A function of the way calls a file if it, or what it
       names in its own file, calls a function or class of it by name, or a method of an argument or of `self.x` whose class is
       known from an annotation or from a constructor call. A call proves if what is called can raise ProofError, or names a file of
       proofs. Proofs behind an object that the way only tells of an event are not opened by a reader who follows the prompt.
    3. `calls`: every file that the way calls, whether it proves or not; without exceptions. It is printed beside the count, because
       what leaves the way without a trace should be seen.

    The count is not trusted if a name of the route stands nowhere or in several files (merge both names as `old|new`), or if no
    function of the way names it: then something new stands in between, and is missing in the route.
    """
    files: list[str] = []
    calls: dict[str, str] = {}
    proofs: dict[str, str] = {}
    faults: list[str] = []
    named: set[str] = set()
    stations: list[tuple[str, Module, Def, ast.ClassDef | None]] = []
    for step in route.split():
        hits = [hit for name in step.split("|") for hit in house.places.get(name, ())]
        if len(hits) != 1:
            faults.append(f"{step}: stands in {len(hits)} places {[house.file(m) for m, *_ in hits]}")
        stations += [(step, *hit) for hit in hits]
    for step, module, node, owner in stations:
        if house.file(module) not in files:
            files.append(house.file(module))
        for function, its in _in_file(module, node, owner):
            named |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            named |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
            named |= {n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            for other, what, of in _called(house, module, function, its, FOLLOWED.get(step, "")):
                if other is module or house.is_error(other, what):
                    continue
                calls.setdefault(house.file(other), f"{step} -> {what.name}")
                if _proves(house, other, what, of):
                    proofs.setdefault(house.file(other), f"{step} -> {what.name}")
    for step, *_ in stations:
        faults += (
            []
            if step in STARTS or {n.split(".")[-1] for n in step.split("|")} & named
            else [f"{step}: nothing leads to it"]
        )
    return Way(files, [p for p in proofs if p not in files], {c: w for c, w in calls.items() if c not in files}, faults)


# ---- the other rows -------------------------------------------------------------------------------------------------


def the_loop(house: House) -> tuple[str, list[str]]:
    """Lines of the file that defines `TrainingLoop`, and the proofs that it imports, at any depth.

    A file is a proof if it is in a room of proofs (parity, watch, definitions), or if it makes a ProofError itself. The file that
    defines the protocol `Watch` is the contract of the events, and no proof.
    """
    ((module, *_),) = house.places["TrainingLoop"]
    targets = {house.target(base, name) for base, name, *_ in module.imports} - {None}
    return f"{len(module.text.splitlines())} ({house.file(module)})", sorted(
        house.file(t) for t in targets if t and t.is_proof
    )


def rooms_that_import(house: House, library: str) -> dict[str, int]:
    """Rooms with a file that imports a library, at any depth, also for type checkers only. Names of entry points do not count."""
    return dict(
        Counter(m.room for m in house.modules.values() if any(b.split(".")[0] == library for b, *_ in m.imports))
    )


BY_TEXT = ("setattr", "getattr", "hasattr", "delattr", "object")


def private_touches(house: House) -> list[tuple[str, int, str]]:
    """Places in tests/ that touch a private name of Lockstep: file, line, name.

    A touch is `x._name` where x is not `self` or `cls`; an import of `_name` from Lockstep; or the text "_name" as an argument of a
    call of `setattr`, `getattr`, `hasattr`, `delattr` or `patch.object`. Names with two underscores do not count, nor does a name
    that the source never defines (then it is another library's, or the test's own), nor one on a module of another library.
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
        tree, others = ast.parse(path.read_text()), set()
        for n in ast.walk(tree):
            if isinstance(n, ast.Import):
                others |= {(a.asname or a.name).split(".")[0] for a in n.names if not a.name.startswith("lockstep")}
            elif isinstance(n, ast.ImportFrom) and n.module and not n.level and n.module.split(".")[0] != "lockstep":
                others |= {a.asname or a.name for a in n.names if not (path.parent / f"{n.module}.py").exists()}
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

    Of kind 0 count the imports at the top of a file, of kind 1 also those inside functions, of kind 2 also those for type checkers
    only. A file directly in the package is a room. What a package's `__init__.py` imports is an import of that file.
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
        frozenset(two for two in reached[one] if one in reached.get(two, ())) for one in reached if one in reached[one]
    }
    return sorted(sorted(group) for group in groups)


def mutations_with_paths(house: House) -> tuple[int, int]:
    """Cases of the mutation list whose text, or a constant or function that they name, has a path of a source file; and all cases.

    Each such case needs an edit when its file moves. A path is a text like `rollouts/driver.py` that is not below tests/.
    """
    path = house.root / "scripts" / "mutation_cases.py"
    if not path.exists():
        return 0, 0
    tree = ast.parse(path.read_text())
    top: dict[str, ast.AST] = {n.name: n for n in tree.body if isinstance(n, FUNCTIONS)}
    lists: list[ast.expr] = []
    for n in tree.body:
        if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None:
            target = n.targets[0] if isinstance(n, ast.Assign) else n.target
            top[ast.unparse(target)] = n.value
            if isinstance(n.value, ast.List | ast.Tuple) and any(isinstance(e, ast.Call) for e in n.value.elts):
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
    """Files without `__init__.py`; lines of all files, and of the core (without the rooms cli and extras); imports in the code.

    A line of code has a token that is not a comment and not a docstring. A line of an import statement is one of them.
    """
    code = imported = 0
    for module in house.modules.values():
        skip: set[int] = set()
        for n in ast.walk(module.tree):
            if isinstance(n, (*FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(n, clean=False) is not None:
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

    Declared: an annotated name in a class of that name's family, or of `definitions/`. Listed: its name as a text in a table at the
    top of a file (a list, tuple, set or mapping), or as a key in a JSON file. Files that only use the field do not count.
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
                told |= {k.arg for c in ast.walk(n.value) if isinstance(c, ast.Call) for k in c.keywords if k.arg}
        for name in told & own:
            where[name].add(house.file(module))
    for path in house.package.rglob("*.json"):
        for name in own & set(re.findall(r'"(\w+)"', path.read_text())):
            where[name].add(str(path.relative_to(house.package)))
    return {name: sorted(files) for name, files in where.items()}


def rooms_reached(house: House) -> set[str]:
    """Folders with a file of the prompt's way from `micro_step` on, or with a file that this way calls."""
    steps = PROMPT.split()
    found = way(house, " ".join(steps[steps.index("TrainingLoop.micro_step") :]))
    return {str(Path(file).parent) for file in (*found.files, *found.proofs, *found.calls)}


def words(house: House) -> int:
    """Words of all pages below docs/."""
    return sum(len(path.read_text().split()) for path in (house.root / "docs").rglob("*.md"))


# ---- the table ------------------------------------------------------------------------------------------------------


def rows(house: House) -> list[tuple[str, str, str, Iterable[str]]]:
    """Each row: what is counted, the figure of this tree, what is asked after issue 45 and after 46, the names behind it."""
    loop, proofs = the_loop(house)
    prompt, parameter = way(house, PROMPT), way(house, PARAMETER)
    vllm, touches, size, fields = (
        rooms_that_import(house, "vllm"),
        private_touches(house),
        lines(house),
        field_places(house),
    )
    edits, cases = mutations_with_paths(house)
    rounds = {(i, k): circles(house, inside=i, kind=k) for i in (False, True) for k in range(3)}
    counts = sorted(len(v) for v in fields.values()) or [0]

    def walked(w: Way) -> str:
        n = len(w.files) + len(w.proofs)
        told = f"{n} ({len(w.files)}, and {len(w.proofs)} proofs)"
        return told if not w.faults else f"NOT TRUE, at least {told}"

    def behind(w: Way) -> list[str]:
        return [*w.files, *(f"{p} (proof: {w.calls[p]})" for p in w.proofs)]

    def circle(inside: bool) -> str:
        first, second, third = (len(rounds[inside, k]) for k in range(3))
        return f"{first}; {second} with imports in functions; {third} with those for type checkers"

    def around(inside: bool) -> Iterable[str]:
        return (" - ".join(one) for one in rounds[inside, 2])

    touched = [f"{file}:{line} {name}" for file, line, name in touches]
    share = f"{100 * size['imports'] / max(size['code'], 1):.1f} % of {size['code']} lines"
    declared = f"{counts[0]} to {counts[-1]}, mean {sum(counts) / len(counts):.1f}"
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
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout to count"
    )
    parser.add_argument("--files", action="store_true", help="print the names behind each figure")
    asked = parser.parse_args()
    house = House(asked.tree.resolve())
    print("| | this tree | asked, first half | asked, second half |\n|---|---|---|---|")
    table = rows(house)
    for what, figure, wanted, _ in table:
        print(f"| {what} | {figure} | {' | '.join(w.strip() or '-' for w in wanted.split('|'))} |")
    for what, _, _, names in table if asked.files else ():
        print(f"\n{what}:", *names, sep="\n  ")
    faults = [f for route in (PROMPT, PARAMETER) for f in way(house, route).faults]
    for fault in faults:
        print(
            f"THE WAY IS BROKEN: {fault}. Mend the route in scripts/house.py, or its count is too small.",
            file=sys.stderr,
        )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
