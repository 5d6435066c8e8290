"""The program of vLLM's server: its parser, its settings, and how it is run on the first node and on later ones."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


def server_parser() -> argparse.ArgumentParser:
    """The parser of the server's command line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def names_of_arguments(parser: argparse.ArgumentParser) -> set[str]:
    """The whole names of all arguments, with dashes."""
    return set(parser._option_string_actions)


def build_server(given: argparse.Namespace | AsyncEngineArgs) -> None:
    """Let vLLM build the settings of a server.

    Raises:
        Exception: of vLLM, about a value that it cannot use.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    AsyncEngineArgs.from_cli_args(given).create_engine_config(UsageContext.OPENAI_API_SERVER)


def run_server(given: argparse.Namespace) -> None:
    """Run the server until it ends. A later node only runs workers, because the first node answers calls."""
    if given.node_rank == 0:
        # It reads the command line again.
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()
        return
    from vllm.entrypoints.cli.serve import run_headless

    given.headless, given.api_server_count = True, 0
    run_headless(given)
