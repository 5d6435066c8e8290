"""Reads a tree's source without running it, and follows a prompt and a parameter through it.

`scripts/house.py` prints the counts.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# Rooms in which every file is a proof.
PROOF_ROOMS = {"parity", "watch", "definitions"}

# What a text prompt of a GRPO run in one process passes through, in order, with vLLM as the engine: the route. Write
# `old|new` where something gets another name; then older trees can still be counted.
PROMPT = """
    GRPOTrainer OnlineTrainer.__init__ read_data read_prompts load_prompts PromptReader.read PromptReader.ids
    render_prompt Template.ids whole_numbers Prompt make_loader OnlineTrainer.training_step TrainingLoop.micro_step
    RolloutSource.sample sampling_of Sampling sampled_now Driver.run Start check_requests GenerationRequest
    CallLoop.start single_turn Conversation.sample Branch.sample Inbox.ask Running.finish
    VLLMInProcess.serve Inbox.taken sampling_params completion Completion Inbox.answer Rollout RolloutGroup
    RolloutSource.score GroupRewards.score|Scoring.score reward_scorer RewardScorer.score RewardScorer.finish
    call_functions call_within Preparation.generation TrainingSequence prepare_generation joined_branches
    GRPOObjective.with_advantages group_advantages OptimizerStep.learn learn Policy.packs pack_sequences
    SortedPaths cut_tree Pack Policy.score score_pack token_logps TokenBatch.of GRPOObjective.loss
    clipped_policy_loss Tally.mean
"""
# What a parameter passes through on its way to vLLM in this process.
PARAMETER = """
    TrainingLoop.rollout RolloutSource.push RolloutSource.send push_weights weights_of PlainSource checkpoint_tensors
    Update one_push TensorSpec check_live VLLMInProcess.begin_update VLLMInProcess.load OwnWorker.load register
    _LayerwiseTransfer.start_weight_update begin_reload InProcessWeightTransfer.receive_weights
    _LayerwiseTransfer.finish_weight_update HeldWeights.add LoadedWeights
"""
# The same in trees without `RolloutSource.send`: the push proved itself on its way, instead of telling the watch.
SELF_PROVEN_PARAMETER = """
    TrainingLoop.rollout RolloutSource.push Proofs.sync ProvenPusher.push push_weights weights_of
    PlainSource checkpoint_tensors causal_model Update one_push TensorSpec VLLMInProcess.begin_update
    VLLMInProcess.load OwnWorker.load register _LayerwiseTransfer.start_weight_update begin_reload
    InProcessWeightTransfer.receive_weights HeldWeights.add LoadedWeights check_live ModuleProbe.measure
    probe_limit VLLMInProcess.probe probe_modules probe_inputs
"""
# Where a way begins: what the user calls, what transformers calls, and what vLLM calls.
STARTS = {"GRPOTrainer", "OnlineTrainer.training_step", "TrainingLoop.rollout", "register"}
STARTS |= {"_LayerwiseTransfer.start_weight_update", "InProcessWeightTransfer.receive_weights"}

# The class to which the way tells its events, so that proofs hear of them.
WATCH = "Watch"
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
                    self.names[a.asname or a.name.split(".")[0]] = (
                        a.name if a.asname else a.name.split(".")[0],
                        "",
                    )
            else:
                checks = isinstance(sub, ast.If) and "TYPE_CHECKING" in ast.unparse(sub.test)
                self._read(sub, local or isinstance(sub, FUNCTIONS), typing or checks)

    @cached_property
    def raises_proofs(self) -> bool:
        """Whether the file makes a ProofError itself."""
        return any(
            isinstance(n, ast.Call) and ast.unparse(n.func).endswith("ProofError")
            for n in ast.walk(self.tree)
        )

    @property
    def in_proof_room(self) -> bool:
        """Whether the file is in a room of proofs. The contract of the events is no proof."""
        return not _is_protocol(self.top.get(WATCH)) and not PROOF_ROOMS.isdisjoint(self.name.split("."))

    @property
    def is_proof(self) -> bool:
        """Whether the file is in a room of proofs, or makes a ProofError itself."""
        return self.in_proof_room or self.raises_proofs


def _is_protocol(node: Def | None) -> bool:
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


class House:
    """The source of a tree: `package` is its top module's folder."""

    def __init__(self, tree: Path) -> None:
        self.root, self.package = tree, tree / "src" / "lockstep"
        self.modules: dict[str, Module] = {}
        for path in sorted(self.package.rglob("*.py")):
            parts = path.relative_to(self.package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path, path.read_text(encoding="utf-8"), parts[1])
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


# ---- the two ways ------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """What a reader opens.

    Attributes:
        files: where the route's names stand.
        proofs: further files that the way calls and that prove, with who calls them.
        calls: every further file that the way calls, with who calls it.
        behind: files of proofs that the watch calls, and the way does not. They are not opened.
        faults: why the count is not true.
    """

    files: list[str]
    proofs: dict[str, str]
    calls: dict[str, str]
    behind: list[str]
    faults: list[str]

    @property
    def opened(self) -> int:
        """How many files a reader opens."""
        return len(self.files) + len(self.proofs)


def _family(module: Module, node: ast.ClassDef | None) -> list[ast.ClassDef]:
    """A class and its bases in the same file."""
    if node is None:
        return []
    bases = [module.top.get(ast.unparse(base)) for base in node.bases]
    return [node, *(c for base in bases if isinstance(base, ast.ClassDef) for c in _family(module, base))]


def _in_file(module: Module, node: Def, owner: ast.ClassDef | None) -> list[tuple[Any, ast.ClassDef | None]]:
    """A function with all functions and methods of its file that it names, and that these name.

    Of a class its constructor.
    """
    todo: list[tuple[Any, ast.ClassDef | None]] = [(node, owner)]
    seen: list[tuple[Any, ast.ClassDef | None]] = []
    while todo:
        one, its = todo.pop(0)
        if any(one is s for s, _ in seen):
            continue
        seen.append((one, its))
        if isinstance(one, ast.ClassDef):
            todo += [
                (m, one)
                for m in one.body
                if isinstance(m, FUNCTIONS) and m.name in ("__init__", "__post_init__")
            ]
            continue
        todo += [
            (module.top[n.id], None) for n in ast.walk(one) if isinstance(n, ast.Name) and n.id in module.top
        ]
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


def _attributes(
    house: House, module: Module, owner: ast.ClassDef
) -> dict[str, list[tuple[Module, ast.ClassDef]]]:
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
    house: House, module: Module, function: Any, owner: ast.ClassDef | None, value: str = ""
) -> Iterator[tuple[Module, Def, ast.ClassDef | None]]:
    """What a function calls in other files: by name, or a method of an argument or of `self.x` whose class is known."""
    given = {a.arg: a.annotation for a in [*function.args.args, *function.args.kwonlyargs]}
    attributes = _attributes(house, module, owner) if owner else {}
    wanted = _with_value(function, value) if value else None
    for call in (
        n for n in ast.walk(function) if isinstance(n, ast.Call) and (wanted is None or n in wanted)
    ):
        what = call.func
        if (
            isinstance(what, ast.Name)
            and what.id in module.names
            and (hit := house.found(*module.names[what.id]))
        ):
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
                yield from (
                    (file, m, node) for m in node.body if isinstance(m, FUNCTIONS) and m.name == what.attr
                )


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
        names = {
            n.id for f, _ in _in_file(module, method, its) for n in ast.walk(f) if isinstance(n, ast.Name)
        }
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
            gets = {
                x.id for x in ast.walk(n) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)
            } & held
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


def _watching(house: House, node: ast.ClassDef) -> list[tuple[Module, ast.ClassDef]]:
    """The classes that have all methods of the protocol `Watch`; the class itself where it is no protocol."""
    wanted = {m.name for m in node.body if isinstance(m, FUNCTIONS)}
    classes = [
        (module, c)
        for module in house.modules.values()
        for c in module.top.values()
        if isinstance(c, ast.ClassDef)
    ]
    if not _is_protocol(node):
        return [(module, c) for module, c in classes if c is node]
    return [
        (module, c)
        for module, c in classes
        if not _is_protocol(c) and wanted <= {m.name for m in c.body if isinstance(m, FUNCTIONS)}
    ]


def way(house: House, route: str) -> Way:
    """The files that a reader opens who follows a value by hand.

    The route names, in order, each function and class of Lockstep that a text prompt (or a parameter) passes through.
    1. `files`: where these stand. This is the way without its proofs.
    2. `proofs`: the other files that the way itself calls, and that prove. A function of the way calls a file if it, or
       what it names in its own file, calls a function or class of it by name, or a method of an argument or of `self.x`
       whose class is known from an annotation or from a constructor call. A call proves if what is called stands in a
       room of proofs or names a file there, or if it gives nothing back and can raise ProofError in its own file.
    3. The watch: if the way tells it an event, its protocol and the file that implements it are opened, and count as
       proofs. The proofs behind it are not opened, and do not count. `behind` has them, and they are printed.
    4. `calls`: every file that the way calls, except exceptions. It is not part of the count.

    The count is not true if a name of the route stands nowhere, or in several places, or if no function of the way
    names it: then something new stands in between, and is missing in the route.
    """
    found = Way([], {}, {}, [], [])
    named: set[str] = set()
    stations: list[tuple[str, Module, Def, ast.ClassDef | None]] = []
    for step in route.split():
        hits = [hit for name in step.split("|") for hit in house.places.get(name, ())]
        if len(hits) != 1:
            found.faults.append(f"{step} stands in {len(hits)} places {[house.file(m) for m, *_ in hits]}")
        stations += [(step, *hit) for hit in hits]
    found.files = list(dict.fromkeys(house.file(module) for _, module, *_ in stations))
    behind: dict[str, None] = {}

    def note(into: dict[str, str], file: Module, why: str) -> None:
        if house.file(file) not in found.files:
            into.setdefault(house.file(file), why)

    for step, module, node, owner in stations:
        for function, its in _in_file(module, node, owner):
            for n in ast.walk(function):
                text = n.value if isinstance(n, ast.Constant) and isinstance(n.value, str) else ""
                named |= {getattr(n, "id", ""), getattr(n, "attr", ""), text}
            for other, what, of in _called(house, module, function, its, FOLLOWED.get(step, "")):
                if other is module or house.is_error(other, what):
                    continue
                note(found.calls, other, f"{step} calls {what.name}")
                if of is not None and of.name == WATCH:
                    note(found.proofs, other, f"{step} tells {what.name}")
                    for watcher, judge in _watching(house, of):
                        note(found.proofs, watcher, f"{judge.name} hears {what.name}")
                        for method in (m for m in judge.body if isinstance(m, FUNCTIONS)):
                            calls = _called(house, watcher, method, judge)
                            behind |= {house.file(m): None for m, w, o in calls if _proves(house, m, w, o)}
                elif _proves(house, other, what, of):
                    note(found.proofs, other, f"{step} calls {what.name}")
    for step, *_ in stations:
        if step not in STARTS and named.isdisjoint(name.split(".")[-1] for name in step.split("|")):
            found.faults.append(f"nothing on the way leads to {step}")
    found.behind = [file for file in behind if file not in found.files and file not in found.proofs]
    return found
