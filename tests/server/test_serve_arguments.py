"""Every argument of vLLM's server is either free for users or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import VLLM

from lockstep.engines.vllm.source import names_of_server
from lockstep.errors import InputError
from lockstep.server.command import check_names

pytestmark = VLLM

FREE = set((Path(__file__).parent / "free_arguments.txt").read_text().split())


@pytest.fixture(scope="module")
def arguments() -> set[str]:
    """The names of all arguments of this vLLM's server."""
    from lockstep.engines.vllm.port.engine import server_parser

    return {action.dest for action in server_parser()._actions} - {"help"}


def test_each_argument_is_either_free_or_refused(arguments: set[str]) -> None:
    """After an upgrade of vLLM: read what a new argument does, then add it to `free_arguments.txt` or command.py."""
    refused = set()
    for name in arguments:
        try:
            check_names([name])
        except InputError:
            refused.add(name)
    assert arguments - refused - FREE == set(), "nobody has judged these"
    assert FREE - arguments == set(), "vLLM has none of these"
    assert FREE & refused == set()


def test_the_names_that_are_read_from_the_source_are_all_of_the_parser(arguments: set[str]) -> None:
    others = {"model_tag", *(name for name in arguments if name.startswith("_"))}
    assert arguments - others <= names_of_server()
    assert "max_num_seq" not in names_of_server()


def test_nothing_that_is_free_has_the_name_of_a_port_an_address_or_another_program() -> None:
    # These open no port and name no other program, or the user asks for several nodes with them.
    known = {"master_addr", "master_port", "allowed_media_domains", "disable_access_log_for_endpoints"}
    known |= {"enable_tower_connector_lora", "h11_max_incomplete_event_size"}
    known |= {"enable_tokenizer_info_endpoint", "enable_server_load_tracking", "device_ids"}
    words = (
        "port",
        "addr",
        "endpoint",
        "host",
        "url",
        "rpc",
        "server",
        "connector",
        "transfer",
        "event",
        "remote",
    )
    assert {name for name in FREE if any(word in name for word in words)} <= known
