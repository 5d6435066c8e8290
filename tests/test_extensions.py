"""What the core asks of extras by name."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from lockstep import extensions
from lockstep.errors import InputError
from lockstep.extensions import load

PLACES = [
    *extensions.COMMANDS.values(),
    *extensions.PROGRAMS.values(),
    *extensions.ADAPTERS.values(),
    *extensions.SERVER_FLAGS.values(),
    *(place for places in extensions.FIELDS.values() for place in places),
]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_asked_for_by_name_exists(place: str) -> None:
    assert callable(load(place))


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "lockstep.extras.agents.web", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(InputError, match=r"agents needs starlette.*pip install 'lockstep-rl\[gateway\]'"):
        load("lockstep.extras.agents.web:Gateway")


def test_a_mistake_of_our_own_is_no_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lockstep\.extras\.agents\.nothing"):
        load("lockstep.extras.agents.nothing:run")


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("lockstep.environments.openenv", "lockstep.extras.environments.openenv"),
        ("lockstep.environments.textarena", "lockstep.extras.environments.textarena"),
        ("lockstep.environments.verifiers", "lockstep.extras.environments.verifiers"),
        ("lockstep.integrations.trl", "lockstep.extras.trl.vllm_generation"),
    ],
)
def test_an_earlier_name_gives_the_same_module(earlier: str, now: str) -> None:
    if earlier.endswith("trl"):
        pytest.importorskip("trl")
    assert import_module(earlier) is import_module(now)
