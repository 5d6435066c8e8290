"""vLLM has what Lockstep patches, reads and relies on: the installed release, and others that cannot be installed."""

from __future__ import annotations

import ast
import json
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_facts import Fact, Sources, facts, holds, read

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
OTHERS = sorted(path.stem.removeprefix("vllm_facts_") for path in (ROOT / "tests").glob("vllm_facts_*.json"))

# What differs in another release from the installed one, by the fact's text, with what it means for Lockstep.
KNOWN_DIFFERENCES: dict[str, dict[str, str]] = {
    "0.33.0": {
        "vllm.v1.worker.gpu.sample.sampler: Sampler._sample_random(processed_logits, expanded_idx_mapping, "
        "idx_mapping_np, "
        "pos)": "one more argument after those that a fault of the self-test reads; it passes all on",
        "vllm.entrypoints.launchers.cli_args: make_arg_parser": "breaks: `lockstep serve`. The function is in "
        "vllm.entrypoints.common.cli_args now",
    },
}


@cache
def installed() -> Sources:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Sources(Path(spec.submodule_search_locations[0]).parent)


@cache
def of_release(version: str) -> dict[str, str | None]:
    return json.loads((ROOT / "tests" / f"vllm_facts_{version}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fact", facts(), ids=str)
def test_the_installed_vllm_has_what_lockstep_relies_on(fact: Fact) -> None:
    found = read(installed(), fact)
    assert holds(fact, found), f"{fact.module} has {found}, and Lockstep relies on {fact.line}"


@pytest.mark.parametrize("version", OTHERS)
def test_another_release_has_the_same_or_its_difference_is_named(version: str) -> None:
    found, known = of_release(version), KNOWN_DIFFERENCES[version]
    assert list(found) == [str(fact) for fact in facts()], f"make vllm-facts VERSION={version}"
    differing = {str(fact) for fact in facts() if found[str(fact)] != read(installed(), fact)}
    assert differing == known.keys()
    broken = {str(fact) for fact in facts() if not holds(fact, found[str(fact)])}
    assert all(known[name].startswith("breaks:") is (name in broken) for name in known)


def test_every_import_from_vllm_stands_in_the_table() -> None:
    known = {
        (fact.module, fact.line.partition("(")[0].partition("@")[0].partition(".")[0]) for fact in facts()
    }
    known |= {(fact.module.rpartition(".")[0], fact.module.rpartition(".")[2]) for fact in facts()}
    missing = []
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if " vllm" in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                missing += [
                    f"{file.name}: from {node.module} import {alias.name}"
                    for alias in node.names
                    if (node.module, alias.name) not in known
                ]
    assert not missing


# What vLLM documents for programs that use it. Everything else may change with a release.
DOCUMENTED = {
    "vllm",
    "vllm.config",
    "vllm.distributed.weight_transfer.base",
    "vllm.lora.request",
    "vllm.outputs",
}


def test_one_room_imports_vllm_and_only_its_port_what_depends_on_the_release() -> None:
    room = ROOT / "src/lockstep/engines/vllm"
    strangers, too_deep = [], []
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if " vllm" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            own = [name for name in names if name.partition(".")[0] == "vllm"]
            strangers += own if room not in file.parents else []
            too_deep += [name for name in own if name not in DOCUMENTED and room / "port" not in file.parents]
    assert strangers == too_deep == []


SOURCES = {
    "__init__": 'LAZY = {"Late": ".a:Late"}\nfrom .b import *\nfrom .a import first as other\n',
    "a": """
            LIMIT = 128
            class Base:
                kept: int = 0
                def __init__(self, config, *, room=1): self.made = config
            class Late(Base):
                def run(self, one: int, two=2, *rest, last=None): pass
            def first(x): return x + 1
            """,
    "b": "def starred(): pass\n",
}


class TestReading:
    """The reader itself, on a package of a few lines."""

    @pytest.fixture
    def sources(self, tmp_path: Path) -> Sources:
        (tmp_path / "vllm").mkdir()
        for name, text in SOURCES.items():
            (tmp_path / "vllm" / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return Sources(tmp_path)

    @pytest.mark.parametrize(
        ("module", "line", "is_there"),
        [
            ("vllm", "Late", True),
            ("vllm", "other(x)", True),
            ("vllm", "starred", True),
            ("vllm", "Lost", False),
            ("vllm.c", "Late", False),
            ("vllm.a", "Late.run(one, two, +last)", True),
            ("vllm.a", "Late.run(two, one)", False),
            ("vllm.a", "Late.run(one, +lost)", False),
            ("vllm.a", "Late.__init__(config, +room)", True),
            ("vllm.a", "Late@kept", True),
            ("vllm.a", "Late@made", True),
            ("vllm.a", "Late@lost", False),
            ("vllm.a", "LIMIT = 128", True),
            ("vllm.a", "LIMIT = 129", False),
            ("vllm.a", "~ return x + 1", True),
            ("vllm.a", "~ return x = 1", False),
        ],
    )
    def test_a_fact_holds_or_not(self, sources: Sources, module: str, line: str, is_there: bool) -> None:
        fact = Fact(module, line)
        assert holds(fact, read(sources, fact)) is is_there
