"""The digest of a reward function changes with what it computes in the user's own files, and nothing else."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lockstep
from lockstep.watch.code_digest import code_digest
from lockstep.whose_code import is_installed, is_users

HELPER = "def helped(x):\n    return x + 1\n"
FILE = """
import math
import helper_of_rewards

WEIGHTS = {"a": 1.0}
calls = 0

class Table:
    size = 3

    def at(self, x):
        return x * self.size

def other():
    return 1

def inner(x):
    return Table().at(x)

def score(completions, **_):
    global calls
    calls += 1
    return [inner(len(c)) * WEIGHTS["a"] + helper_of_rewards.helped(math.pi) for c in completions]
"""
NAMES = ("rewards_for_digest", "helper_of_rewards")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests, because the packages are read anew for every search path."""
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture
def load(place: Path) -> Iterator[Any]:
    """A function that gives `score` of a file with this text, beside a helper file."""
    sys.path.insert(0, str(place))

    def loaded(text: str = FILE, helper: str = HELPER) -> Any:
        for name in NAMES:
            sys.modules.pop(name, None)
        for name, content in zip(NAMES, (text, helper), strict=True):
            path = place / f"{name}.py"
            path.unlink(missing_ok=True)
            path.write_text(content)
        importlib.invalidate_caches()
        spec = importlib.util.spec_from_file_location(NAMES[0], place / f"{NAMES[0]}.py")
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[NAMES[0]] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module.score

    yield loaded
    sys.path.remove(str(place))
    for name in NAMES:
        sys.modules.pop(name, None)


CHANGES = {
    "its own text": ("global calls", "global calls  # and more"),
    "a function that it calls": ("return Table().at(x)", "return Table().at(x) + 1"),
    "a class two calls away": ("size = 3", "size = 4"),
    "a table of constants": ('"a": 1.0', '"a": 2.0'),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_the_function_uses_changes_the_digest(load: Any, what: str) -> None:
    before = code_digest(load())
    assert code_digest(load(FILE.replace(*CHANGES[what]))) != before
    assert code_digest(load()) == before


def test_a_change_in_another_file_of_the_users_changes_the_digest(load: Any) -> None:
    before = code_digest(load())
    assert code_digest(load(helper=HELPER.replace("+ 1", "+ 2"))) != before


TRAINS = "import lockstep\n\ndef main():\n    lockstep.GRPOTrainer().train()\n\n"


def test_every_file_counts_whole_and_of_a_script_that_trains_what_the_function_uses(load: Any) -> None:
    unused = ("def other():\n    return 1", "def another():\n    return 2")
    before = code_digest(load())
    assert code_digest(load(FILE.replace(*unused))) != before
    made = "lockstep.GRPOTrainer(reward_funcs=score, args=lockstep.GRPOConfig(max_steps=%s)).train(%s)"
    end = f"\nif __name__ == '__main__':\n    {made}\n"
    before = code_digest(load(TRAINS + FILE + end % (4, "")))
    assert (
        code_digest(load(TRAINS + FILE.replace(*unused) + end % (400, "resume_from_checkpoint=True")))
        == before
    )
    for old, new in CHANGES.values():
        assert code_digest(load(TRAINS + FILE.replace(old, new) + end % (4, ""))) != before


NAMESAKES = """
class Judge:
    config = 1

def score(completions, args=None, **more):
    config = [len(c) for c in completions]
    steps = more.get("max_steps")
    return [Judge.config for trainer in config if args is None or args.max_steps]
"""


@pytest.mark.parametrize("name", ["args", "config", "trainer", "steps", "max_steps"])
def test_a_variable_of_the_function_is_not_the_global_of_that_name(load: Any, name: str) -> None:
    before = code_digest(load(f"{TRAINS}{name} = 10\n{NAMESAKES}"))
    assert code_digest(load(f"{TRAINS}{name} = 20\n{NAMESAKES}")) == before
    read = f"def score(completions, **_):\n    return [{name} for _ in completions]\n"
    before = code_digest(load(f"{TRAINS}{name} = 10\n{read}"))
    assert code_digest(load(f"{TRAINS}{name} = 20\n{read}")) != before


def test_texts_that_are_no_paths_are_no_fault(load: Any) -> None:
    code_digest(load(f'{FILE}\nLONG = "{"a" * 270}.py"\n'))


def test_a_call_does_not_change_the_digest(load: Any) -> None:
    score = load()
    before = code_digest(score)
    score(["ab"])
    assert code_digest(score) == before


class Counting:
    def __init__(self, scale: float) -> None:
        self.scale, self.calls = scale, 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        return [self.scale for _ in completions]


def test_an_object_counts_with_the_values_that_it_was_made_with() -> None:
    one = Counting(1.0)
    before = code_digest(one)
    one(["a"])
    assert code_digest(one) == before == code_digest(Counting(1.0))
    assert code_digest(Counting(2.0)) != before


def scaled(completions: list[str], scale: float, **_: Any) -> list[float]:
    return [scale for _ in completions]


def test_the_arguments_of_a_partial_function_and_the_cells_of_a_closure_count() -> None:
    def closed(scale: float) -> Any:
        return lambda completions, **_: [scale for _ in completions]

    for make in (lambda scale: functools.partial(scaled, scale=scale), closed):
        assert code_digest(make(1.0)) == code_digest(make(1.0)) != code_digest(make(2.0))


def test_a_models_weights_count() -> None:
    model = torch.nn.Linear(2, 1)
    before = code_digest(model)
    with torch.no_grad():
        model.weight[0, 0] *= 1.01
    assert code_digest(model) != before


def test_a_wrapper_of_a_built_in_function_has_a_digest() -> None:
    @functools.wraps(dict.update)
    def wrapper(*given: Any) -> None:
        dict.update(*given)

    def reward(completions: list[str], **_: Any) -> None:
        wrapper({}, {})

    assert code_digest(reward) == code_digest(reward)


# ---- what a reward of +2 or −2 may hide behind
# ------------------------------------------------------------------------

# By kind: a reward of +2 that is reached in this way. A second file stands behind `# beside`. Every `2` becomes `-2`.
HIDDEN_TEXT = """
# a base class
class Base:
    def of(self):
        return 2
class Own(Base):
    pass
value = Own().of
# a base class in another file
import helper_of_rewards as h
class Own(h.Base):
    pass
value = Own().of
# beside
class Base:
    def of(self):
        return 2
# a dictionary of functions
def good():
    return 2
TABLE = {'good': good}
value = lambda: TABLE['good']()
# a list of lambdas
TABLE = [lambda: 2]
value = lambda: TABLE[0]()
# a partial function
import functools
def of(x):
    return x
value = functools.partial(of, 2)
# a partial function with a table
import functools
def of(x):
    return x['a']
value = functools.partial(of, {'a': 2})
# an assignment inside if
import sys
if sys.platform:
    SIGN = 2
else:
    SIGN = 3
value = lambda: SIGN
# an assignment in a loop in with
import contextlib
with contextlib.suppress(KeyError):
    for SIGN in (2,):
        pass
value = lambda: SIGN
# a global that is changed later
TABLE = {}
TABLE['a'] = 2
value = lambda: TABLE['a']
# a global that a function changes
SIGN = 1
def turn():
    global SIGN
    SIGN = 2
turn()
value = lambda: SIGN
# an import inside the function
def value():
    from helper_of_rewards import of
    return of()
# beside
def of():
    return 2
# an import by name
import importlib
def value():
    return importlib.import_module('helper_of_rewards').of()
# beside
def of():
    return 2
# a module's attribute
import helper_of_rewards
value = lambda: helper_of_rewards.SIGN
# beside
SIGN = 2
# a file that runs another file
import runpy, pathlib
PLACE = pathlib.Path(__file__).with_name('helper_of_rewards.py')
value = lambda: runpy.run_path(str(PLACE))['SIGN']
# beside
SIGN = 2
# a name that is looked up
def of_good():
    return 2
value = lambda: globals()['of_' + 'good']()
# a default argument
SIGN = 2
def value(sign=SIGN):
    return sign
# a closure over a table
def make(table):
    return lambda: table['a']
value = make({'a': 2})
# a property
class Own:
    @property
    def of(self):
        return 2
value = lambda: Own().of
# a class attribute set from outside
class Own:
    sign = 1
setattr(Own, 'sign', 2)
value = lambda: Own.sign
# a cached function
import functools
@functools.lru_cache
def value():
    return 2
# a dispatched function
import functools
@functools.singledispatch
def of(x):
    return 3
@of.register
def _(x: int):
    return 2
value = lambda: of(1)
# a decorator
def turned(f):
    return lambda *a: 2
@turned
def value():
    return 1
# an array
import numpy
TABLE = numpy.array([2.0])
value = lambda: float(TABLE[0])
# an enumeration
import enum
class Kind(enum.Enum):
    good = 2
value = lambda: Kind.good.value
# a data class
import dataclasses
@dataclasses.dataclass
class Own:
    sign: int = 2
OWN = Own()
value = lambda: OWN.sign
# a regular expression
import re
value = lambda: int(re.sub('x', '', 'x2'))
# text for exec
CODE = 'sign = 2'
def value():
    found = {}
    exec(CODE, found)
    return found['sign']
"""
HIDDEN = {
    title: tuple(f"{text}\n# beside\n".split("\n# beside\n")[:2])
    for title, text in re.findall(
        r"^# (?!beside)(.+)\n((?:(?!# (?!beside)).*\n)+)", HIDDEN_TEXT, re.MULTILINE
    )
}
CALLED = "\n\ndef score(completions, **_):\n    return [value() for _ in completions]\n"


# A file counts whole, and a script in part: CI has the harder one.
@pytest.mark.parametrize(
    "script", [pytest.param(False, marks=pytest.mark.release, id="file"), pytest.param(True, id="script")]
)
@pytest.mark.parametrize("what", HIDDEN)
def test_no_reward_is_turned_unseen(load: Any, what: str, script: bool) -> None:
    text, helper = HIDDEN[what]
    trains = TRAINS if script else ""
    score = load(trains + text + CALLED, helper)
    before = code_digest(score)
    assert score(["a"]) == [2]
    score = load(trains + text.replace("2", "-2") + CALLED, helper.replace("2", "-2"))
    after = code_digest(score)
    assert score(["a"]) == [-2]
    assert after != before
    # The same text again, after calls in this process.
    assert code_digest(load(trains + text + CALLED, helper)) == before


OUTSIDE: dict[str, tuple[str, str]] = {
    "a global of another file": ("import helper_of_rewards as h\nvalue = lambda: h.SIGN", "SIGN = 2"),
    "a table of another file": ("import helper_of_rewards as h\nvalue = lambda: h.T['a']", "T = {'a': 2}"),
    "a function of another file": (
        "import helper_of_rewards as h\nvalue = lambda: h.of()",
        "def of():\n    return 2",
    ),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_program_that_changes_the_file_of_a_reward_from_outside_is_seen(load: Any, what: str) -> None:
    text, helper = OUTSIDE[what]
    score = load(text + CALLED, helper)
    before = code_digest(score)
    module = sys.modules["helper_of_rewards"]
    module.SIGN, module.T, module.of = -2, {"a": -2}, lambda: -2
    assert score(["a"]) == [-2]
    assert code_digest(score) != before


STEADY = """
import collections, functools, itertools, logging, os, random, threading, time, uuid, torch
from pathlib import Path

START, RUN, HERE = time.time(), uuid.uuid4().hex, Path(__file__).parent
TOKEN = os.environ.get("TOKEN_OF_DIGEST", "")
FILES = {"train": str(HERE / "train.jsonl"), "sizes": [1, 2]}
log, lock, numbers, rng = logging.getLogger("x"), threading.Lock(), itertools.count(), random.Random()
SEEN, CACHE, COUNTS, calls = [], {}, collections.Counter(), 0

class Judge:
    def __init__(self):
        self.began, self.table, self.asked, self.last = time.monotonic(), {}, 0, ""
        self.mean = torch.zeros(1)

    @functools.cached_property
    def size(self):
        return 1

    def ask(self, text):
        self.asked += self.size
        setattr(self, "last", text)
        self.mean.add_(1.0)
        self.table[text] = self.asked
        return 1.0

JUDGE = Judge()
WHERE, VERSION = os.path.abspath("."), logging.__version__

def score(completions, **_):
    global calls
    calls += next(numbers)
    for c in completions:
        SEEN.append(c)
        CACHE[c] = JUDGE.ask(c) + rng.random()
        COUNTS[c] += 1
        CACHE.setdefault(str(TOKEN) + RUN, []).append(time.time() - START)
    with lock:
        log.info(str(FILES))
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("script", [False, True], ids=["file", "script"])
def test_clocks_counters_caches_and_places_are_no_change(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: bool
) -> None:
    text = (TRAINS if script else "") + STEADY
    score = load(text)
    before = code_digest(score)
    score(["a", "b"])
    assert code_digest(score) == before
    monkeypatch.setenv("TOKEN_OF_DIGEST", "other")
    assert code_digest(load(text)) == before
    # A copy of the project in another folder.
    (tmp_path / "away").mkdir()
    path = tmp_path / "away" / "rewards_for_digest.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("rewards_for_digest", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "rewards_for_digest", module)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    assert str(code_digest(module.score)) == str(before)


def test_the_files_of_a_command_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("import tools_of_agent\n")
    (tmp_path / "tools_of_agent.py").write_text("SIGN = 2\n")
    before = code_digest("python agent.py --fast")
    assert code_digest("python agent.py --slow") != before
    (tmp_path / "tools_of_agent.py").write_text("SIGN = -2\n")
    assert code_digest("python agent.py --fast") != before


# ---- the user's own code, and installed code
# ---------------------------------------------------------------------------

PACKAGE = "class Base:\n    size = 1\n\ndef helped(x):\n    return Base.size + x\n"


def write_package(folder: Path, name: str, kind: str) -> str:
    """A package with the metadata that each way to install it leaves. Returns its file."""
    (folder / name).mkdir(parents=True)
    file = folder / name / "__init__.py"
    file.write_text(PACKAGE)
    facts = folder / f"{name}-1.0.{'dist-info' if kind in ('pip', 'editable') else 'egg-info'}"
    facts.mkdir()
    (facts / ("METADATA" if kind in ("pip", "editable") else "PKG-INFO")).write_text(
        f"Name: {name}\nVersion: 1.0\n"
    )
    if kind == "pip":
        (facts / "RECORD").write_text(
            f"{name}/__init__.py,sha256=x,1\n{facts.name}/RECORD,,\n../../../bin/x,,\n"
        )
    elif kind == "editable":
        (facts / "RECORD").write_text(f"__editable__.{name}.pth,,\n{name},,\n")
        (facts / "direct_url.json").write_text(
            json.dumps({"dir_info": {"editable": True}, "url": "file:///x"})
        )
    elif kind == "a project's folder":
        (facts / "SOURCES.txt").write_text(f"{name}/__init__.py\n")
    (facts / "top_level.txt").write_text(f"{name}\n")
    return str(file)


KINDS = {"pip": True, "a Linux distribution": True, "editable": False, "a project's folder": False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", [False, True], ids=["in its place", "by a link"])
def test_what_is_installed_is_what_python_knows_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    """The folder stands for one of the system's packages, or one that a `.pth` file names."""
    folder = tmp_path / "packages"
    file = write_package(folder, "package_for_digest", kind)
    beside = folder / "rewards_beside_packages.py"
    beside.write_text("def score(completions, **_):\n    return [1.0 for c in completions]\n")
    if linked:
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    monkeypatch.syspath_prepend(str(folder))
    assert is_installed(file) is KINDS[kind]
    # A file that the user has put beside packages is the user's own.
    assert not is_installed(str(beside))


def test_python_and_lockstep_and_packages_are_not_the_users_and_a_file_with_such_a_name_is(
    tmp_path: Path,
) -> None:
    assert not any(
        map(is_users, (json.loads, Path, pytest.fixture, torch.nn.Linear, len, lockstep.GRPOTrainer))
    )
    assert is_users(score_of_here)
    assert is_users(Counting)
    for name in ("json.py", "torch.py"):
        assert not is_installed(str(tmp_path / name))


def score_of_here(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_a_function_or_class_that_was_typed_into_a_prompt_is_the_users() -> None:
    typed: dict[str, Any] = {"__name__": "__main__"}
    text = "class Typed:\n    size = 3\n\nSEEN, calls = [], 0\n\ndef score(completions, **_):\n"
    exec(f"{text}    global calls\n    calls += 1\n    SEEN.append(1)\n    return Typed.size", typed)
    with patch.dict(vars(sys.modules["__main__"])):
        vars(sys.modules["__main__"]).pop("__file__", None)
        assert is_users(typed["Typed"])
        before = code_digest(typed["score"])
        assert typed["score"](["a"]) == 3
        assert code_digest(typed["score"]) == before


def test_a_package_outside_of_this_environment_is_not_read(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(write_package(tmp_path / "system", "package_for_digest", "pip"))
    monkeypatch.syspath_prepend(str(tmp_path / "system"))
    monkeypatch.delitem(sys.modules, "package_for_digest", raising=False)
    text = "import package_for_digest\n" + FILE.replace(
        "helper_of_rewards.helped", "package_for_digest.helped"
    )
    before = code_digest(load(text))
    file.write_text(PACKAGE.replace("size = 1", "size = 2"), encoding="utf-8")
    del sys.modules["package_for_digest"]
    assert code_digest(load(text)) == before


def test_each_file_is_read_and_parsed_once(load: Any) -> None:
    many = FILE + "".join(
        f"class C{i}(Table):\n    def at(self, x):\n        return x\n\n" for i in range(30)
    )
    score = load(
        many.replace("return Table().at(x)", "return " + " + ".join(f"C{i}().at(x)" for i in range(30)))
    )
    read: Counter[str] = Counter()
    real, parsed = Path.read_bytes, ast.parse

    def read_bytes(self: Path, *given: Any, **named: Any) -> bytes:
        read[str(self)] += 1
        return real(self, *given, **named)

    def parse(*given: Any, **named: Any) -> Any:
        read["parsed"] += 1
        return parsed(*given, **named)

    with patch.object(Path, "read_bytes", read_bytes), patch("ast.parse", parse):
        code_digest(score)
    assert [count for path, count in read.items() if path.endswith("rewards_for_digest.py")] == [1]
    # The rewards and the helper file.
    assert read["parsed"] <= 2
